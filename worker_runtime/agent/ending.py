"""Whether the job has ended while this agent was not connected: read from `verdict.json` in the run directory.

A verdict that lies there when an agent starts may be that of the last attempt, which its controller has yet to put
away. It is this attempt's if the agent is older than it. Both times are taken from the file system's clock, since
those of two hosts differ: the agent makes a file, looks how old it is by that clock, and subtracts its own age.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path

import msgspec

from ...protocol.names import this_process
from ...protocol.verdict import Verdict

MARGIN_S = 0.02
"""The kernel counts the start of a process in hundredths of a second, and file systems count in ticks."""


class Ending:
    """Looks for the end of one agent's attempt. Blocking, for a thread."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / "verdict.json"
        self._began_ns: int | None = None
        self._was_there: bool | None = None

    def look(self) -> Verdict | None:
        """The verdict on this attempt; None while there is none."""
        try:
            written_ns = self._path.stat().st_mtime_ns
            verdict = Verdict.read(self._path)
        except (OSError, msgspec.MsgspecError):
            verdict, written_ns = None, 0  # a controller that comes says what is wrong with it
        if self._was_there is None:
            self._was_there = verdict is not None
            self._began_ns = self._begin() if self._was_there else None
        if verdict is None:
            self._was_there = False  # whatever comes now is this attempt's
        elif self._was_there and (self._began_ns is None or written_ns <= self._began_ns):
            return None
        return verdict

    def _begin(self) -> int | None:
        """When this process began, by the file system's clock; None if that cannot be found out."""
        probe = self._run_dir / f".agent-{secrets.token_hex(8)}"
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            now_ns = os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                probe.unlink()
        return now_ns - int((_age_s() - MARGIN_S) * 1e9)


def _age_s() -> float:
    """Of this process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - this_process().start / os.sysconf("SC_CLK_TCK")
