"""Keeps a controller of the agent's own running, where the job has just this one machine.

The controller is a process of its own session: it can be killed, or crash, without a rank noticing, and Ctrl-C in the
terminal reaches the agent alone, which passes it on once. One that dies is started again and recovers from its journal;
one that ends by itself has ended the job.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from .reaper import claim_child, release_child

RESTARTS = 5
"""How often a controller may die within RESTART_WINDOW_S."""

RESTART_WINDOW_S = 60.0
FAREWELL_S = 5.0
"""How long the controller may take to write the verdict after the agent is done."""


async def keep_controller(
    command: Sequence[str],
    log: Callable[[str], None],
    refused: Callable[[int], None],
    farewell: Callable[[], int | None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run `command` until it ends by itself. `refused` is called with its code if it ends before the job has.

    farewell: the signal, if any, that tells it of the end of the job, when this is cancelled.
    """
    deaths: list[float] = []
    while True:
        pid = _start(command)
        task_status.started()
        task_status = trio.TASK_STATUS_IGNORED
        code = await _wait(pid, farewell)
        if code >= 0:
            refused(code)
            return
        now = trio.current_time()
        deaths = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
        if len(deaths) > RESTARTS:
            log(f"the controller died {len(deaths)} times within {RESTART_WINDOW_S:g} s; it is not started again")
            return
        log(f"the controller (pid {pid}) was killed by signal {-code}; starting it again")


def _start(command: Sequence[str]) -> int:
    process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, start_new_session=True)
    claim_child(process.pid)
    process.returncode = 0  # we collect its status ourselves
    return process.pid


async def _wait(pid: int, farewell: Callable[[], int | None]) -> int:
    """The exit code of the controller, or minus its signal. When cancelled it is given FAREWELL_S to finish."""
    pidfd = os.pidfd_open(pid)
    try:
        try:
            await trio.lowlevel.wait_readable(pidfd)
        except trio.Cancelled:
            number = farewell()
            if number is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, number)
            with trio.move_on_after(FAREWELL_S, shield=True):
                await trio.lowlevel.wait_readable(pidfd)
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            with trio.move_on_after(1.0, shield=True):
                await trio.lowlevel.wait_readable(pidfd)
            raise
        return _collect(pidfd)
    finally:
        with suppress(ChildProcessError):
            _collect(pidfd)
        release_child(pid)
        trio.lowlevel.notify_closing(pidfd)
        os.close(pidfd)


def _collect(pidfd: int) -> int:
    """Take the status of a process that has ended; 0 if it has not."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    if result is None:
        return 0
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
