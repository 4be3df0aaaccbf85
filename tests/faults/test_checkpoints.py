"""Saves that are broken at every point of their way, and what is resumed from afterwards."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .harness import PERDURE, Event, Job

INTERVAL = 10
SOURCE = "from saving_kit import train_and_save\n"
KIT: dict[str, object] = {"nproc": 2, "save_interval": INTERVAL, "on_busy": "wait"}
QUIET = {"PYTHONWARNINGS": "ignore", "RES_OPTIONS": "use-vc", "TORCH_CPP_LOG_LEVEL": "error"}
LONG_S = 90.0


def train(launch: Callable[..., Job], folder: Path, source: str = "train_and_save()", **options: Any) -> Job:
    env = {**QUIET, **options.pop("env", {})}
    return launch(SOURCE + source, **{**KIT, "save": str(folder), "env": env, **options})


def resumes(job: Job) -> dict[int, list[Event]]:
    """round -> what its ranks told of the state that they had back."""
    found: dict[int, list[Event]] = {}
    for each in job.events("resumed"):
        found.setdefault(each.round, []).append(each)
    return found


def newest_saved(job: Job, before_round: int) -> int:
    """The newest step that all ranks of one round had given to their writers, in the rounds before this one."""
    ranks: dict[tuple[int, int], set[int]] = {}
    for each in job.events("saved"):
        if each.round < before_round:
            ranks.setdefault((each.round, each.more["step"]), set()).add(each.rank)
    return max((step for (_, step), who in ranks.items() if len(who) == 2), default=0)


def assert_good(job: Job) -> None:
    """Every resume was the same step on all ranks, to the bit, and at most one interval old."""
    for index, told in resumes(job).items():
        assert len({each.more["step"] for each in told}) == 1, told
        assert [each.more["wrong"] for each in told] == [""] * len(told)
        assert told[0].more["step"] >= newest_saved(job, index) - INTERVAL, (index, told)


def verified(folder: Path) -> None:
    done = subprocess.run([PERDURE, "checkpoints", "--save", folder, "verify"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_published(job: Job, folder: Path, step: int, deadline_s: float = LONG_S) -> None:
    job.wait_for(lambda: (folder / f"iter_{step:07d}").exists(), f"step {step} to be published", deadline_s)


Kill = tuple[str, str, tuple[str, ...], bool, str]
"""The program, its file operation, parts of the path (of what is renamed, or what to), and who is killed."""

WRITER: dict[str, Kill] = {
    "folder is made": ("writer", "os.mkdir", ("saving",), False, "itself"),
    "data is opened": ("writer", "open", ("__1_0.distcp",), False, "itself"),
    "data is opened, rank": ("writer", "open", ("__1_0.distcp",), False, "parent"),
    "data is renamed": ("writer", "os.rename", ("__0_0.distcp",), True, "parent"),
    "data is renamed, all": ("writer", "os.rename", ("__1_0.distcp",), True, "ranks"),
    "values are renamed": ("writer", "os.rename", ("_1.distcp",), True, "itself"),
    "sidecar is opened": ("writer", "open", (".shard",), False, "parent"),
    "sidecar is renamed": ("writer", "os.rename", ("__0.shard",), True, "parent"),
    "sidecar is renamed, all": ("writer", "os.rename", ("__1.shard",), True, "ranks"),
}
DEPOT: dict[str, Kill] = {
    "metadata is opened": ("depot", "open", (".saving-", "metadata"), False, "controller"),
    "metadata is renamed": ("depot", "os.rename", ("/.metadata",), True, "itself"),
    "mcore is renamed": ("depot", "os.rename", ("/metadata.json",), True, "controller"),
    "manifest is renamed": ("depot", "os.rename", ("/manifest.json",), True, "itself"),
    "manifest is renamed, controller": ("depot", "os.rename", ("/manifest.json",), True, "controller"),
    "folder is renamed": ("depot", "os.rename", (".saving-",), False, "itself"),
    "folder is renamed, controller": ("depot", "os.rename", (".saving-",), False, "controller"),
    "tracker is renamed": ("depot", "os.rename", ("latest_checkpointed",), True, "itself"),
    "tracker is renamed, controller": ("depot", "os.rename", ("latest_checkpointed",), True, "controller"),
    "old save is pruned": ("depot", "os.rename", (".trash-",), True, "itself"),
    "old save is deleted, controller": ("depot", "os.rmdir", (".trash-",), False, "controller"),
}


def injected(folder: Path, kills: dict[str, Kill]) -> dict[str, str]:
    """The environment in which these kills happen to the first job of a test."""
    plan: list[dict[str, Any]] = []
    for name, (program, event, parts, to, victim) in kills.items():
        after = plan[-1]["name"] if plan else ""
        plan.append(
            {
                "name": name,
                "after": after,
                "program": program,
                "event": event,
                "parts": parts,
                "to": to,
                "victim": victim,
                "endpoint": str(folder / "job0" / "run" / "endpoint.json"),
                "saves": str(folder / "saves"),
            }
        )
    described = folder / "kills.json"
    described.write_text(json.dumps(plan))
    here = Path(__file__).parent
    return {"PYTHONPATH": f"{here}{os.pathsep}{here / 'injected'}", "FAULTS_KILLS": str(described)}


def wait_kill(job: Job, name: str) -> None:
    job.wait_for(lambda: (job.folder / f"done-{name}").exists(), f"the kill when {name}", LONG_S)


@pytest.mark.timeout(300)
def test_killed_while_shards_are_written(launch: Callable[..., Job], tmp_path: Path) -> None:
    """The writer, its rank, or all ranks at once, at nine points of a shard's way to the disk."""
    job = train(launch, tmp_path / "saves", env=injected(tmp_path, WRITER), most_recent_k=2)
    for name in WRITER:
        wait_kill(job, name)
    since = newest_saved(job, 1 << 30)
    wait_published(job, tmp_path / "saves", since + 2 * INTERVAL)
    assert job.finish(LONG_S) == 0
    assert_good(job)
    assert len(job.rounds()) >= 1 + sum(each[-1] != "itself" for each in WRITER.values())
    verified(tmp_path / "saves")


@pytest.mark.timeout(300)
def test_killed_while_a_save_is_published(launch: Callable[..., Job], tmp_path: Path) -> None:
    """The depot or the controller, at eleven points from the last shard to the deletion of an old save."""
    env = injected(tmp_path, DEPOT)
    job = train(launch, tmp_path / "saves", env=env, most_recent_k=2, nodes=("n0", "n1"), nproc=1, heartbeat_timeout=3)
    for name, each in DEPOT.items():
        wait_kill(job, name)
        if each[-1] == "controller":
            assert job.controller is not None
            job.controller.wait(10)
            job.start_controller()
    since = newest_saved(job, 1 << 30)
    wait_published(job, tmp_path / "saves", since + 2 * INTERVAL)
    assert list(job.rounds()) == [0], "training has not noticed"
    assert job.finish(LONG_S) == 0
    verified(tmp_path / "saves")
