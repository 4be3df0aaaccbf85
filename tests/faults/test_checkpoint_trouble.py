"""Disks that fill up, refuse or stand still, and writers that stop: training goes on, and what was saved stays good."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from .cluster import freeze, stamp, wait_new
from .harness import HANGS, Job
from .processes import Usage, command_of, descendants_of, processes_with, state_of
from .test_checkpoints import INTERVAL, LONG_S, newest_saved, resumes, train, verified, wait_published

DISK_MB = 8
CONTENT = 300_000
"""Bytes of free space that are too few for a save, which has 480,000."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of DISK_MB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, how: str) -> None:
    """A file that is being written holds it up for a moment."""
    end = time.monotonic() + 5
    while subprocess.run(["mount", "-o", f"remount,{how}", folder], capture_output=True).returncode != 0:
        assert time.monotonic() < end, f"{folder} cannot be remounted {how}"
        time.sleep(0.005)


def published(folder: Path) -> list[int]:
    """The steps that have their final name."""
    return sorted(int(each.name[5:]) for each in folder.glob("iter_*") if "." not in each.name)


def wait_next(job: Job, folder: Path, *, after: int | None = None) -> int:
    """Wait until a step is published that is greater than `after`, or than all that are."""
    since = max(published(folder), default=0) if after is None else after
    return job.wait_for(lambda: max(published(folder), default=0) > since and max(published(folder)), "a new step")


def unfinished(folder: Path) -> list[str]:
    """Whatever is neither published nor the tracker, of files and folders."""
    whole = {"latest_checkpointed_iteration.txt", *(f"iter_{step:07d}" for step in published(folder))}
    strange = [name for name in os.listdir(folder) if name not in whole and name != "filler"]
    for name in whole & set(os.listdir(folder)):
        if name.startswith("iter_"):
            strange += [
                f"{name}/{each}" for each in os.listdir(folder / name) if each.endswith(".tmp") or ".new-" in each
            ]
    return strange


def pids(job: Job, program: str) -> list[int]:
    """Of perdure's own processes of this name: `writer`, `depot`."""
    return [pid for pid, _ in processes_with(job.mark) if f"checkpoint_io.{program} " in command_of(pid)]


def writer_of(job: Job, rank: int) -> int:
    """The writer process of a rank of the newest round."""
    owner = job.rounds()[max(job.rounds())][rank].pid
    found = [pid for pid in descendants_of(owner) if "checkpoint_io.writer " in command_of(pid)]
    assert len(found) == 1, found
    return found[0]


def went_on(job: Job) -> None:
    """There was no further round, and all that was resumed was right."""
    assert list(job.rounds()) == [0], "training has noticed"


def finished(job: Job, folder: Path) -> None:
    """The job ends well, with its last step published, and leaves nothing unfinished."""
    assert job.finish(LONG_S) == 0
    last = newest_saved(job, 1 << 30)  # one rank may have been let go a step later than the others
    assert max(published(folder)) == last, (published(folder), last)
    assert [name for name in unfinished(folder) if not is_later(name, last)] == []
    verified(folder)


def is_later(name: str, step: int) -> bool:
    """Whether this is the folder of a save that not all ranks have come to."""
    return ".saving-" in name and int(name[5:].partition(".")[0]) > step


# ---- the disk -------------------------------------------------------------------------------------------------


def test_a_full_disk_and_one_that_is_read_only(disk: Path, launch: Callable[..., Job]) -> None:
    """Training goes on, the log names paths and sizes, and once it is over saves are published again."""
    job = train(launch, disk, "train_and_save(patience_s=0.2)", most_recent_k=2, save_timeout=20)
    wait_published(job, disk, 2 * INTERVAL)
    before = stamp(job)
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_frsize - CONTENT))
    said = wait_new(job, before, "save_failed", "ENOSPC")
    assert f"{disk}/iter_" in said, said
    assert "bytes are to be written" in said, said
    assert "were free when this began" in said, said
    newest = max(published(disk))
    verified(disk)
    wait_new(job, stamp(job), "save_failed", "ENOSPC")
    assert published(disk)[-1] == newest
    verified(disk)

    (disk / "filler").unlink()
    wait_next(job, disk)
    remount(disk, "ro")
    wait_new(job, before, "save_failed", "EROFS")
    verified(disk)
    remount(disk, "rw")
    wait_next(job, disk)
    went_on(job)
    finished(job, disk)


def test_a_frozen_file_system(launch: Callable[..., Job], tmp_path: Path) -> None:
    """The writer of one rank and the depot stand still, longer than save_timeout."""
    folder = tmp_path / "saves"
    job = train(launch, folder, "train_and_save(patience_s=0.2)", save_timeout=1, on_busy="skip")
    wait_published(job, folder, INTERVAL)
    before, stuck = stamp(job), [writer_of(job, 1), *pids(job, "depot")]
    assert len(stuck) == 2
    for pid in stuck:
        freeze(pid)
    newest = published(folder)
    said = wait_new(job, before, "save_failed", "is stuck and was killed")
    assert str(folder) in said, said
    wait_new(job, before, "save_failed", "both buffers are in use")
    job.wait_for(lambda: job.events("saved", rank=1)[-1].more["step"] > newest[-1] + 5 * INTERVAL, "training to go on")
    assert published(folder) == newest, "nobody was there to publish it"
    os.kill(stuck[1], signal.SIGCONT)
    wait_next(job, folder)
    went_on(job)
    finished(job, folder)


def test_the_end_does_not_wait_for_ever_for_a_depot(launch: Callable[..., Job], tmp_path: Path) -> None:
    """Nobody publishes the last save: the job ends all the same, and the log says which step is lost."""
    folder = tmp_path / "saves"
    job = train(launch, folder, "train_and_save(patience_s=0.2)", save_timeout=1, nproc=1)
    wait_published(job, folder, INTERVAL)
    freeze(*pids(job, "depot"))
    before = max(published(folder))
    job.wait_for(lambda: job.events("saved")[-1].more["step"] > before, "one more save")
    began = time.monotonic()
    assert job.finish() == 0
    assert time.monotonic() - began < 20
    last = job.events("saved")[-1].more["step"]
    assert job.log("publish_late")[0]["text"].endswith(f" {last}"), job.log("publish_late")
    assert max(published(folder)) == before
    verified(folder)


# ---- the writer -----------------------------------------------------------------------------------------------


def test_the_end_of_the_job_waits_for_a_save(launch: Callable[..., Job], tmp_path: Path) -> None:
    """A slow writer: its rank is waited for, longer than completion_timeout, and the step is there before the end."""
    folder = tmp_path / "saves"
    job = train(launch, folder, completion_timeout=1, save_timeout=30)
    wait_published(job, folder, INTERVAL)
    slow = writer_of(job, 1)
    freeze(slow)
    job.say("release")
    returned = job.wait_round(0, "returned")
    last = job.events("saved")[-1].more["step"]
    job.wait_for(lambda: time.monotonic() > returned[0].at + 2.5, "completion_timeout to pass")
    assert last not in published(folder)
    os.kill(slow, signal.SIGCONT)
    went_on(job)
    finished(job, folder)


def test_the_end_of_the_job_says_what_is_lost(launch: Callable[..., Job], tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    job = train(launch, folder, "train_and_save(patience_s=0.2)", save_timeout=1)
    wait_published(job, folder, INTERVAL)
    freeze(writer_of(job, 1))
    began = time.monotonic()
    assert job.finish() == 0
    assert time.monotonic() - began < 20
    last = job.events("saved", rank=1)[-1].more["step"]
    assert any(f"step {last} was not durable 1 s after the end" in line["text"] for line in job.log()), job.output()
    assert last not in published(folder)
    went_on(job)
    verified(folder)


def test_a_stopped_writer_makes_saves_skip(launch: Callable[..., Job], tmp_path: Path) -> None:
    """Both images of a rank are in use: its saves are skipped, and told. What not all ranks have is deleted. Then a
    rank is killed in the section `checkpointing`, which leaves nothing behind that looks like a hang later."""
    folder = tmp_path / "saves"
    source = """
    def fault(round, step):
        if round.index == 0 and round.rank == 1 and is_said("die"):
            with round.section("checkpointing"):
                os.kill(os.getpid(), signal.SIGKILL)
    train_and_save(fault, patience_s=0.1)
    """
    job = train(
        launch, folder, "import os, signal\nfrom trainer_kit import is_said\n" + dedent(source), on_busy="skip", **HANGS
    )
    wait_published(job, folder, INTERVAL)
    stopped = writer_of(job, 1)
    before = stamp(job)
    freeze(stopped)
    said = wait_new(job, before, "save_failed", "both buffers are in use")
    skipped = int(said.split("step ")[1].split()[0])
    os.kill(stopped, signal.SIGCONT)
    wait_next(job, folder, after=skipped)
    assert skipped not in published(folder)
    went_on(job)

    job.say("die")
    after = job.wait_round(1, "resumed")
    assert {each.more["wrong"] for each in after.values()} == {""}
    job.wait_for(lambda: time.monotonic() > after[0].at + 3, "three times what a hang would take")
    wait_next(job, folder)
    job.assert_rounds(2)
    finished(job, folder)


def test_waiting_for_a_slow_writer_is_no_hang(launch: Callable[..., Job], tmp_path: Path) -> None:
    """Both images are in use, and training waits for one of them, longer than a hang may take."""
    folder = tmp_path / "saves"
    job = train(launch, folder, "train_and_save(patience_s=0.1)", on_busy="wait", save_timeout=30, **HANGS)
    wait_published(job, folder, INTERVAL)
    stopped = writer_of(job, 1)
    freeze(stopped)
    last = job.wait_for(lambda: time.monotonic() > job.events("saved", rank=1)[-1].at + 4, "training to wait")
    os.kill(stopped, signal.SIGCONT)
    assert last
    wait_next(job, folder)
    went_on(job)
    assert job.finish(LONG_S) == 0
    verified(folder)


def test_ranks_whose_disks_are_too_slow_at_different_times_save_all_the_same(
    launch: Callable[..., Job], tmp_path: Path
) -> None:
    """Each disk takes every second save. If each rank went on with what the other has skipped, then after step 20 one
    would take 30, 50, 70 and so on, the other one 40, 60, 80: none would be complete."""
    folder = tmp_path / "saves"
    source = """
    def fault(round, step):
        if step % 5 == 0:
            say(f"at-{round.rank}-{step}")
    train_and_save(fault, due=True, step_s=0.03)
    """
    here = Path(__file__).parent
    env = {"PYTHONPATH": f"{here}{os.pathsep}{here / 'injected'}", "FAULTS_SLOW": "[[15, 20], [25, 20]]"}
    job = train(launch, folder, "from trainer_kit import say\n" + dedent(source), on_busy="skip", env=env)
    job.wait_for(lambda: len([step for step in published(folder) if step > 20]) >= 3, "three saves after step 20")
    lines = [line["text"] for line in job.log("save_failed")]
    assert len(lines) >= 2
    assert all("skipped: both buffers are in use" in line for line in lines), "what is given up is no news"
    went_on(job)
    finished(job, folder)


# ---- resources ------------------------------------------------------------------------------------------------


def test_a_hundred_saves_in_a_row(launch: Callable[..., Job], tmp_path: Path) -> None:
    """What every process of the job holds does not grow with the number of saves."""
    folder = tmp_path / "saves"
    job = train(launch, folder, "train_and_save(step_s=0)", most_recent_k=2)
    wait_published(job, folder, 10 * INTERVAL)
    # But for the process that new ranks are forked from, which takes its time to import torch.
    mine = {pid: name for pid, _ in processes_with(job.mark) if " -c " not in (name := command_of(pid))}
    before = {pid: Usage(pid) for pid in mine}
    assert len(before) >= 6, mine
    job.wait_for(lambda: max(published(folder), default=0) >= 110 * INTERVAL, "100 more saves", LONG_S)
    after = {pid: Usage(pid) for pid in mine if state_of(pid) not in ("", "Z")}
    for pid, use in after.items():
        told = (mine[pid], before[pid], use)
        assert use.descriptors <= before[pid].descriptors + 4, told
        assert use.threads <= before[pid].threads + 2, told
        assert use.memory_mb <= before[pid].memory_mb + 8, told
    assert sum("checkpoint_io" in mine[pid] for pid in after) == 3, "two writers and a depot of ten saves ago"
    went_on(job)
    finished(job, folder)


def test_three_thousand_tensors_and_few_descriptors(launch: Callable[..., Job], tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    few = ("bash", "-c", 'ulimit -n 1024; exec "$@"', "few")
    source = "train_and_save(step_s=0)"
    job = train(launch, folder, source, prefix=few, env={"FAULTS_STATE": "3000x16"}, most_recent_k=2)
    wait_published(job, folder, 3 * INTERVAL)
    ranks = job.rounds()[0]
    assert all(Usage(each.pid).descriptors < 200 for each in ranks.values())
    job.kill(ranks[1])
    back = job.wait_round(1, "resumed")
    assert [(each.more["wrong"], each.more["step"] >= 2 * INTERVAL) for each in back.values()] == [("", True)] * 2
    assert len(resumes(job)) == 2
    finished(job, folder)
