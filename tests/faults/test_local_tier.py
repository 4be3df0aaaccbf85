"""The node-local tier in real jobs: what is resumed from it after a fault, and what happens when parts of it are gone.

Each trainer trains for a few steps in each round, then stands still (`saving_kit.stand`) until the test has seen what
it waits for and makes the fault. In round 0 it stands after step 27: step 20 is on both tiers, step 25 only on the local
one. Every later round goes on for seven steps, so that each resumes five steps further than the one before.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from .cluster import core_of, lose_node, of_node, reserves
from .harness import Event, Job, Seats

QUIET = {"PYTHONWARNINGS": "ignore", "RES_OPTIONS": "use-vc", "TORCH_CPP_LOG_LEVEL": "error"}
LOCAL_EVERY, DURABLE_EVERY = 5, 20
FIRST = 25
"""The newest step on the local tier when the first round stands still; each round after it adds LOCAL_EVERY."""

STANDS = """
from saving_kit import stand, train_and_save
begun = {}

def restored(round, start):
    begun["at"] = start

def fault(round, step):
    if step == max(begun["at"], 20) + 7 and stand(round, step):
        raise ValueError("told to fail")

train_and_save(fault, on_restored=restored, due=True)
"""
THREE: dict[str, Any] = {"nodes": ("n0", "n1", "n2"), "nproc": 1}


def train(launch: Callable[..., Job], folder: Path, source: str = STANDS, **options: Any) -> Job:
    env = {**QUIET, **options.pop("env", {})}
    knobs: dict[str, Any] = {
        "save": str(folder / "saves"),
        "save_interval": DURABLE_EVERY,
        "non_persistent_local_ckpt_dir": str(folder / "local"),
        "non_persistent_save_interval": LOCAL_EVERY,
        "on_busy": "wait",
        "heartbeat_timeout": 3,
    }
    return launch(source, env=env, **{**knobs, **options})


def holders(job: Job, step: int) -> list[int]:
    """On how many nodes each shard of the newest local save of this step is, by rank; empty if it is not complete."""
    core = core_of(job)
    records = [r for r in core.commits.records.values() if r.step == step] if core is not None else []
    newest = max(records, key=lambda record: record.age, default=None)
    if newest is None or not newest.local.complete:
        return []
    return [len(newest.local.holders[rank]) for rank in range(newest.world_size)]


def wait_kept(job: Job, step: int, copies: int = 1) -> None:
    """Wait until each shard of this local save is on so many nodes. The journal is read again when it has grown."""
    seen = -1

    def kept() -> bool:
        nonlocal seen
        size = (job.run_dir / "journal").stat().st_size
        if size == seen:
            return False
        seen = size
        numbers = holders(job, step)
        return bool(numbers) and min(numbers) >= copies

    job.wait_for(kept, f"{copies} copies of step {step}")


def wait_published(job: Job, folder: Path, step: int) -> None:
    job.wait_for(lambda: (folder / "saves" / f"iter_{step:07d}").exists(), f"step {step} to be published")


def assert_resumed(job: Job, index: int, step: int, *, local: bool = True) -> list[Event]:
    """Wait for the round, and demand that all its ranks have the state of this step back, to the bit."""
    seats = job.wait_round(index, "resumed")
    told = list(seats.values())
    assert [each.more["wrong"] for each in told] == [""] * len(told), told
    assert {(each.more["step"], each.more["local"]) for each in told} == {(step, local)}, told
    return told


def after(job: Job, before: Seats, index: int, dead: Iterable[int] = ()) -> Seats:
    """The next round, in which everyone but the dead goes on in place."""
    seats = job.wait_round(index)
    gone = set(dead)
    assert job.survivors(before, seats, dead=gone) == len(before) - len(gone)
    return seats


def local_folder(folder: Path, node: str, step: int) -> Path:
    """Of the newest save of this step there."""
    return max((folder / "local" / node).glob(f"iter_{step:07d}.*"), key=lambda path: int(path.name.rpartition("-")[2]))


def names_of(folder: Path, node: str) -> list[str]:
    return sorted(path.name for path in (folder / "local" / node).iterdir())


def steps_of(folder: Path, node: str) -> list[int]:
    return [int(name[5:12]) for name in names_of(folder, node)]


def lose(job: Job, folder: Path, node: str) -> None:
    """A node is gone, and its local tier with it."""
    lose_node(job, node)
    shutil.rmtree(folder / "local" / node)


# ---- nothing but the tier ------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


DAMAGE: list[tuple[int, str, Callable[[Path], None]]] = [
    (1, "__1_0.distcp", flip),
    (0, "__0.shard", flip),
    (2, "__2_0.distcp", truncate),
    (1, "__1.shard", Path.unlink),
    (0, "__0_0.distcp", Path.unlink),
]
"""A rank, one of its files on its own node, and what is done to it: one in each round."""


def test_resumes_from_the_newer_local_step_and_from_copies_of_what_is_damaged(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    job = train(launch, tmp_path, replication=1, **THREE)
    seats = job.wait_round(0)
    wait_published(job, tmp_path, DURABLE_EVERY)
    wait_kept(job, FIRST, 2)
    job.say("go-0")
    seats = after(job, seats, 1)
    assert_resumed(job, 1, FIRST)
    assert job.log("bad_save") == []
    for index, (rank, name, damage) in enumerate(DAMAGE, 1):
        step = FIRST + index * LOCAL_EVERY
        wait_kept(job, step, 2)
        damage(local_folder(tmp_path, f"n{rank}", step) / name)
        job.say(f"go-{index}")
        seats = after(job, seats, index + 1)
        assert_resumed(job, index + 1, step)
        text = f"step {step} (round {index}), local tier: shard {rank} on n{rank} is bad"
        assert job.wait_log("bad_save", text), (rank, name)
    assert job.finish() == 0
    job.assert_rounds(len(DAMAGE) + 2)
