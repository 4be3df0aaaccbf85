"""One output of the log: a file, a FIFO or a stream, with a bounded queue and a thread of its own.

Whatever happens to it (full, broken, its reader gone or frozen), nobody else waits: not the caller, not another
output. A line that cannot be written now is dropped and counted. The first loss is said on stderr; every later line is
another try, and the first that succeeds is preceded by a line that tells how many are missing.
"""

import contextlib
import errno
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

QUEUE_LIMIT = 8 << 20
"""Bytes of lines that may wait for one output."""

_PATIENCE_S = 1.0
"""How long one line waits for a reader that does not read. Once it waited in vain, the next lines do not wait."""

_CHUNK = select.PIPE_BUF
"""Bytes that a pipe takes without blocking once it is writable."""


class Target:
    """Where bytes go. `write` writes all or raises OSError; after half a line, the next one begins a new line."""

    name = "the log"

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it. Must not block on data: there is none held back."""


class Descriptor(Target):
    """A file descriptor. One that blocks is only written to when it is writable."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self._regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._torn = False
        self._patience_s = _PATIENCE_S

    def write(self, data: bytes) -> None:
        rest = memoryview(b"\n" + data if self._torn else data)
        begun = 0
        try:
            while begun < len(rest):
                self._wait_writable()
                begun += os.write(self.fd, rest[begun : begun + (len(rest) if self._regular else _CHUNK)])
        except OSError:
            self._forget(begun)
            raise
        self._torn = False

    def _wait_writable(self) -> None:
        if self._regular:
            return
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(self._patience_s * 1000):
            self._patience_s = 0.0
            raise OSError(errno.EAGAIN, "nobody reads it")
        self._patience_s = _PATIENCE_S

    def _forget(self, begun: int) -> None:
        """Half a line was written: take it back, or else begin the next write with a line end."""
        if not begun:
            return
        self._torn = True
        if self._regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, os.fstat(self.fd).st_size - begun)
                self._torn = False


class LogFile(Target):
    """A file by its path, opened when there is something to write, and again after every error."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._open: Descriptor | None = None

    def write(self, data: bytes) -> None:
        if self._open is None:
            # O_NONBLOCK: a FIFO without a reader is refused, and so is a full one. It means nothing to a file.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._open = Descriptor(self.name, os.open(self._path, flags, 0o600))
            if _ends_in_mid_line(self._path):
                data = b"\n" + data
        try:
            self._open.write(data)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._open is not None:
            fd, self._open = self._open.fd, None
            with contextlib.suppress(OSError):
                os.close(fd)


class Stream(Target):
    """A text stream that has no descriptor, such as one in memory."""

    def __init__(self, stream: TextIO) -> None:
        self.name = getattr(stream, "name", "the log stream")
        self._stream = stream

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(data.decode())
            self._stream.flush()
        except Exception as error:  # closed by its owner, say; the object is not ours and may raise anything
            raise OSError(errno.EIO, str(error)) from error


def target_of(stream: TextIO) -> Target:
    """A stream's descriptor: its Python object has locks and buffers, which a frozen reader would hold."""
    try:
        return Descriptor(str(getattr(stream, "name", "the log stream")), stream.fileno())
    except (OSError, AttributeError, ValueError):
        return Stream(stream)


def _ends_in_mid_line(path: Path) -> bool:
    """A writer that was killed may have left half a line."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Output:
    """A target with its queue and its thread. `gap` writes the line that tells of lost ones."""

    def __init__(self, target: Target, gap: Callable[[int], bytes]) -> None:
        self.name = target.name
        self.lost = 0
        self._target = target
        self._gap = gap
        self._untold = 0
        self._failing = False
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        self._closing = False
        self._changed = threading.Condition()
        # A daemon: one that hangs in a frozen file system must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"log {self.name}", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        with self._changed:
            if self._closing or self._waiting + len(data) > QUEUE_LIMIT:
                self._count_lost()
                return
            self._queue.append(data)
            self._waiting += len(data)
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Write what waits, until `deadline` (time.monotonic) at the latest; what is then left is lost and counted."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            while self._queue:
                self._queue.popleft()
                self._count_lost()

    def _run(self) -> None:
        while (data := self._next()) is not None:
            self._write(data)
        self._target.close()

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._queue:
                if self._closing:
                    return None
                self._changed.wait()
            data = self._queue.popleft()
            self._waiting -= len(data)
            return data

    def _write(self, data: bytes) -> None:
        untold = self._untold
        try:
            self._target.write(self._gap(untold) + data if untold else data)
        except OSError as error:
            with self._changed:
                self._count_lost()
            if not self._failing:
                self._failing = True
                _say(f"perdure: cannot write {self.name}: {error.strerror}; its lines are dropped and counted")
            return
        with self._changed:
            self._untold -= untold
        self._failing = False

    def _count_lost(self) -> None:
        self.lost += 1
        self._untold += 1


def _say(text: str) -> None:
    """On the process's own stderr, if somebody reads it."""
    stream: Any = sys.__stderr__
    with contextlib.suppress(Exception):
        fd: int = stream.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        if poll.poll(0):
            os.write(fd, text.encode("utf-8", "backslashreplace") + b"\n")
