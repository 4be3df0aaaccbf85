"""Signals before a command listens to them itself, and after.

Rules:
1. As long as nothing has been started, SIGINT, SIGTERM and SIGHUP just end the process, with 128 + the number, which is
   what the job's exit code for them is too. No traceback: nothing went wrong.
2. From `hold` on they are kept for the event loop, which takes them as soon as it listens.
3. When the loop has ended, so has the job, and they mean nothing any more.
4. SIGHUP is left alone where it is ignored: under nohup a job outlives its terminal.
"""

import os
import signal
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ours() -> list[signal.Signals]:
    return [n for n in ENDING if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def _exit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_once() -> None:
    """For the very beginning: rule 1."""
    for number in _ours():
        signal.signal(number, _exit)


def hold() -> list[int]:
    """For the moment before anything is started: rule 2. The list grows by each signal that comes."""
    held: list[int] = []
    for number in _ours():
        signal.signal(number, lambda number, _frame: held.append(number))
    return held
