"""How much memory may still be taken here: the machine's, and what the control groups around this process allow.

Staging images are anonymous shared memory. Nothing fails when too much of it is asked for: the kernel kills somebody
later, perhaps the trainer. So it is asked beforehand. Both hierarchies are read (v1: one of its own for memory; v2).
"""

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""v1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class Room:
    """nbytes: may still be taken. where: by whose account, for people."""

    nbytes: int
    where: str


def room(root: Path = Path("/")) -> Room:
    """The tightest of all accounts. root: where /proc and /sys are looked for."""
    rooms = [_machine(root), *_groups(root)]
    return min(rooms, key=lambda each: each.nbytes)


def _machine(root: Path) -> Room:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return Room(int(rest.split()[0]) << 10, "the machine (MemAvailable)")
    return Room(_UNLIMITED, "the machine, which does not say")


def _groups(root: Path) -> list[Room]:
    rooms: list[Room] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return rooms
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            rooms += _up_from(mount, path, files)
    return rooms


def _up_from(mount: Path, path: str, files: tuple[str, str, str]) -> list[Room]:
    """The group's own account and those of all groups around it. In a container the path may be the host's."""
    rooms: list[Room] = []
    group = mount / path.lstrip("/")
    for each in (group, *group.parents):
        if found := _account(each, files):
            rooms.append(found)
        if each == mount:
            break
    return rooms


def _account(group: Path, files: tuple[str, str, str]) -> Room | None:
    limit_file, used_file, reclaimable = files
    try:
        limit = int((group / limit_file).read_text())
        used = int((group / used_file).read_text())
        stat = (group / "memory.stat").read_text().split()
    except (OSError, ValueError):
        # No such group here, or "max": no limit.
        return None
    if limit >= _UNLIMITED:
        return None
    # Pages of files that were not used lately are given back before anybody is killed.
    free = dict(zip(stat[::2], stat[1::2], strict=False)).get(reclaimable, "0")
    return Room(max(limit - used + int(free), 0), f"the control group {group} (limit {limit:,} bytes)")
