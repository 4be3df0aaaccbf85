"""Who is who: the names by which every process and every statement of a job is known.

A *slot* is one place for a rank on an agent. Processes come and go in a slot; its *life* counts them, from 1.
(slot, life) names one process for the whole job; a pid alone never does, since the kernel reuses them.
A *round* is one life of the training function on one set of ranks, counted from 0.
"""

import os
from functools import cache
from typing import NewType

import msgspec

AgentName = NewType("AgentName", str)
"""One agent of the job: the node's name, or `node.LOCALID` where a node has several agents."""

Slot = NewType("Slot", str)
"""One place for a rank, `agent/index`."""

NO_ROUND = -1
"""The round of a process that has not yet run the training function."""

RESERVE = -1
"""The rank of a slot that waits as a warm reserve."""


def slot_name(agent: AgentName, index: int) -> Slot:
    return Slot(f"{agent}/{index}")


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """Names one process on one machine for ever.

    boot: the kernel's boot id. pid: as the agent sees it. start: field 22 of /proc/PID/stat, in clock ticks after boot.
    """

    boot: str
    pid: int
    start: int


@cache
def boot_id() -> str:
    """The kernel's random id of this boot (Linux, /proc/sys/kernel/random/boot_id)."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks after boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def this_process() -> ProcessId:
    pid = os.getpid()
    return ProcessId(boot_id(), pid, start_time(pid) or 0)


def is_alive(process: ProcessId) -> bool:
    """Whether `process` runs on this machine. A zombie is dead; a process of another boot is dead."""
    if process.boot != boot_id():
        return False
    try:
        with open(f"/proc/{process.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == process.start and fields[0] not in (b"Z", b"X")
