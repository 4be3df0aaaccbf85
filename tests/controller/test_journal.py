"""The journal gives back what was appended, or says exactly what it cannot give back."""

import errno
import os
import random
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.controller.journal import MEMORY_LIMIT, Journal, JournalError, read_header, read_records
from perdure.controller.journal_format import PREFIX, RECORD_LIMIT

Fill = Callable[[Path], Path]
Grow = Callable[[Path], None]
PAYLOADS = [b"first", b"second record", b"\0\0\0\0third\0"]


def write_journal(path: Path, payloads: list[bytes]) -> list[int]:
    """A journal with these records; the offsets at which they stand, and the end."""
    journal = Journal.open(path, "llama", 1)
    offsets = [journal.append(payload) for payload in payloads]
    offsets.append(journal.end)
    journal.close()
    return offsets


def payloads_in(path: Path) -> list[bytes]:
    return [payload for _, payload in read_records(path)]


def test_gives_back_what_was_appended_and_goes_on_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    offsets = write_journal(path, PAYLOADS)
    assert list(read_records(path)) == list(zip(offsets, PAYLOADS, strict=False))
    journal = Journal.open(path, "llama", 7)
    assert (journal.cut, journal.attempt, journal.job) == (0, 1, "llama")
    journal.append(b"fourth")
    assert journal.sync()
    assert journal.behind == 0
    journal.close()
    assert payloads_in(path) == [*PAYLOADS, b"fourth"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["journal"]


def test_appended_is_behind_until_synced_but_a_reader_sees_it(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", "llama", 1)
    journal.append(b"fault")
    assert journal.behind == PREFIX.size + len(b"fault")
    assert payloads_in(tmp_path / "journal") == [b"fault"]
    assert journal.sync()
    assert journal.behind == 0
    journal.close()


def test_the_journal_of_another_job_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path, PAYLOADS)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"job 'llama'.*this is job 'gpt'.*run directory of its own"):
        Journal.open(path, "gpt", 1)
    assert path.read_bytes() == before
    assert read_header(path).job == "llama"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(JournalError, match="not a regular file"):
        Journal.open(tmp_path / "fifo", "llama", 1)
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal.open(tmp_path, "llama", 1)
    with pytest.raises(JournalError, match="No such file or directory"):
        Journal.open(tmp_path / "nowhere" / "journal", "llama", 1)
    with pytest.raises(JournalError, match="No such file or directory"):
        read_header(tmp_path / "nowhere")


def test_records_have_bounds(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", "llama", 1)
    for payload in (b"", b"x" * (RECORD_LIMIT + 1)):
        with pytest.raises(JournalError, match="must have 1 to"):
            journal.append(payload)
    journal.append(b"x" * RECORD_LIMIT)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.append(b"late")
    with pytest.raises(JournalError, match="is closed"):
        journal.sync()
    assert [len(payload) for payload in payloads_in(tmp_path / "journal")] == [RECORD_LIMIT]


def write_until_killed(path: Path, told: int) -> None:
    """Append numbered records of changing sizes for ever; tell the count after each sync."""
    journal = Journal.open(path, "llama", 1)
    count = len(payloads_in(path))
    while True:
        for _ in range(1 + count % 5):
            journal.append(b"%d:" % count + b"x" * (count * 37 % 9000))
            count += 1
        assert journal.sync()
        os.write(told, b"%10d" % count)


def test_killed_at_any_point_it_has_a_prefix_of_what_was_appended_and_all_that_was_synced(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    dice = random.Random(20261130)
    for _ in range(50):
        reading, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                write_until_killed(path, told)
            finally:
                os._exit(1)
        os.close(told)
        assert select.select([reading], [], [], 20.0)[0], "the writer has not synced anything for 20 s"
        select.select([], [], [], dice.random() * 0.01)  # the random point
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        synced = int(os.read(reading, 1 << 20)[-10:])
        os.close(reading)
        numbers = [int(payload.partition(b":")[0]) for payload in payloads_in(path)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= synced
    assert path.exists()


def test_a_full_disk_loses_nothing(small_disk: Path, fill: Fill, grow: Grow) -> None:
    journal = Journal.open(small_disk / "journal", "llama", 1)
    filler = fill(small_disk)
    appended: list[bytes] = []

    def append(count: int) -> None:
        for _ in range(count):
            appended.append(b"%d " % len(appended) + b"y" * 10_000)
            journal.append(appended[-1])

    append(10)
    assert journal.sync(), "the space reserved ahead takes the next faults"
    append(500)
    assert not journal.sync()
    assert journal.behind > 0
    assert "No space left" in journal.trouble
    assert f"tmpfs at {small_disk}" in journal.trouble
    assert payloads_in(small_disk / "journal") == appended[: len(payloads_in(small_disk / "journal"))]
    filler.unlink()
    assert not journal.sync(), "5 MB do not fit into 2 MiB even so"
    grow(small_disk)
    append(1)
    assert journal.sync()
    assert (journal.behind, journal.trouble) == (0, "")
    journal.close()
    assert payloads_in(small_disk / "journal") == appended


def test_a_crash_on_a_full_disk_leaves_a_torn_tail_at_most(small_disk: Path, fill: Fill, grow: Grow) -> None:
    path = small_disk / "journal"
    journal = Journal.open(path, "llama", 1)
    fill(small_disk)
    for _ in range(300):
        journal.append(b"z" * 9_000)
    # As after a crash: what is on disk is all there is.
    whole = payloads_in(path)
    assert 50 < len(whole) < 300
    assert set(whole) == {b"z" * 9_000}
    grow(small_disk)
    (small_disk / "copy").write_bytes(path.read_bytes())
    recovered = Journal.open(small_disk / "copy", "llama", 1)
    assert recovered.cut > 0
    recovered.close()
    assert payloads_in(small_disk / "copy") == whole
    journal.close()


def test_a_controller_that_crashed_on_a_full_disk_comes_back(small_disk: Path, fill: Fill) -> None:
    """The space that its predecessor reserved is still there."""
    path = small_disk / "journal"
    pid = os.fork()
    if pid == 0:
        try:
            journal = Journal.open(path, "llama", 1)
            journal.append(b"a fault")
            fill(small_disk)
        finally:
            os._exit(0)  # without closing: as killed
    os.waitpid(pid, 0)
    journal = Journal.open(path, "llama", 1)
    journal.append(b"another fault")
    assert journal.sync()
    journal.close()
    assert payloads_in(path) == [b"a fault", b"another fault"]


def test_a_file_system_that_cannot_reserve_will_do(ram_disk: Path) -> None:
    write_journal(ram_disk / "journal", PAYLOADS)
    assert payloads_in(ram_disk / "journal") == PAYLOADS


def test_a_disk_full_at_the_start_is_an_error_that_names_it(small_disk: Path, fill: Fill) -> None:
    fill(small_disk)
    with pytest.raises(JournalError, match=rf"no room for the journal.*tmpfs at {small_disk}: 0 bytes.*[Ff]ree some"):
        Journal.open(small_disk / "journal", "llama", 1)
    assert os.listdir(small_disk) == ["filler"]


def test_a_read_only_disk_is_an_error(read_only_disk: Path) -> None:
    with pytest.raises(JournalError, match="Read-only file system"):
        Journal.open(read_only_disk / "journal", "llama", 1)


def test_more_than_the_limit_waiting_is_refused_not_dropped(small_disk: Path) -> None:
    journal = Journal.open(small_disk / "journal", "llama", 1)
    big = b"b" * (8 << 20)
    for _ in range(MEMORY_LIMIT // len(big) - 1):
        journal.append(big)
    with pytest.raises(JournalError, match=r"wait for the disk and the limit is.*No space left"):
        journal.append(big)
    assert journal.append(b"a small one still fits")
    journal.close()
    assert journal.behind > 0


def test_what_failed_to_sync_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fdatasync the kernel may drop the data and answer 'fine' to the next one."""
    path = tmp_path / "journal"
    journal = Journal.open(path, "llama", 1)
    journal.append(b"safe")
    assert journal.sync()
    journal.append(b"at risk")

    def fail(fd: int) -> None:
        os.pwrite(fd, b"\0" * journal.behind, journal.end - journal.behind)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        assert not journal.sync()
    assert "Input/output error" in journal.trouble
    assert payloads_in(path) == [b"safe"]
    journal.append(b"later")
    assert journal.sync()
    assert (journal.trouble, journal.behind) == ("", 0)
    journal.close()
    assert payloads_in(path) == [b"safe", b"at risk", b"later"]


def test_append_does_not_wait_for_a_frozen_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path / "journal", "llama", 1)
    frozen, thawed = threading.Event(), threading.Event()

    def freeze(_: int) -> None:
        frozen.set()
        assert thawed.wait(20)

    monkeypatch.setattr(os, "fdatasync", freeze)
    journal.append(b"one")
    syncing = threading.Thread(target=journal.sync)
    syncing.start()
    assert frozen.wait(20)
    journal.append(b"two")
    assert journal.busy
    assert payloads_in(tmp_path / "journal") == [b"one"]
    thawed.set()
    syncing.join(20)
    assert payloads_in(tmp_path / "journal") == [b"one", b"two"]
    assert journal.behind == PREFIX.size + 3
    journal.close()
    assert journal.behind == 0


def test_appending_and_syncing_at_once_keeps_the_order(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", "llama", 1)
    done = threading.Event()

    def sync_until_done() -> None:
        while not done.is_set():
            assert journal.sync()

    syncing = threading.Thread(target=sync_until_done)
    syncing.start()
    payloads = [b"%d" % number * (number % 50 + 1) for number in range(5000)]
    for payload in payloads:
        journal.append(payload)
    done.set()
    syncing.join(20)
    journal.close()
    assert payloads_in(tmp_path / "journal") == payloads


def test_closing_gives_reserved_space_back(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", "llama", 1)
    journal.append(b"x")
    journal.sync()
    reserved = (tmp_path / "journal").stat()
    journal.close()
    closed = (tmp_path / "journal").stat()
    assert reserved.st_size == closed.st_size
    assert closed.st_blocks * 512 <= 64 << 10
