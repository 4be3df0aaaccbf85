"""One rank of a job that trains and saves, for `checkpoint.py`: the loop is the same for all methods of saving.

Commands come by standard input: `turn N` measures save N, `end` ends the process. What was found goes to the events.

A turn: some training steps for the base, stamp the state, save, overwrite parts of the state at once, train until the
save is done, sync what the method left unsynced, some more steps for the base, read the save back and compare every
element with the stamp. All ranks are at the same point of a turn.
"""

import argparse
import importlib
import logging
import math
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_limits import Limits
from checkpoint_method import Method, Place, State, settle
from events import Events

BLOCKS = 84
"""Of eight tensors each, over all ranks: some hundred tensors whatever the size."""

PARTS = 8
"""A training step updates one in so many tensors."""

BASE_STEPS = 20
"""Timed before a save, and again after it."""

MODULES = {"limits": "checkpoint_limits", "ours": "checkpoint_ours", "torch": "checkpoint_torch"}
MODULES |= {"dcp": "checkpoint_torch", "nvrx": "checkpoint_nvrx"}

if not torch.cuda.is_available():
    # nvidia-resiliency-ext calls these whatever the tensors are. Here, and not in `main`: its spawned writers import
    # this file under another name.
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]


def make_state(size: int, rank: int, world_size: int) -> State:
    """This rank's share of `size` bytes in float32: weights and vectors as transformer blocks have them."""
    width = max(8, 8 * round(math.sqrt(size / BLOCKS / 48) / 8))
    shapes: dict[str, tuple[int, ...]] = {
        "attention.in": (3 * width, width),
        "attention.out": (width, width),
        "mlp.in": (4 * width, width),
        "mlp.out": (width, 4 * width),
        "mlp.in.bias": (4 * width,),
        "mlp.out.bias": (width,),
        "norm.1": (width,),
        "norm.2": (width,),
    }
    mine = range(rank, BLOCKS, world_size)
    return {f"block{block}.{name}": torch.zeros(shape) for block in mine for name, shape in shapes.items()}


class Loop:
    """A training loop: matrix products, updates in place of a part of the state, and one collective per step."""

    def __init__(self, state: State, world_size: int) -> None:
        self.tensors = list(state.values())
        self.world_size = world_size
        self.number = 0
        self.matrix = torch.rand(512, 512) / 256

    def step(self, done: bool = True) -> bool:
        """One step; whether all ranks said `done`. The collective is there in steps that measure the base as well."""
        product = self.matrix
        for _ in range(4):
            product = torch.mm(self.matrix, product)
        torch._foreach_add_(self.tensors[self.number % PARTS :: PARTS], 1.0)
        self.number += 1
        if self.world_size == 1:
            return done
        missing = torch.tensor([0 if done else 1])
        dist.all_reduce(missing)
        return missing.item() == 0

    def timed(self, count: int) -> list[float]:
        found: list[float] = []
        for _ in range(count):
            began = perf_counter()
            self.step()
            found.append(perf_counter() - began)
        return found


def stamp_of(save: int, index: int) -> float:
    """What all elements of a tensor have in a save: another value for each tensor and each save, exact in float32."""
    return float(save * 1000 + index)


class Worker:
    def __init__(self, method: Method, state: State, place: Place) -> None:
        self.method, self.state, self.place = method, state, place
        self.loop = Loop(state, place.world_size)

    def barrier(self) -> None:
        if self.place.world_size > 1:
            dist.barrier()

    def turn(self, save: int) -> dict[str, Any]:
        before = self.loop.timed(BASE_STEPS)
        for index, tensor in enumerate(self.state.values()):
            tensor.fill_(stamp_of(save, index))
        self.barrier()

        found, flight = self.save(save)
        self.barrier()
        began = perf_counter()
        if self.place.rank == 0:
            settle(self.place.folder)
        left = perf_counter() - began
        self.barrier()

        base = statistics.fmean(before + self.loop.timed(BASE_STEPS))
        found["lost"] = found["stall"] + sum(flight) - base * found["steps"]
        found |= {"left": left, "base": base, **self.restore(save)}
        self.barrier()
        if self.place.rank == 0:
            self.method.forget(save)
        self.barrier()
        return found

    def save(self, save: int) -> tuple[dict[str, Any], list[float]]:
        """Save and train on until all ranks are done; the times of what the training thread did meanwhile."""
        called = perf_counter()
        self.method.save(save)
        stall = perf_counter() - called
        for tensor in self.state.values():
            flat = tensor.view(-1)
            flat[0] = flat[flat.numel() // 2] = flat[-1] = -1.0
        flight: list[float] = []
        steps, done, durable = 0, False, 0.0
        while True:
            began = perf_counter()
            if not done and self.method.done(save):
                done, durable = True, perf_counter() - called
            if done and self.place.world_size == 1:
                flight.append(perf_counter() - began)
                break
            all_done = self.loop.step(done)
            flight.append(perf_counter() - began)
            steps += 1
            if all_done:
                break
        return {"stall": stall, "durable": durable, "steps": steps, "flight": sum(flight)}, flight

    def restore(self, save: int) -> dict[str, Any]:
        into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.barrier()
        began = perf_counter()
        self.method.load(save, into)
        took = perf_counter() - began
        torn = sum(not bool((into[name] == stamp_of(save, i)).all()) for i, name in enumerate(into))
        return {"restore": took, "torn": torn, "tensors": len(into)}


def make_method(name: str, place: Place) -> Method:
    module = importlib.import_module(MODULES[name.partition("_")[0]])
    return module.METHODS[name](place)


def serve(options: argparse.Namespace, events: Events) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    place = Place(rank, world_size, options.folder, dist.new_group(backend="gloo"))
    state = make_state(options.size, rank, world_size)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    method = make_method(options.method, place)
    began = perf_counter()
    method.prepare(state)
    turn = method.measure if isinstance(method, Limits) else Worker(method, state, place).turn
    events.emit("ready", rank=rank, prepare=perf_counter() - began, nbytes=nbytes)
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "end":
            break
        events.emit("turn", rank=rank, save=int(number), **turn(int(number)))
    method.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--size", type=int, required=True, help="bytes of state over all ranks")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    serve(options, Events(options.events))


if __name__ == "__main__":
    main()
