"""Signals to the agent: SIGINT and SIGTERM ask for the end of the job."""

import signal
from collections.abc import Callable

import trio

from ...protocol.exit_codes import ExitCode

CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


async def listen_to_signals(
    stop: Callable[[int, str], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call `stop` with the job's exit code and the signal's name."""
    with trio.open_signal_receiver(*CODES) as received:
        task_status.started()
        async for number in received:
            stop(int(CODES[signal.Signals(number)]), signal.Signals(number).name)


def survive_warnings() -> None:
    """Have SIGUSR1 ignored by this process and, since that is inherited, by all that it starts.

    Schedulers warn of the coming end of a job with it. Slurm sends it to every process of a step, ranks and their
    children included, and by default it kills. A trainer that handles it is free to.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
