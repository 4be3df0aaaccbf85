"""Adopted processes: the agent is a subreaper, so the orphans of its ranks come to it, and it must bury them.

Only zombies that nobody else here waits for are reaped: a child that somebody does wait for is claimed first
(`claim_child`), in the same step in which it is started, without an await between. Works as PID 1 too, where the kernel
sends every orphan.
"""

import ctypes
import os
import signal
from contextlib import suppress

import trio

PR_SET_CHILD_SUBREAPER = 36
"""Linux include/uapi/linux/prctl.h."""

BURY_S = 2.0
"""How long a helper process may take to die of SIGKILL before we go on without it."""

_claimed: set[int] = set()


def claim_child(pid: int) -> None:
    """`pid` is a child whose exit status somebody will collect: the reaper leaves it alone."""
    _claimed.add(pid)


def release_child(pid: int) -> None:
    _claimed.discard(pid)


def exit_code(pidfd: int, options: int = 0) -> int | None:
    """Collect a child: its exit code, or minus its signal; None if it lives. With WNOWAIT it stays a zombie."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | options)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


async def bury(pid: int, pidfd: int) -> None:
    """Kill a claimed child that has nothing to lose, collect it, close `pidfd`. Runs to its end even when cancelled."""
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    with trio.move_on_after(BURY_S, shield=True):
        await trio.lowlevel.wait_readable(pidfd)
    with suppress(ChildProcessError):
        exit_code(pidfd)
    release_child(pid)  # One that takes longer to die is the reaper's.
    os.close(pidfd)


def become_subreaper() -> None:
    """From now on every orphan among the descendants of this process becomes its child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def children() -> list[int]:
    """The pids of this process's children, zombies included."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        # The kernel lists children by the thread that got them. A thread that ended has handed its own on.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{thread}/children") as file:
            found.extend(int(pid) for pid in file.read().split())
    return found


def reap_orphans() -> int:
    """Bury every dead child that nobody claimed; returns how many."""
    count = 0
    for pid in children():
        if pid in _claimed:
            continue
        with suppress(ChildProcessError):
            count += os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    return count


async def reaper(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Reap orphans for ever. SIGCHLD wakes it; it polls nothing."""
    with trio.open_signal_receiver(signal.SIGCHLD) as wakes:
        reap_orphans()
        task_status.started()
        async for _ in wakes:
            reap_orphans()
