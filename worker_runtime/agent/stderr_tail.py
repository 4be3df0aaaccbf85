"""What ranks write to stderr: passed on as it comes, and the end of it kept for the report of their death.

Passing on may block or fail (a reader that stalls, a closed pipe, a full disk, a dead file server). None of that may
touch the agent's loop or the rank, so each destination has an `Outlet`: a bounded queue and a thread of its own. What
does not fit or cannot be written is dropped and counted.
"""

import os
import threading
from collections import deque
from contextlib import suppress

import trio

KEEP_BYTES = 65_536
KEEP_LINES = 200
CHUNK = 65_536
"""Bytes of one read: what a Linux pipe holds."""
QUEUE_BYTES = 4 << 20
"""Bytes that may wait in an outlet."""
OPEN_FILES = 64
"""Log files that an outlet keeps open."""


def open_outlets(folder: str | None) -> "tuple[Outlet, ...]":
    """For the ranks of one agent: stderr, and `folder` if there is one."""
    if folder is None:
        return (Outlet(),)
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    return (Outlet(), Outlet(folder))


class Outlet:
    """Writes bytes to stderr (`folder` None) or to files in a folder, in a daemon thread that may block as long as it
    likes.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.dropped = 0
        """Bytes that were lost, for whatever reason."""
        self.error = ""
        """The last reason."""
        self._files: dict[str, int] = {}
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="perdure-outlet", daemon=True)
        self._thread.start()

    def put(self, name: str, data: bytes) -> None:
        """Queue `data` for the file `name` (ignored by stderr). Never blocks."""
        with self._wake:
            if self._closed or self._size + len(data) > QUEUE_BYTES:
                self.dropped += len(data)
                self.error = self.error or "the destination is slower than the ranks write"
                return
            self._waiting.append((name, data))
            self._size += len(data)
            self._wake.notify()

    def close(self, within_s: float) -> None:
        """Write what waits, for at most `within_s`; what is then still unwritten is lost. Blocks: for the end of a
        program.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(within_s)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if not self._waiting:
                    break
                name, data = self._waiting.popleft()
            left = self._write(name, data)
            with self._wake:
                self._size -= len(data)
                self.dropped += left
        for descriptor in self._files.values():
            os.close(descriptor)

    def _write(self, name: str, data: bytes) -> int:
        """Write `data`; returns how many bytes could not be."""
        rest = memoryview(data)
        try:
            descriptor = 2 if self.folder is None else self._file(name)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            self.error = f"{os.path.join(self.folder, name) if self.folder else 'stderr'}: {error.strerror}"
        return len(rest)

    def _file(self, name: str) -> int:
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            path = os.path.join(self.folder or "", name)
            self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._files[name]


class StderrTail:
    """The read end of one rank's stderr pipe, and the last KEEP_LINES lines (KEEP_BYTES bytes) that came through it.

    One task calls `pump`; it may be cancelled and called again.
    """

    def __init__(self, descriptor: int, name: str, outlets: tuple[Outlet, ...] = ()) -> None:
        self.name = name
        self.total = 0
        """Bytes read so far."""
        self._outlets = outlets
        self._stream = trio.lowlevel.FdStream(descriptor)
        self._kept = bytearray()

    async def pump(self) -> None:
        """Read until no process holds the write end any more."""
        try:
            while chunk := await self._stream.receive_some(CHUNK):
                self.feed(chunk)
        except trio.ClosedResourceError:
            return

    def feed(self, chunk: bytes) -> None:
        self.total += len(chunk)
        self._kept += chunk
        if len(self._kept) > 2 * KEEP_BYTES:
            del self._kept[:-KEEP_BYTES]
        for outlet in self._outlets:
            outlet.put(self.name, chunk)

    def text(self) -> str:
        """What is kept, as text. Of a line that redraws itself (progress bars) the last state is kept."""
        kept = bytes(self._kept[-KEEP_BYTES:])
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in kept.split(b"\n")]
        return b"\n".join(lines[-KEEP_LINES:]).decode("utf-8", "backslashreplace").strip("\n")

    def close(self) -> None:
        """Let go of the pipe: whoever still writes to it gets SIGPIPE."""
        self._stream.close()
