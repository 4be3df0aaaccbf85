"""A trainer that saves and resumes, and what the tests of it look at. Trainers import `train_and_save`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from trainer_kit import is_said, meet, tell

import perdure

INTERVAL = 10
STEP_S = 0.01
PATIENCE_S = 2.0


def state_at(step: int) -> dict[str, Any]:
    model = {name: torch.full((20_000,), float(step * 10 + n)) for n, name in enumerate("abcdef")}
    return {"model": model, "step": step, "lr": 0.1 * step}


def differs(state: dict[str, Any], step: int) -> str:
    """How `state` is not that of `step`, to the bit; empty if it is."""
    wanted = state_at(step)
    wrong = [name for name, tensor in wanted["model"].items() if not torch.equal(tensor, state["model"][name])]
    wrong += [name for name in ("step", "lr") if state[name] != wanted[name]]
    return ", ".join(wrong)


def train_and_save(fault: Any = None, *, on_restored: Any = None, steps: int = 100_000, step_s: float = STEP_S) -> None:
    """Train until the test says `release`. Each step's state is a function of its number.

    fault(round, step): called in every step. on_restored(round, step): called when the state is back.
    """

    @perdure.resilient
    def train(round: perdure.Round) -> None:
        tell("entered", round)
        state = state_at(0)
        start = round.checkpointer.restore(state) or 0
        local = round.resume is not None and round.resume.local
        tell("resumed", round, step=start, wrong=differs(state, start), local=local)
        if on_restored is not None:
            on_restored(round, start)
        meet(round)
        for step in range(start + 1, steps + 1):
            for name, tensor in state_at(step)["model"].items():
                state["model"][name].copy_(tensor)
            state.update(step=step, lr=0.1 * step)
            round.ping(step)
            if fault is not None:
                fault(round, step)
            if step % INTERVAL == 0:
                await_published(round, step - INTERVAL)
                saving = round.checkpointer.save(step, state)
                if saving is not None:
                    tell("saved", round, step=step)
            if is_said("release") and step % INTERVAL == 0:
                break
            time.sleep(step_s)
        tell("returned", round)

    train()


def await_published(round: perdure.Round, step: int) -> None:
    """Wait until the last save has its name: then, whatever breaks the next one, it is one interval old. Not for ever:
    the last one may have been broken itself."""
    folder = Path(json.loads(os.environ["PERDURE_CHECKPOINTS"])["save"])
    end = time.monotonic() + PATIENCE_S
    while step > 0 and not (folder / f"iter_{step:07d}").exists() and time.monotonic() < end:
        round.ping(step + INTERVAL)
        time.sleep(0.005)


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
