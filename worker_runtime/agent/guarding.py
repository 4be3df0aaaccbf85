"""The agent's side of the guard (`guard.py`): keeps one running, and says goodbye to it at an orderly end."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import trio

from .guard import BOOT, GOODBYE
from .reaper import bury, claim_child

RESTART_PAUSE_S = 0.1
"""Between a guard that died and the next, so that one that cannot live does not eat the machine."""
FAREWELL_S = 1.0
"""How long the guard may take to leave."""


async def keep_guard(
    token: str, log: Callable[[str], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Guard every process that carries PERDURE_TOKEN=`token`, until cancelled: the guard is then told that all is well.

    So cancel it last, when no rank is left. A guard that dies is replaced.
    """
    while True:
        read, write = os.pipe()
        try:
            pid = _launch(read)
        except OSError as error:
            os.close(write)
            log(f"no guard ({error}): if this agent is killed, its ranks live on until they notice")
            task_status.started()
            return
        finally:
            os.close(read)
        pidfd = os.pidfd_open(pid)
        try:
            _tell(write, token.encode() + b"\n")
            task_status.started()
            await trio.lowlevel.wait_readable(pidfd)
            log(f"guard: process {pid} died; another is started")
        finally:
            _tell(write, GOODBYE)
            os.close(write)
            with trio.move_on_after(FAREWELL_S, shield=True):
                await trio.lowlevel.wait_readable(pidfd)
            await bury(pid, pidfd)
        task_status = trio.TASK_STATUS_IGNORED
        await trio.sleep(RESTART_PAUSE_S)


def _launch(read: int) -> int:
    # No environment: the guard must not carry the mark that it hunts, and needs nothing.
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-s", "-c", BOOT, os.path.dirname(os.path.abspath(__file__))],
        env={},
        stdin=read,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    claim_child(process.pid)
    process.returncode = 0  # We collect its status ourselves.
    return process.pid


def _tell(write: int, data: bytes) -> None:
    with suppress(OSError):
        os.write(write, data)
