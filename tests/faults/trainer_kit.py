"""What the trainers of these tests are made of. They import this file; the tests do not.

A trainer appends what happens to it to one file of events, each a line of JSON with its process, slot, round and rank
and the monotonic clock, and it trains until the test releases it. So a test decides by what it sees, never by how long
something takes.
"""

import importlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import perdure

FOLDER = Path(os.environ["FAULTS_FOLDER"])
LIMIT_S = 60.0
STEP_S = 0.004
STEPS_OF_A_ROUND = 100_000
"""Steps are numbered on from round to round: a job that always fails at the same step is stopped, rightly."""

_step = 0
"""The last step, which a rank that waits for the test pings again."""

Fault = Callable[[perdure.Round, int], object]


def tell(event: str, round: perdure.Round | None = None, **more: Any) -> None:
    """Append an event. One small write at the end of a file is whole or absent, whoever dies."""
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[19])
    about = {} if round is None else {"round": round.index, "rank": round.rank, "world": round.world_size}
    slot = os.environ.get("PERDURE_SLOT", "")
    record = {"event": event, "pid": os.getpid(), "start": start, "slot": slot, "at": time.monotonic(), **about, **more}
    descriptor = os.open(FOLDER / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(record).encode() + b"\n")
    finally:
        os.close(descriptor)


def is_said(name: str) -> bool:
    """Whether the test, or another rank, has called `say(name)`."""
    return (FOLDER / f"said-{name}").exists()


def say(name: str) -> None:
    (FOLDER / f"said-{name}").touch()


def wait_said(name: str, round: perdure.Round | None = None) -> None:
    """Wait for `say(name)`, without looking like a hang if `round` is given."""
    end = time.monotonic() + LIMIT_S
    while not is_said(name):
        if time.monotonic() > end:
            raise TimeoutError(f"nobody said {name!r} within {LIMIT_S} s")
        if round is not None:
            round.ping(_step)
        time.sleep(0.002)


def run(
    fault: Fault | None = None,
    *,
    enter: Callable[[perdure.Round], object] | None = None,
    leave: Callable[[perdure.Round], object] | None = None,
    gloo: bool = False,
    together: bool = True,
) -> None:
    """Train in a resilient function until the test says `release`.

    enter: called first in each round. fault: called in every step, with the number of the step in its round, from 1.
    leave: called before the function returns. gloo: every step is an all_reduce. together: no rank begins its first
    step before all are inside the function.
    """

    if gloo:
        importlib.import_module("torch.distributed")  # before the gate, as trainers do

    @perdure.resilient
    def train(round: perdure.Round) -> None:
        global _step
        _step = round.index * STEPS_OF_A_ROUND
        tell("entered", round)
        if enter is not None:
            enter(round)
        share = _gloo_step(round) if gloo else _lone_step
        if together:
            meet(round)
        for step in range(1, STEPS_OF_A_ROUND):
            _step = round.index * STEPS_OF_A_ROUND + step
            round.ping(_step)
            if fault is not None:
                fault(round, step)
            if share():
                break
        if leave is not None:
            leave(round)
        tell("returned", round)

    train()
    tell("left")


def meet(round: perdure.Round) -> None:
    """Wait until every rank of the round is here."""
    say(f"in-{round.index}-{round.rank}")
    for rank in range(round.world_size):
        wait_said(f"in-{round.index}-{rank}", round)


def _lone_step() -> bool:
    time.sleep(STEP_S)
    return is_said("release")


def _gloo_step(round: perdure.Round) -> Callable[[], bool]:
    """All ranks learn in the same step that the test has released them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    tell("connected", round)

    def step() -> bool:
        flag = torch.tensor([1.0 if is_said("release") else 0.0, 1.0])
        dist.all_reduce(flag)
        if flag[1] != round.world_size:
            raise ValueError(f"an all_reduce over {round.world_size} ranks counted {flag[1]}")
        return bool(flag[0])

    return step
