"""Signals to the agent: SIGINT, SIGTERM and SIGHUP ask for the end of the job; a second one forces it.

SIGHUP does so only where it is not ignored: under nohup a job outlives its terminal.
"""

import signal
from collections.abc import Callable, Sequence

import trio

from ...protocol.exit_codes import ExitCode

CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}


async def listen_to_signals(
    stop: Callable[[int, str], None],
    early: Sequence[int],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call `stop` with the job's exit code and the signal's name. early: signals that came before we listened."""
    ours = [n for n in CODES if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*ours) as received:
        for number in early:
            stop(int(CODES[signal.Signals(number)]), signal.Signals(number).name)
        task_status.started()
        async for number in received:
            stop(int(CODES[signal.Signals(number)]), signal.Signals(number).name)


def survive_warnings() -> None:
    """Have SIGUSR1 ignored by this process and, since that is inherited, by all that it starts.

    Schedulers warn of the coming end of a job with it. Slurm sends it to every process of a step, ranks and their
    children included, and by default it kills. A trainer that handles it is free to.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
