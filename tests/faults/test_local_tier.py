"""The node-local tier in real jobs: what is resumed from it after a fault, and what happens when parts of it are gone.

Each trainer trains for a few steps in each round, then stands still (`saving_kit.stand`) until the test has seen what
it waits for and makes the fault. In round 0 it stands after step 27: step 20 is on both tiers, step 25 only on the
local one. Every later round goes on for seven steps, so that each resumes five steps further than the one before.
"""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from .cluster import core_of, lose_node, of_node, ranks_of, reserves, wait_gone
from .harness import Event, Job, Seats

QUIET = {"PYTHONWARNINGS": "ignore", "RES_OPTIONS": "use-vc", "TORCH_CPP_LOG_LEVEL": "error"}
QUIET_S = 0.05
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
    """Wait until each shard of this local save is on so many nodes. The journal is read when it grows no more."""
    journal = job.run_dir / "journal"
    seen, since, is_read = -1, 0.0, False

    def kept() -> bool:
        nonlocal seen, since, is_read
        size, now = journal.stat().st_size, time.monotonic()
        if size != seen:
            seen, since, is_read = size, now, False
        if is_read or now - since < QUIET_S:
            return False
        is_read = True
        numbers = holders(job, step)
        return bool(numbers) and min(numbers) >= copies

    job.wait_for(kept, f"{copies} copies of step {step}")


def wait_published(job: Job, step: int) -> None:
    job.wait_log("checkpoint", f"step {step} ")


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
    return [int(name[5:12]) for name in names_of(folder, node) if name.startswith("iter_")]


def wait_steps(job: Job, folder: Path, node: str, steps: list[int]) -> None:
    """Wait until this node has these steps, and nothing else, not even something that is being deleted."""

    def there() -> bool:
        return steps_of(folder, node) == steps and len(names_of(folder, node)) == len(steps)

    job.wait_for(there, f"the steps {steps} on {node}")


def assert_tidy(folder: Path, nodes: Iterable[str]) -> None:
    """After the end: on each node two saves at most, and nothing that somebody left half done."""
    for node in nodes:
        root = folder / "local" / node
        assert len(names_of(folder, node)) <= 2, names_of(folder, node)
        files = [path.name for path in root.rglob("*") if path.is_file()]
        strange = [name for name in files if not name.startswith("__") and not name.startswith("BAD")]
        assert strange == [], strange


def lose(job: Job, folder: Path, node: str) -> None:
    """A node is gone, and its local tier with it."""
    ranks = ranks_of(job, node)
    lose_node(job, node)
    wait_gone(job, ranks, 10)
    shutil.rmtree(folder / "local" / node)


# ---- nothing but the tier ------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


DAMAGE: list[tuple[int, tuple[int, ...], str, Callable[[Path], None]]] = [
    (1, (1,), "__1_0.distcp", flip),
    (0, (0,), "__0.shard", flip),
    (2, (2, 0), "__2_0.distcp", truncate),
    (1, (1,), "__1.shard", Path.unlink),
    (0, (0,), "__0_0.distcp", Path.unlink),
]
"""In each round: a rank, the nodes on which one of its files is damaged, that file, and what is done to it. The third
is done to both copies of a step that is on the durable tier as well."""


def test_resumes_from_the_newer_local_step_and_from_copies_of_what_is_damaged(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    job = train(launch, tmp_path, replication=1, **THREE)
    seats = job.wait_round(0)
    wait_published(job, DURABLE_EVERY)
    wait_kept(job, FIRST, 2)
    job.say("go-0")
    seats = after(job, seats, 1)
    assert_resumed(job, 1, FIRST)
    assert job.log("bad_save") == []
    for index, (rank, nodes, name, damage) in enumerate(DAMAGE, 1):
        step = FIRST + index * LOCAL_EVERY
        wait_kept(job, step, 2)
        if step % DURABLE_EVERY == 0:
            wait_published(job, step)
        for node in nodes:
            damage(local_folder(tmp_path, f"n{node}", step) / name)
        job.say(f"go-{index}")
        seats = after(job, seats, index + 1)
        assert_resumed(job, index + 1, step)
        for node in nodes:
            job.wait_log("bad_save", f"step {step} (round {index}), local tier: shard {rank} on n{node} is bad")
    assert job.finish() == 0
    job.assert_rounds(len(DAMAGE) + 2)
    assert_tidy(tmp_path, job.nodes)


# ---- nodes ---------------------------------------------------------------------------------------------------------


def test_lost_nodes_cost_nothing_where_there_are_copies(launch: Callable[..., Job], tmp_path: Path) -> None:
    """First the node of rank 1, then that of rank 0; a warm spare takes over, then one whose folder is empty."""
    job = train(launch, tmp_path, replication=1, active_world_size=2, **THREE)
    first = job.wait_round(0)
    assert of_node(first, "n2") == set()
    wait_kept(job, FIRST, 2)
    lose(job, tmp_path, "n1")
    second = after(job, first, 1, dead={1})
    assert of_node(second, "n2") == {1}
    assert_resumed(job, 1, FIRST)
    for node, rank in (("n0", 1), ("n2", 0)):
        assert (local_folder(tmp_path, node, FIRST) / f"__{rank}.shard").exists(), "it was brought from the other node"

    wait_kept(job, FIRST + 5, 2)
    job.start_agent("n1")
    job.wait_for(lambda: reserves(job) == {"n1/0"}, "the new process of n1 at the gate")
    lose(job, tmp_path, "n0")
    third = after(job, second, 2, dead={0})
    assert of_node(third, "n1") == {0}
    assert_resumed(job, 2, FIRST + 5)
    assert len(list(local_folder(tmp_path, "n1", FIRST + 5).glob("*.shard"))) == 2

    wait_kept(job, FIRST + 10, 2)
    job.say("go-2")
    after(job, third, 3)
    assert_resumed(job, 3, FIRST + 10)
    wait_kept(job, FIRST + 15, 2)
    for node in ("n1", "n2"):
        wait_steps(job, tmp_path, node, [FIRST + 10, FIRST + 15])  # what was brought here is deleted like the rest
    assert job.finish() == 0
    job.assert_rounds(4)
    assert job.log("bad_save") == []
    assert_tidy(tmp_path, ("n1", "n2"))


def test_without_copies_a_lost_node_costs_the_local_steps(launch: Callable[..., Job], tmp_path: Path) -> None:
    job = train(launch, tmp_path, nodes=("n0", "n1"), nproc=1, respawn=False)
    first = job.wait_round(0)
    wait_published(job, DURABLE_EVERY)
    wait_kept(job, FIRST)
    lose(job, tmp_path, "n1")
    after(job, first, 1, dead={1})
    assert_resumed(job, 1, DURABLE_EVERY, local=False)
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_smaller_world_resumes_from_the_shards_of_a_greater_one(launch: Callable[..., Job], tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"replication": 1, "min_world_size": 2, "respawn": False}
    job = train(launch, tmp_path, **knobs, **THREE)
    first = job.wait_round(0)
    wait_kept(job, FIRST, 2)
    lose(job, tmp_path, "n0")
    second = after(job, first, 1, dead={0})
    assert sorted(second) == [0, 1]
    assert_resumed(job, 1, FIRST)
    wait_kept(job, FIRST + 5, 2)
    job.say("go-1")
    after(job, second, 2)
    assert_resumed(job, 2, FIRST + 5)
    assert job.finish() == 0
    job.assert_rounds(3)
    assert job.log("bad_save") == []


def test_atomic_shards_need_nobody_else(launch: Callable[..., Job], tmp_path: Path) -> None:
    """Each rank reads what its own node has; a node whose folder is gone reads all of it from another one."""
    job = train(launch, tmp_path, nodes=("n0", "n1"), nproc=1, non_persistent_local_ckpt_algo="atomic")
    first = job.wait_round(0)
    wait_kept(job, FIRST)
    wait_published(job, DURABLE_EVERY)
    shutil.rmtree(tmp_path / "saves")
    job.say("go-0")
    second = after(job, first, 1)
    assert_resumed(job, 1, FIRST)
    for node, rank in (("n0", 0), ("n1", 1)):
        found = [path.name for path in local_folder(tmp_path, node, FIRST).glob("*.shard")]
        assert found == [f"__{rank}.shard"], "nothing was brought from the other node"
    wait_kept(job, FIRST + 5)
    wait_steps(job, tmp_path, "n0", [FIRST, FIRST + 5])
    shutil.rmtree(tmp_path / "local" / "n0")
    job.say("go-1")
    after(job, second, 2)
    assert_resumed(job, 2, FIRST + 5)
    job.wait_log("bad_save", f"step {FIRST + 5} (round 1), local tier: shard 0 on n0 is bad")
    assert job.finish() == 0
    job.assert_rounds(3)


# ---- checkpoints that cannot be trained from -----------------------------------------------------------------------

POISONED = """
from saving_kit import stand, train_and_save
begun = {}

def restored(round, start):
    begun["at"] = start

def fault(round, step):
    if round.index == 0 and step == 27 and stand(round, step):
        raise ValueError("told to fail")
    if round.index and step == begun["at"] + 3 and (round.resume.local or ALWAYS):
        raise FloatingPointError("the loss is NaN")

train_and_save(fault, on_restored=restored, due=True)
"""


@pytest.mark.parametrize("always", [False, True])
def test_a_tier_that_yields_what_cannot_be_trained_from(
    launch: Callable[..., Job], tmp_path: Path, always: bool
) -> None:
    """The same error three steps after each load from the local tier; or after each load."""
    source = POISONED.replace("ALWAYS", str(always))
    job = train(launch, tmp_path, source, nodes=("n0",), nproc=1, max_iterations=12)
    first = job.wait_round(0)
    wait_published(job, DURABLE_EVERY)
    wait_kept(job, FIRST)
    job.say("go-0")
    if always:
        assert job.wait_end() == 95, job.reason()
        assert "every checkpoint that can be reached is bad, or was resumed from in vain: steps 20, 25" in job.reason()
    else:
        last = job.wait_round(5)
        assert_resumed(job, 5, DURABLE_EVERY, local=False)
        assert job.survivors(first, last) == 1, "it went on in place"
        assert job.finish() == 0
    told = [(each.more["step"], each.more["local"]) for each in job.events("resumed")][1:]
    spent = [(FIRST, True)] * 2 + [(DURABLE_EVERY, True)] * 2
    assert told == spent + [(DURABLE_EVERY, False)] * (2 if always else 1)
    assert len(job.log("struck")) == (3 if always else 2)
    assert (tmp_path / "saves" / f"iter_{DURABLE_EVERY:07d}").exists(), "what is struck is not deleted"


# ---- the tier alone ------------------------------------------------------------------------------------------------

MANY_STEPS = 60
MANY = f"""
from saving_kit import stand, train_and_save

def fault(round, step):
    if round.index == 0 and step == {MANY_STEPS} + 1 and stand(round, step):
        raise ValueError("told to fail")

train_and_save(fault, due=True, step_s=0.03)
"""


def test_the_local_tier_alone_through_many_saves_a_fault_and_another_job(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    """It never holds more than two complete saves for long. Before the second job a node has lost its folder; it has
    more ranks."""
    knobs: dict[str, Any] = {
        "save": None,
        "save_interval": None,
        "non_persistent_save_interval": 2,
        "replication": 1,
        "nodes": ("n0", "n1"),
    }
    job = train(launch, tmp_path, MANY, nproc=1, **knobs)
    first = job.wait_round(0)
    counts: list[int] = []

    def saved() -> bool:
        counts.extend(len(steps_of(tmp_path, node)) for node in job.nodes)
        return sum(each.more["step"] == MANY_STEPS for each in job.events("saved")) == len(first)

    job.wait_for(saved, "the last save of the round")
    assert max(counts) <= 12, "two are complete, two are written; deleting is a little behind, and keeps up"
    wait_kept(job, MANY_STEPS, 2)
    for node in job.nodes:
        wait_steps(job, tmp_path, node, [MANY_STEPS - 2, MANY_STEPS])
    job.say("go-0")
    after(job, first, 1)
    assert_resumed(job, 1, MANY_STEPS)
    assert job.finish() == 0
    job.assert_rounds(2)
    assert_tidy(tmp_path, job.nodes)

    shutil.rmtree(tmp_path / "local" / "n1")
    newest = max(steps_of(tmp_path, "n0"))
    job = train(launch, tmp_path, "from saving_kit import train_and_save\ntrain_and_save(due=True)", nproc=2, **knobs)
    assert_resumed(job, 0, newest)
    assert job.finish() == 0
    job.assert_rounds(1)
    assert_tidy(tmp_path, job.nodes)
