"""Processes of a test's job, found by a mark in their environment that every descendant inherits."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from perdure.worker_runtime.agent.tree import descendants, marked, read_entry, send, snapshot

Key = tuple[int, int]
"""pid and start time: one process, for ever."""


def lives(key: Key) -> bool:
    """Whether this process runs; a zombie does not."""
    entry = read_entry(key[0])
    return entry is not None and entry.start == key[1] and not entry.dead


def is_zombie(key: Key) -> bool:
    """Whether somebody has left this process unburied.

    What init has adopted it buries when it likes; and the tests' own process adopts, once it was made a subreaper.
    """
    entry = read_entry(key[0])
    return entry is not None and entry.start == key[1] and entry.dead and entry.parent not in (1, os.getpid())


def state_of(pid: int) -> str:
    """One letter, as in /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"


def processes_with(mark: str) -> list[Key]:
    return [entry.key for entry in marked((f"FAULTS_MARK={mark}".encode(),))]


def kill_all_with(mark: str) -> None:
    for key in processes_with(mark):
        send(key, signal.SIGKILL)


class Usage:
    """What a process holds: descriptors, threads, resident memory in MB."""

    def __init__(self, pid: int) -> None:
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        self.threads = len(os.listdir(f"/proc/{pid}/task"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.memory_mb = pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def __repr__(self) -> str:
        return f"{self.descriptors} fds, {self.threads} threads, {self.memory_mb:.1f} MB"


def descendants_of(pid: int) -> set[int]:
    return descendants(snapshot(), pid)
