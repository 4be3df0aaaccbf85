"""Collecting a child process by its pidfd."""

import os
import signal


def collect(pidfd: int) -> str:
    """How it ended, for people; from then on it is no more. Empty if it has not ended."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        # Somebody else in this process waits for any child.
        return "ended"
    if result is None:
        return ""
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by {signal.Signals(result.si_status).name}"
