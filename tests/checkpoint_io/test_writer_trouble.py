"""The writer process on disks that are full, read-only, frozen or lying; over rounds; and for long."""

import fcntl
import gc
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.checkpoint_io.disk import TRANSIENT
from perdure.checkpoint_io.names import local_name, saving_name
from perdure.checkpoint_io.writer_messages import (
    Damaged,
    Failed,
    Released,
    Written,
)
from perdure.protocol.checkpoints import SaveId, Tier

from .writing import SHARE, SIZE, VALUES, Image, Trainer, check_shard, children, names, tmpfs, training

FREEZE, THAW = 0xC0045877, 0xC0045878
"""FIFREEZE and FITHAW of <linux/fs.h>."""


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with training() as trainer:
        yield trainer


# ---- trouble with disks ---------------------------------------------------------------------------------------


def test_no_space_on_one_tier_does_not_spoil_the_other(trainer: Trainer, tmp_path: Path) -> None:
    data = trainer.images[0].fill()
    with tmpfs(tmp_path / "small", "1m") as small:
        trainer.write(1, small, tmp_path / "d")
        told = trainer.finish(1)
        assert [type(each) for each in told] == [Failed, Written, Released]
        assert isinstance(told[0], Failed)
        assert all(part in told[0].why for part in (str(small), "ENOSPC", str(SIZE)))
        assert names(small) == []
        check_shard(tmp_path / "d" / saving_name(SaveId(1, 9, 4)), data[:SHARE], values=0, extra=0)


def test_space_that_is_freed_in_time_saves_the_durable_copy(trainer: Trainer, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "3m") as small:
        (small / "other").write_bytes(bytes(2 << 20))
        trainer.write(1, None, small)
        trainer.until(lambda: trainer.notes)
        assert "ENOSPC" in trainer.notes[0]
        (small / "other").unlink()
        assert [type(each) for each in trainer.finish(1)] == [Written, Released]


def test_one_that_is_tried_again_gives_way_to_a_newer_save(trainer: Trainer, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "3m") as small:
        subprocess.run(["mount", "-o", "remount,ro", small], check=True, timeout=10)
        trainer.write(1, None, small)
        trainer.until(lambda: trainer.notes)
        trainer.write(2, None, tmp_path / "d", 1)
        trainer.finish(2)
        failed = trainer.of(1)[0]
        assert isinstance(failed, Failed)
        assert "EROFS" in failed.why
        assert "gives way to step 2" in failed.why
        assert isinstance(trainer.of(2)[0], Written)


def test_the_deadline_ends_the_tries(trainer: Trainer, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as small:
        trainer.write(1, None, small, deadline_s=1.5)
        failed = trainer.finish(1)[0]
        assert isinstance(failed, Failed)
        assert all(part in failed.why for part in ("2 tries", "1.5 s", "ENOSPC"))


def test_a_disk_that_is_too_slow_fails_the_save_and_not_the_process(trainer: Trainer, tmp_path: Path) -> None:
    pid = trainer.pid()
    trainer.write(1, tmp_path / "l", tmp_path / "d", deadline_s=0.0)
    assert [type(each) for each in trainer.finish(1)] == [Failed, Failed, Released]
    assert "not written within 0 s" in trainer.why(1)
    assert names(tmp_path) == []
    assert trainer.pid() == pid


def test_a_local_copy_that_was_damaged_is_not_passed_on(trainer: Trainer, tmp_path: Path) -> None:
    """The disk gives back other bytes than it was given, found on the way to the durable tier."""
    with tmpfs(tmp_path / "small", "3m") as small:
        subprocess.run(["mount", "-o", "remount,ro", small], check=True, timeout=10)
        trainer.write(1, tmp_path / "l", small)
        trainer.until(lambda: trainer.notes)
        with open(tmp_path / "l" / local_name(SaveId(1, 9, 4)) / "__2_0.distcp", "r+b") as file:
            file.write(b"\xff\x00\xff")
        subprocess.run(["mount", "-o", "remount,rw", small], check=True, timeout=10)
        told = trainer.finish(1)
        assert [type(each) for each in told] == [Released, Written, Damaged, Failed]
        assert isinstance(told[2], Damaged)
        assert told[2].tier is Tier.LOCAL
        assert names(small) == []


def test_transient_errors_are_those_that_pass() -> None:
    import errno

    assert {errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS} < TRANSIENT


def test_a_process_that_does_not_answer_is_replaced_after_the_deadline(trainer: Trainer, tmp_path: Path) -> None:
    first = trainer.pid()
    os.kill(first, signal.SIGSTOP)
    trainer.write(1, tmp_path / "l", tmp_path / "d", deadline_s=0.2)
    trainer.write(2, tmp_path / "l", image=1)
    trainer.until(lambda: trainer.is_free(1) and trainer.is_free(2))
    failed = trainer.of(1)[0]
    assert isinstance(failed, Failed)
    assert f"no answer from {tmp_path / 'l'}" in failed.why
    assert isinstance(trainer.of(2)[0], Failed)
    assert first not in children()
    trainer.write(3, tmp_path / "l", tmp_path / "d")
    assert [type(each) for each in trainer.finish(3)] == [Released, Written, Written]


@contextmanager
def freezable(place: Path) -> Iterator[int]:
    """A file system of its own on `place`; its descriptor, for FREEZE and THAW."""
    if os.geteuid() != 0:
        pytest.skip("a file system that can be frozen needs root")
    disk = place.with_suffix(".disk")
    with open(disk, "wb") as file:
        file.truncate(32 << 20)
    place.mkdir()
    made = subprocess.run(["mkfs.ext4", "-q", disk], capture_output=True, timeout=30)
    if made.returncode or subprocess.run(["mount", "-o", "loop", disk, place], timeout=10).returncode:
        pytest.skip("no loop device can be mounted here")
    folder = os.open(place, os.O_RDONLY)
    try:
        yield folder
    finally:
        os.close(folder)
        subprocess.run(["umount", "-l", place], check=True, timeout=10)


def test_a_frozen_file_system(trainer: Trainer, tmp_path: Path) -> None:
    """The process is stuck in the kernel and cannot even be killed: its image stays untouched, the other one works."""
    with freezable(tmp_path / "net") as disk:
        stuck = Path(f"/proc/{trainer.pid()}")
        fcntl.ioctl(disk, FREEZE, 0)
        try:
            trainer.write(1, None, tmp_path / "net", deadline_s=0.2)
            trainer.until(lambda: trainer.of(1))
            failed = trainer.of(1)[0]
            assert isinstance(failed, Failed)
            assert f"no answer from {tmp_path / 'net'}" in failed.why
            trainer.write(2, tmp_path / "l", image=1)
            trainer.until(lambda: trainer.is_free(2))
            assert isinstance(trainer.of(2)[0], Written)
            assert not trainer.is_free(1)
            assert stuck.exists()
        finally:
            fcntl.ioctl(disk, THAW, 0)
        trainer.until(lambda: trainer.is_free(1))
        trainer.write(3, None, tmp_path / "net")
        assert isinstance(trainer.finish(3)[0], Written)


def test_a_fresh_image_in_the_place_of_one_that_is_stuck(trainer: Trainer, tmp_path: Path) -> None:
    with freezable(tmp_path / "net") as disk:
        fcntl.ioctl(disk, FREEZE, 0)
        fresh = Image()
        try:
            trainer.write(1, None, tmp_path / "net", deadline_s=0.2)
            trainer.until(lambda: trainer.of(1))
            data = fresh.fill()
            trainer.writer.use_image(0, fresh.fd, SIZE)
            trainer.write(2, tmp_path / "l")
            trainer.finish(2)
            check_shard(tmp_path / "l" / local_name(SaveId(2, 9, 4)), data, values=0, extra=1)
        finally:
            fcntl.ioctl(disk, THAW, 0)
            fresh.close()
    # Of the former one nothing is said: the number means another memory now.
    assert not trainer.is_free(1)


# ---- rounds ---------------------------------------------------------------------------------------------------


def test_abandon_drops_what_is_of_another_round(trainer: Trainer, tmp_path: Path) -> None:
    os.kill(trainer.pid(), signal.SIGSTOP)
    trainer.write(1, tmp_path / "l", tmp_path / "d")
    trainer.write(2, tmp_path / "l", tmp_path / "d", 1, round=5)
    assert len(trainer.writer.pending()) == 2
    trainer.writer.abandon(9, 5)
    assert trainer.writer.pending() == (SaveId(2, 9, 5),)
    # What it reads first is the write of the dropped save: it may be through with the local tier by then.
    os.kill(trainer.pid(), signal.SIGCONT)
    trainer.finish(2)
    trainer.until(lambda: trainer.is_free(1))
    assert not [each for each in trainer.of(1) if isinstance(each, Failed)]
    assert sum(isinstance(each, Written) for each in trainer.of(2)) == 2
    assert not [name for name in names(tmp_path) if "tmp" in name]


def test_abandon_ends_the_tries_and_frees_the_image(trainer: Trainer, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as small:
        trainer.write(1, None, small)
        trainer.until(lambda: trainer.notes)
        trainer.writer.abandon(9, 5)
        trainer.until(lambda: trainer.is_free(1), 2)
        assert [type(each) for each in trainer.of(1)] == [Released]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: a hundred saves with their fsyncs take long on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# ---- many -----------------------------------------------------------------------------------------------------


def test_a_hundred_saves_cost_nothing_that_stays(trainer: Trainer, memory: Path) -> None:
    def sizes() -> tuple[int, int, int, int]:
        gc.collect()
        pid = trainer.pid()
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = next(int(row.split()[1]) for row in status.splitlines() if row.startswith("RssAnon"))
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{pid}/fd")), anonymous, own

    def save(step: int) -> None:
        trainer.write(step, memory / "l", memory / "d", step % 2, values=VALUES)
        assert sum(isinstance(each, Written) for each in trainer.finish(step)) == 2
        trainer.told.clear()
        shutil.rmtree(memory / "l")
        shutil.rmtree(memory / "d")

    for step in range(10):
        save(step)
    before = sizes()
    for step in range(10, 110):
        save(step)
    after = sizes()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 2_000
    assert after[3] - before[3] < 4_000


def test_writers_that_come_and_go_leave_no_descriptors() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with training():
            pass
    assert sorted(os.listdir("/proc/self/fd")) == before
