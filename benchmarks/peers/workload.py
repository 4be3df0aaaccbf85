"""The training function that every system with rounds is measured with, so that they differ in nothing else."""

import argparse
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from events import Events

PING_INTERVAL_S = 0.02

Ping = Callable[[], None]


class Place(NamedTuple):
    """Where a worker stands in a round."""

    round: int
    rank: int
    world_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--fault", choices=["exception", "sigkill", "hang"], required=True)
    parser.add_argument("--fault-rank", type=int, required=True)
    parser.add_argument("--faults", type=int, required=True, help="rounds that end with a fault; the next one returns")
    parser.add_argument("--quiet", type=float, required=True, help="seconds before a fault, and up to twice that")


def work(place: Place, options: argparse.Namespace, events: Events, ping: Ping, store: dist.Store | None) -> None:
    """One round: join, do one collective, and train until a fault ends it; or return, if no fault is left."""
    stamp = {"round": place.round, "rank": place.rank, "world_size": place.world_size}
    events.emit("enter", **stamp)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    events.emit("collective", **stamp)
    ping()
    if place.round >= options.faults:
        dist.destroy_process_group()
        events.emit("return", **stamp)
        return

    # Every rank must be past the collective before one fails; the random part meets a poll at any phase.
    quiet_until = time.monotonic() + options.quiet * (1.0 + random.Random(place.round).random())
    failing = place.rank == options.fault_rank
    while not (failing and time.monotonic() > quiet_until):
        ping()
        time.sleep(PING_INTERVAL_S)
    ping()
    events.emit("fault", **stamp)
    fail(options.fault)


def fail(fault: str) -> None:
    if fault == "exception":
        raise RuntimeError("injected")
    if fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # a hang: the interpreter runs on, nothing reports progress
        time.sleep(0.005)
