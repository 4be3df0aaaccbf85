"""Tells an OOM kill from a plain SIGKILL.

The kernel's OOM killer leaves no mark on its victim, only a count on the victim's memory cgroup: `oom_kill` in cgroup
v1 `memory.oom_control` and v2 `memory.events`. So the count is read when a rank starts, and again when it was killed.

Ranks usually share one cgroup. So each rise explains one death only (`_Counter.claimed`), and a rise that came while
the rank went on living (a DataLoader child was the victim) is laid aside by `look()`.
"""

import os
import time

from .tree import is_exiting

SETTLE_S = 1.0
"""How long a process must outlive a rise of the count for the rise to have been another's."""

_COUNTERS: dict[str, "_Counter"] = {}


class _Counter:
    """The `oom_kill` count in one file, and which of its rises (by the count that they led to) were already given to a
    death.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.claimed: set[int] = set()

    def read(self) -> int:
        return read_count(self.path)


def read_count(path: str) -> int:
    """`oom_kill N` in `path`; 0 if there is no such line or file."""
    try:
        with open(path, "rb") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == b"oom_kill"), 0)


def count_file(pid: int) -> str | None:
    """The file that counts the OOM kills of `pid`'s memory cgroup; None where the kernel shows none."""
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return None
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            return _existing(_mounted(mounts, "cgroup", path), "memory.oom_control")
    for number, _, path in groups:
        if number == "0":
            return _existing(_mounted(mounts, "cgroup2", path), "memory.events")
    return None


def _mounted(mounts: list[list[str]], kind: str, path: str) -> str | None:
    """Where the cgroup `path` is seen in the file system. A container sees only a part of the hierarchy, from `root`
    down.
    """
    for fields in mounts:
        split = fields.index("-")
        root, point, filesystem, options = fields[3], fields[4], fields[split + 1], fields[split + 3].split(",")
        if filesystem != kind or (kind == "cgroup" and "memory" not in options):
            continue
        inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
        full = os.path.join(point, inside.lstrip("/"))
        return full if os.path.isdir(full) else point
    return None


def _existing(folder: str | None, name: str) -> str | None:
    path = os.path.join(folder, name) if folder else ""
    return path if os.path.isfile(path) else None


class OomWatch:
    """The OOM kills around one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        path = count_file(pid)
        self._counter = _COUNTERS.setdefault(path, _Counter(path)) if path else None
        self._base = self._counter.read() if self._counter else 0
        self._seen = (time.monotonic(), self._base)

    @property
    def usable(self) -> bool:
        """Whether this machine can tell at all."""
        return self._counter is not None

    def look(self) -> None:
        """Call it now and then while the process is well: rises that it outlived by SETTLE_S were not its own death."""
        if self._counter is None:
            return
        now = time.monotonic()
        since, count = self._seen
        if now - since < SETTLE_S or is_exiting(self.pid):
            return
        self._base = count
        self._seen = (now, self._counter.read())

    def claim(self) -> bool:
        """Of a process that SIGKILL ended, not ours: whether it was the OOM killer's. Takes the rise, so ask once."""
        if self._counter is None:
            return False
        for rise in range(self._base + 1, self._counter.read() + 1):
            if rise not in self._counter.claimed:
                self._counter.claimed.add(rise)
                return True
        return False
