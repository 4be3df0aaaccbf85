"""Keeps what the ranks print flowing when nobody reads it any more.

`perdure run ... | head` must not kill a training: a rank whose stdout is a pipe without a reader gets an error at its
next print. So if our stdout is a pipe (or a socket), everything that we start writes into a pipe of our own instead,
and a thread passes it on, for as long as it can; then it drops it. A reader that is slow slows the ranks down, as ever.
Files and terminals are left alone.
"""

import os
import stat
import threading
from contextlib import suppress

CHUNK = 65_536


class StdoutRelay:
    """From `start` to `close`, descriptor 1 of this process leads to the relay."""

    def __init__(self) -> None:
        self._outside = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        try:
            mode = os.fstat(1).st_mode
        except OSError:
            return  # there is none
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return
        self._outside = os.dup(1)
        read, write = os.pipe()
        os.dup2(write, 1, inheritable=True)
        os.close(write)
        self._thread = threading.Thread(target=self._pass_on, args=(read,), name="perdure-stdout", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Put stdout back, and wait at most `within_s` until all that was printed is passed on."""
        if self._thread is None:
            return
        os.dup2(self._outside, 1, inheritable=True)
        self._thread.join(within_s)

    def _pass_on(self, read: int) -> None:
        heard = True
        while chunk := os.read(read, CHUNK):
            heard = heard and self._write(chunk)
        with suppress(OSError):
            os.close(read)

    def _write(self, data: bytes) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._outside, rest) :]
        except BlockingIOError:
            return True  # somebody has made it non-blocking, and does not keep up: that part is lost
        except OSError:
            return False
        return True
