"""What is resumed from: not what is damaged, foreign, unfinished, from another round, or makes the trainer crash."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .harness import PERDURE, Job
from .processes import kill_all_with, processes_with
from .test_checkpoint_trouble import finished, published, unfinished, wait_next, went_on
from .test_checkpoints import (
    INTERVAL,
    KIT,
    LONG_S,
    QUIET,
    SOURCE,
    assert_good,
    resumes,
    train,
    verified,
    wait_published,
)

STEPS = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of STEPS, of two ranks."""
    folder = tmp_path_factory.mktemp("original")
    options: dict[str, Any] = {**KIT, "save": str(folder / "saves"), "env": QUIET}
    job = Job(folder / "job", SOURCE + f"train_and_save(steps={STEPS[-1]})", **options).start()
    try:
        assert job.wait_end(LONG_S) == 0
        job.assert_nothing_left()
    finally:
        job.kill_everything()
    assert published(folder / "saves") == STEPS
    return folder / "saves"


@pytest.fixture
def saves(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "saves"))


def of(folder: Path, step: int, name: str = "") -> Path:
    return folder / f"iter_{step:07d}" / name


def flip(path: Path) -> None:
    """Turn one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def resumed_steps(job: Job) -> list[int]:
    """Round by round, the step that its ranks told they had back; -1 for a round that got none."""
    told = resumes(job)
    return [told[index][0].more["step"] if index in told else -1 for index in sorted(job.rounds())]


def problems(folder: Path) -> str:
    """What `perdure checkpoints verify` says of a folder with something bad in it."""
    done = subprocess.run([PERDURE, "checkpoints", "--save", folder, "verify"], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout + done.stderr


# ---- damage ---------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file(launch: Callable[..., Job], saves: Path) -> None:
    """Found when the job begins, or when it is read: told, and an older checkpoint used. Nothing bad is deleted."""
    flip(of(saves, 50, "__1_0.distcp"))
    flip(of(saves, 40, "manifest.json"))
    flip(of(saves, 30, "__0.shard"))
    flip(next(of(saves, 20).glob("__*_1.distcp")))
    flip(of(saves, 10, ".metadata"))  # of which nothing is read
    told = problems(saves)
    for name in ("__1_0.distcp", "manifest.json", "rank 0: not a sidecar", "_1.distcp", ".metadata"):
        assert name in told, told

    job = train(launch, saves)
    job.wait_event("resumed", LONG_S, round=2)
    assert_good(job)
    assert resumed_steps(job)[-1] == 10, job.output()
    lines = [line["text"] for line in job.log("bad_save")]
    for step in (50, 40, 30, 20):
        assert any(text.startswith(f"step {step} (round 0), durable tier:") for text in lines), lines
    job.assert_rounds(3)
    wait_replaced(job, saves, 20)
    verified_step(saves, 20)
    assert job.finish(LONG_S) == 0
    kept = {name.partition(".")[0] for name in os.listdir(saves)}
    assert {f"iter_{step:07d}" for step in (50, 40, 30)} <= kept, kept
    assert list(saves.glob("iter_0000050*/BAD-1")), "a later job need not read it"
    assert ".metadata" in problems(saves)


def wait_replaced(job: Job, folder: Path, step: int) -> None:
    """Wait until a save of this step has taken the place of the one of an earlier job, which is kept."""

    def replaced() -> bool:
        return len(list(folder.glob(f"iter_{step:07d}.bad-*/BAD"))) == 1 and of(folder, step, "manifest.json").exists()

    job.wait_for(replaced, f"another save of step {step}", LONG_S)


def verified_step(folder: Path, step: int) -> None:
    command = [PERDURE, "checkpoints", "--save", folder, "verify", "--step", str(step)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


FOREIGN = """
import sys, torch
import torch.distributed.checkpoint as dcp
dcp.save({"w": torch.ones(4)}, checkpoint_id=sys.argv[1], no_dist=True)
"""


def test_what_is_no_checkpoint_is_not_resumed_from(launch: Callable[..., Job], saves: Path) -> None:
    """An empty folder of a high number, one without a manifest, one with a short file, one of plain torch."""
    of(saves, 9999).mkdir()
    of(saves, 50, "manifest.json").unlink()
    os.truncate(of(saves, 40, "__1_0.distcp"), 1000)
    subprocess.run([sys.executable, "-W", "ignore", "-c", FOREIGN, of(saves, 8888)], check=True, timeout=60)
    job = train(launch, saves)
    job.wait_event("resumed", LONG_S, round=0)
    assert resumed_steps(job) == [30]
    lines = "\n".join(line["text"] for line in job.log())
    for part in ("iter_0009999", "iter_0008888", "step 50", "step 40"):
        assert part in lines, lines
    assert_good(job)
    went_on(job)
    wait_published(job, saves, 60)
    assert job.finish(LONG_S) == 0
    assert {8888, 9999} <= set(published(saves)), "what is not ours is not touched"


def test_an_explicit_step_wins(launch: Callable[..., Job], saves: Path) -> None:
    job = train(launch, saves, ckpt_step=20)
    job.wait_event("resumed", LONG_S, round=0)
    assert resumed_steps(job) == [20]
    assert_good(job)
    wait_replaced(job, saves, 30)
    assert job.finish(LONG_S) == 0

    other = train(launch, saves, ckpt_step=25)
    assert other.wait_end(LONG_S) == 1
    assert other.rounds() == {}
    reason = other.reason()
    assert "step 25 (ckpt_step)" in reason, reason
    assert "10, 20, 30, 40, 50" in reason or "10-50" in reason, reason


def test_a_checkpoint_that_makes_the_trainer_crash(launch: Callable[..., Job], saves: Path) -> None:
    source = """
    def crash(round, step):
        if step == 50:
            raise ValueError("this state is no good")
    train_and_save(on_restored=crash)
    """
    job = train(launch, saves, dedent(source))
    job.wait_event("resumed", LONG_S, round=2)
    assert resumed_steps(job) == [50, 50, 40]
    assert_good(job)
    assert "step 50" in job.log("struck")[0]["text"]
    wait_replaced(job, saves, 50)
    assert job.finish(LONG_S) == 0


# ---- rounds and jobs ------------------------------------------------------------------------------------------


STOP = {"program": "writer", "event": "os.rename", "parts": ["__1.shard"], "to": True, "victim": "itself"}


def test_a_save_of_a_round_that_is_over(launch: Callable[..., Job], tmp_path: Path) -> None:
    """A writer stops just before its shard is finished, and another rank raises. The same step is saved again in the
    next round, and the writer goes on: what it was at is never published."""
    folder, here = tmp_path / "saves", Path(__file__).parent
    kill = {**STOP, "name": "stop", "after": "", "endpoint": "", "saves": str(folder), "signal": signal.SIGSTOP}
    (tmp_path / "kills.json").write_text(json.dumps([kill]))
    env = {"PYTHONPATH": f"{here}{os.pathsep}{here / 'injected'}", "FAULTS_KILLS": str(tmp_path / "kills.json")}
    source = """
    def fault(round, step):
        if round.index == 0 and round.rank == 0 and step == 25:
            wait_said("raise", round)
            raise ValueError("once")
    train_and_save(fault, patience_s=10)
    """
    job = train(launch, folder, "from trainer_kit import wait_said\n" + dedent(source), env=env, save_timeout=60)
    done = job.folder / "done-stop"
    job.wait_for(done.exists, "a writer to stop", LONG_S)
    job.wait_event("saved", round=0, rank=0, more={"step": 20})
    [stopped] = [pid for pid, name in writers(job) if name == 1]
    job.say("raise")
    again = job.wait_for(lambda: job.events("saved", round=1), "a save in round 1", LONG_S)[0]
    assert again.more["step"] == 20, "the step that was not finished in round 0"
    assert published(folder) == [10]
    os.kill(stopped, signal.SIGCONT)
    wait_next(job, folder)
    wait_published(job, folder, 40)
    finished(job, folder)
    assert json.loads(of(folder, 20, "manifest.json").read_text())["round"] == 1
    assert_good(job)

    last = train(launch, folder, ckpt_step=20)
    back = last.wait_event("resumed", LONG_S, round=0)
    assert (back.more["made_in"], back.more["wrong"]) == (1, "")
    assert last.finish(LONG_S) == 0


def writers(job: Job) -> list[tuple[int, int]]:
    """pid and rank of the writers of round 0."""
    from .test_checkpoint_trouble import writer_of

    return [(writer_of(job, rank), rank) for rank in (0, 1)]


def test_everything_is_killed_in_mid_save(launch: Callable[..., Job], tmp_path: Path) -> None:
    """Three jobs in a row, each started anew: each resumes at most one interval back, and nothing piles up."""
    folder = tmp_path / "saves"
    shared = set(os.listdir("/dev/shm"))
    killed = 0
    for _ in range(3):
        job = train(launch, folder, "train_and_save()", most_recent_k=3)
        job.wait_round(0, "resumed", LONG_S)
        assert_good(job)
        assert resumed_steps(job)[0] >= killed, (resumed_steps(job), killed)
        wait_next(job, folder)
        wait_next(job, folder)
        job.wait_for(lambda: list(folder.glob("*.saving-*")), "a save that is being written")
        while processes_with(job.mark):  # one of them may just have started another one
            kill_all_with(job.mark)
        killed = max(published(folder))
        for process in job.processes():
            process.wait(10)
        assert job.events("saved")[-1].more["step"] <= killed + INTERVAL
        verified(folder)
    last = train(launch, folder, "train_and_save()", most_recent_k=3)
    last.wait_round(0, "resumed", LONG_S)
    assert resumed_steps(last)[0] >= killed
    wait_next(last, folder)
    assert_good(last)
    finished(last, folder)
    of_dead = [name for name in unfinished(folder) if int(name[5:].partition(".")[0]) <= max(published(folder))]
    assert of_dead == [], "unfinished ones of dead jobs"
    assert len(published(folder)) == 3
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "perdure" in name} == set()
