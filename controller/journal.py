"""The journal: every event of a job, on disk before it is acted on. It is all that outlives a controller.

Rules:

- `append` hands a record to the kernel: it then survives the death of this process, not of the machine. `sync` makes
  everything appended so far survive both. The service syncs what must not be lost (faults, plans, commits, verdicts)
  before it acts on it, and the rest now and then.
- A record stays in memory until `fdatasync` has said that it is on disk. When `fdatasync` fails the kernel may have
  dropped the data and marked it clean, so that asking again would answer 'fine'; only writing it again helps.
- The disk may fill up, fail or freeze, and the job goes on. Records wait in memory, `behind` says how many bytes,
  `trouble` says why, and every append and every sync tries again. At MEMORY_LIMIT `append` refuses: it never drops a
  record silently.
- `append` never waits for a disk that is known to be slow: while a `sync` is under way it only takes the record into
  memory, and the one who syncs hands it to the kernel afterwards.
- Records are written at offsets that this object knows, so a write that stopped half-way is simply written over. A
  crash at that point leaves a torn tail, which the next `open` cuts.
- One writer at a time. The lease sees to that (`lease.py`), not this module.
"""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from ..protocol.folders import sync_folder
from .disk_space import FULL, describe_space, reserve
from .journal_format import FORMAT, JournalError, JournalHeader, RecordReader, encode_header, frame

__all__ = ["MEMORY_LIMIT", "Journal", "JournalError", "JournalHeader", "read_header", "read_records"]

MEMORY_LIMIT = 64 << 20
"""Bytes that may wait for the disk."""

_RESERVE_STEP = 1 << 20
_RESERVE_LEAST = 64 << 10
"""Bytes that must be to hand when a journal is opened; a step if there is that much."""

_WRITE_CHUNK = 1 << 20


class Journal:
    """An open journal. `append`, `behind` and `trouble` are for the thread that decides, `sync` for another one."""

    def __init__(self, path: Path, fd: int, header: JournalHeader, end: int, cut: int) -> None:
        self.path = path
        self.job = header.job
        self.attempt = header.attempt
        self.cut = cut
        self.trouble = ""
        self._fd = fd
        self._closed = False
        # [_synced, _end) is in `_tail`; [_synced, _written) of it is with the kernel.
        self._synced = self._written = self._end = self._reserved = end
        self._can_reserve = True
        self._tail = bytearray()
        self._memory = threading.Lock()  # held for moments, never over a system call
        self._disk = threading.Lock()  # held by the one who writes or syncs

    @classmethod
    def open(cls, path: Path, job: str, attempt: int) -> "Journal":
        """Create the journal of `job`, or go on with the one that is there.

        A torn tail is cut; `cut` says how many bytes. A journal that is there keeps its own `attempt`.
        """
        try:
            if not path.exists() or (path.is_file() and path.stat().st_size == 0):
                _create(path, JournalHeader(FORMAT, job, attempt, time.time()))
            fd = _open_regular(path, os.O_RDWR)
        except OSError as error:
            raise _cannot_open(path, error) from error
        try:
            journal = cls._validate(path, fd, job)
            journal._reserve_at_open()
        except OSError as error:
            os.close(fd)
            raise _cannot_open(path, error) from error
        except BaseException:
            os.close(fd)
            raise
        return journal

    @classmethod
    def _validate(cls, path: Path, fd: int, job: str) -> "Journal":
        with open(fd, "rb", closefd=False) as file:
            reader = RecordReader(file, path)
            if reader.header.job != job:
                raise JournalError(
                    f"{path} is the journal of job {reader.header.job!r}, and this is job {job!r}; "
                    "give each job a run directory of its own, or move that one away"
                )
            for _ in reader:
                pass
        if reader.torn:
            os.ftruncate(fd, reader.end)
        # What a controller that crashed left with the kernel is made safe before anybody decides on it.
        os.fsync(fd)
        return cls(path, fd, reader.header, reader.end, reader.torn)

    @property
    def behind(self) -> int:
        """Bytes appended that are not known to be on disk."""
        return self._end - self._synced

    @property
    def busy(self) -> bool:
        """Whether a thread writes or syncs just now. A further `sync` would wait for it, as long as the disk does."""
        return self._disk.locked()

    @property
    def end(self) -> int:
        """The offset at which the next record will stand."""
        return self._end

    def append(self, *payloads: bytes) -> int:
        """Add records, with one write for all of them; the offset of the first. Does not wait for the disk."""
        with self._memory:
            self._require_open()
            offset = self._end
            for payload in payloads:
                record = frame(self._end, payload)
                if len(self._tail) + len(record) > MEMORY_LIMIT:
                    raise JournalError(
                        f"{self.path}: {len(self._tail)} bytes wait for the disk and the limit is {MEMORY_LIMIT}; "
                        f"the record was refused. The disk: {self.trouble or 'no sync has finished'}"
                    )
                self._tail += record
                self._end += len(record)
        self._write_unless_busy()
        return offset

    def sync(self) -> bool:
        """Put everything appended so far on disk. Blocks as long as the disk does; call it in a thread, one at a time.

        True: it is there. False: it is not, `trouble` says why, and the records are kept for the next try.
        """
        with self._disk:
            self._require_open()
            if not self._sync_locked():
                return False
        self._write_unless_busy()
        return True

    def close(self) -> None:
        """Sync, give back the space reserved ahead, close. Blocks like `sync`; doing it twice is fine."""
        with self._disk:
            if self._closed:
                return
            with self._memory:
                self._closed = True
            if self._sync_locked():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._written)
            os.close(self._fd)

    def _require_open(self) -> None:
        if self._closed:
            raise JournalError(f"{self.path} is closed")

    def _write_unless_busy(self) -> None:
        # Again after each release: a record that came between the last look and the release would be left in memory.
        while not self._closed and self._written < self._end and self._disk.acquire(blocking=False):
            try:
                done = self._closed or self._write_out()
            finally:
                self._disk.release()
            if not done:
                return

    def _sync_locked(self) -> bool:
        if not self._write_out():
            return False
        mark = self._written
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._written = self._synced  # see the rules above: what failed to sync is written again
            self.trouble = self._explain(error)
            return False
        with self._memory:
            del self._tail[: mark - self._synced]
            self._synced = mark
        self.trouble = ""
        return True

    def _write_out(self) -> bool:
        """Hand to the kernel all that it does not have. `_disk` is held."""
        try:
            while chunk := self._next_chunk():
                self._reserve_for(len(chunk))
                count = os.pwrite(self._fd, chunk, self._written)
                if count == 0:
                    raise OSError(errno.EIO, "nothing was written")
                self._written += count
        except OSError as error:
            self.trouble = self._explain(error)
            return False
        return True

    def _next_chunk(self) -> bytes:
        with self._memory:
            start = self._written - self._synced
            return bytes(self._tail[start : start + _WRITE_CHUNK])

    def _reserve_for(self, count: int) -> None:
        """Keep at least half a step reserved behind the next `count` bytes, as long as the file system has it."""
        wanted = self._written + count + _RESERVE_STEP // 2
        if not self._can_reserve or wanted <= self._reserved:
            return
        start = max(self._reserved, self._written)
        length = -(-(wanted - start) // _RESERVE_STEP) * _RESERVE_STEP
        try:
            self._can_reserve = reserve(self._fd, start, length)
        except OSError:
            return  # no more to reserve; what is reserved is still ours, and the write will tell when it is used up
        self._reserved = start + length

    def _reserve_at_open(self) -> None:
        """The least must be there; more is taken if there is more. A nearly full disk is no reason to stay away."""
        self._can_reserve = reserve(self._fd, self._end, _RESERVE_LEAST)
        self._reserved = self._end + _RESERVE_LEAST
        self._reserve_for(0)

    def _explain(self, error: OSError) -> str:
        if error.errno in FULL:
            return f"{error.strerror}: {describe_space(self.path)}"
        return f"{error.strerror} on {self.path}"


def read_header(path: Path) -> JournalHeader:
    """Whose journal this is."""
    with _reading(path) as reader:
        return reader.header


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every whole record, (offset, payload), of a live journal too. A torn tail ends it; damage raises."""
    with _reading(path) as reader:
        yield from reader


@contextlib.contextmanager
def _reading(path: Path) -> Generator[RecordReader]:
    try:
        fd = _open_regular(path, os.O_RDONLY)
    except OSError as error:
        raise _cannot_open(path, error) from error
    with open(fd, "rb") as file:
        yield RecordReader(file, path)


def _open_regular(path: Path, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO must not wait for its other end. It means nothing to a regular file.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise JournalError(f"{path} is not a regular file; a journal must be one")


def _create(path: Path, header: JournalHeader) -> None:
    """A journal appears under its name with a whole header, or not at all."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(frame(0, encode_header(header)))
            file.flush()
            os.fsync(fd)
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def _cannot_open(path: Path, error: OSError) -> JournalError:
    if error.errno in FULL:
        return JournalError(
            f"no room for the journal {path}: {error.strerror}; {describe_space(path.parent)}, and "
            f"{_RESERVE_LEAST} bytes are needed to start. Free some, or name a run directory on another file system"
        )
    return JournalError(f"cannot open the journal {path}: {error.strerror}; its directory must exist and be yours")
