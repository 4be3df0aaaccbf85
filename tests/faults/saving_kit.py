"""A trainer that saves and resumes, and what the tests of it look at. Trainers import `train_and_save`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from trainer_kit import LIMIT_S, is_said, meet, tell

import perdure

INTERVAL = 10
STEP_S = 0.01
PATIENCE_S = 2.0
TENSORS, ELEMENTS = map(int, os.environ.get("FAULTS_STATE", "6x20000").split("x"))


def state_at(step: int) -> dict[str, Any]:
    model = {f"w{n}": torch.full((ELEMENTS,), float(step * 10 + n)) for n in range(TENSORS)}
    return {"model": model, "step": step, "lr": 0.1 * step}


def differs(state: dict[str, Any], step: int) -> str:
    """How `state` is not that of `step`, to the bit; empty if it is."""
    wanted = state_at(step)
    wrong = [name for name, tensor in wanted["model"].items() if not torch.equal(tensor, state["model"][name])]
    wrong += [name for name in ("step", "lr") if state[name] != wanted[name]]
    return ", ".join(wrong)


def train_and_save(
    fault: Any = None,
    *,
    on_restored: Any = None,
    steps: int = 100_000,
    step_s: float = STEP_S,
    due: bool = False,
    patience_s: float = PATIENCE_S,
) -> None:
    """Train until the test says `release`. Each step's state is a function of its number, but for `made_in`, the round
    that has saved it.

    fault(round, step): called in every step. on_restored(round, step): called when the state is back. due: save when
    the job's intervals say so, and wait for nothing, instead of every INTERVAL steps.
    """

    @perdure.resilient
    def train(round: perdure.Round) -> None:
        tell("entered", round)
        state = {**state_at(0), "made_in": -1}
        start = round.checkpointer.restore(state) or 0
        local = round.resume is not None and round.resume.local
        tell("resumed", round, step=start, wrong=differs(state, start), local=local, made_in=state["made_in"])
        if on_restored is not None:
            on_restored(round, start)
        meet(round)
        for step in range(start + 1, steps + 1):
            for name, tensor in state_at(step)["model"].items():
                state["model"][name].copy_(tensor)
            state.update(step=step, lr=0.1 * step, made_in=round.index)
            round.ping(step)
            if fault is not None:
                fault(round, step)
            if round.checkpointer.due(step) if due else step % INTERVAL == 0:
                if not due:
                    await_published(round, step - INTERVAL, patience_s)
                saving = round.checkpointer.save(step, state)
                if saving is not None:
                    tell("saved", round, step=step)
            if is_said("release") and step % INTERVAL == 0:
                break
            time.sleep(step_s)
        tell("returned", round)

    train()


def stand(round: perdure.Round, step: int) -> bool:
    """Stand still, but not like a hang, until the test says `go-<round>`, which is for rank 0, or `release`; whether
    it was `go`."""
    end = time.monotonic() + LIMIT_S
    while not is_said("release"):
        if round.rank == 0 and is_said(f"go-{round.index}"):
            return True
        if time.monotonic() > end:
            raise TimeoutError(f"nobody said what is to come after step {step} within {LIMIT_S} s")
        round.ping(step)
        time.sleep(0.005)
    return False


def await_published(round: perdure.Round, step: int, patience_s: float) -> None:
    """Wait until the last save has its name: then, whatever breaks the next one, it is one interval old. Not for ever:
    the last one may have been broken itself."""
    folder = Path(json.loads(os.environ["PERDURE_CHECKPOINTS"])["save"])
    end = time.monotonic() + patience_s
    while step > 0 and not (folder / f"iter_{step:07d}").exists() and time.monotonic() < end:
        round.ping(step + INTERVAL)
        time.sleep(0.005)


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
