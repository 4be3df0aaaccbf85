"""Process trees: who belongs to a rank, and how to be rid of all of them.

Rules. A process is named by (pid, start time), never by pid alone, and is signalled only through a pidfd whose start
time was checked after it was opened: a stranger that got a recycled pid is never touched. A rank's tree is everything
that descends from it, is in its session, or carries its mark in its environment (a grandchild that double-forked into a
session of its own has no other tie left). Everything is frozen before anything is killed, so that nothing forks its way
out.

Only the standard library is used, and little of it: the guard (`guard.py`) is a tiny process that runs this file.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

PF_DYING = 0x4 | 0x8 | 0x200
"""Flags of a task that will never run user code again: PF_EXITING, PF_POSTCOREDUMP, PF_DUMPCORE (Linux
include/linux/sched.h).
"""

ENVIRON_LIMIT = 1 << 20
"""Bytes read of one process's environment."""

SWEEP_LIMIT = 50
"""Scans of one kill at most. Each freezes what it finds, so two are enough for all but a fork bomb."""


class Entry:
    """One process, as /proc/PID/stat shows it."""

    __slots__ = ("dead", "flags", "group", "parent", "pid", "session", "start")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The command's name may hold anything, brackets and spaces too: fields are counted from the last bracket.
        fields = stat.rpartition(b")")[2].split()
        self.pid = pid
        self.dead = fields[0] in (b"Z", b"X")
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.flags = int(fields[6])
        self.start = int(fields[19])

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start


Table = dict[int, Entry]


def read_entry(pid: int) -> Entry | None:
    """The process `pid`; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return Entry(pid, file.read())
    except (OSError, IndexError, ValueError):
        return None


def snapshot() -> Table:
    """Every process of this machine (of this pid namespace)."""
    found = (read_entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid: entry for entry in found if entry is not None}


def is_exiting(pid: int) -> bool:
    """Whether `pid` will never run user code again: dying, a zombie, or gone.

    The kernel says so to nobody (pidfd, wait, closed sockets) before it has torn the memory down, about 0.12 ms a MB;
    this flag shows at once. A leader may be dead while its other threads run, so all of them are asked.
    """
    leader = read_entry(pid)
    if leader is None:
        return True
    if not (leader.dead or leader.flags & PF_DYING):
        return False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(_is_dying_thread(pid, thread) for thread in threads)


def _is_dying_thread(pid: int, thread: str) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            entry = Entry(pid, file.read())
    except (OSError, IndexError, ValueError):
        return True
    return entry.dead or bool(entry.flags & PF_DYING)


def has_marks(pid: int, marks: Iterable[bytes]) -> bool:
    """Whether the environment with which `pid` was started holds every one of `marks` (`NAME=value`)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = set(file.read(ENVIRON_LIMIT).split(b"\0"))
    except OSError:
        return False
    return all(mark in environment for mark in marks)


def rank_marks(token: str, slot: str, life: int) -> tuple[bytes, ...]:
    """What the environment of every process of one rank holds."""
    return f"PERDURE_TOKEN={token}".encode(), f"PERDURE_SLOT={slot}".encode(), f"PERDURE_LIFE={life}".encode()


def descendants(table: Table, root: int) -> set[int]:
    """The pids in `table` below `root`, without `root`."""
    children: dict[int, list[int]] = {}
    for entry in table.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def family(root: tuple[int, int], marks: tuple[bytes, ...]) -> list[Entry]:
    """The living processes of the tree of `root` (pid, start time), itself included.

    Orphans are looked for below this process only: it must be a subreaper, so that they come to it.
    Sure of the root's pid while the root lives or is a zombie; once it is reaped, only marks count.
    """
    table = snapshot()
    pid, start = root
    leader = table.get(pid)
    ours = leader is not None and leader.start == start
    below = descendants(table, pid) if ours else set[int]()
    reachable = descendants(table, os.getpid()) | below | ({pid} if ours else set[int]())
    result: list[Entry] = []
    for candidate in reachable:
        entry = table[candidate]
        if entry.dead or entry.start < start:
            continue
        if (ours and (candidate == pid or candidate in below or entry.session == pid)) or has_marks(candidate, marks):
            result.append(entry)
    return result


def marked(marks: tuple[bytes, ...]) -> list[Entry]:
    """The living processes of the whole machine that carry `marks`, this one excepted."""
    me = os.getpid()
    return [e for e in snapshot().values() if e.pid != me and not e.dead and has_marks(e.pid, marks)]


def is_living(key: tuple[int, int]) -> bool:
    """Whether the process `key` (pid, start time) is there and no zombie."""
    entry = read_entry(key[0])
    return entry is not None and entry.start == key[1] and not entry.dead


def open_process(key: tuple[int, int]) -> int | None:
    """A pidfd of the process `key` (pid, start time); None if it is gone, or another one has its pid."""
    pid, start = key
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    # The pidfd pins the process: if the start time fits now, nothing done through it can reach another one.
    entry = read_entry(pid)
    if entry is None or entry.start != start:
        os.close(handle)
        return None
    return handle


def send(key: tuple[int, int], number: int) -> bool:
    """Signal the process `key` (pid, start time) and nobody else. False if it is gone or may not be signalled."""
    handle = open_process(key)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def kill_all(find: Callable[[], list[Entry]], pinned: int = 0, within_s: float = 1.0) -> list[tuple[int, int]]:
    """Kill everything that `find` finds, until it finds nothing new; returns the processes that were killed.

    Does not wait for them to be gone. Frozen first: a process that is stopped cannot fork. Process groups are signalled
    as a whole where their leader is ours and cannot go away (stopped, or `pinned`: a child that nobody reaps
    meanwhile), which no fork bomb outruns. `within_s` bounds the work on those that change their group all the time.
    """
    until = time.monotonic() + within_s
    frozen: set[tuple[int, int]] = set()
    groups = {pinned} if pinned else set[int]()
    for _ in range(SWEEP_LIMIT):
        new = [entry for entry in find() if entry.key not in frozen]
        groups.update(entry.pid for entry in new if entry.pid == entry.group and send(entry.key, signal.SIGSTOP))
        for entry in new:
            send(entry.key, signal.SIGSTOP)
        _send_groups(groups, signal.SIGSTOP)
        frozen.update(entry.key for entry in new)
        if not new or time.monotonic() > until:
            break
    _send_groups(groups, signal.SIGKILL)
    return [key for key in frozen if send(key, signal.SIGKILL)]


def _send_groups(groups: Iterable[int], number: int) -> None:
    for group in groups:
        with suppress(OSError):
            os.killpg(group, number)
