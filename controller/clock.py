"""The controller's clock: monotonic seconds that do not run while the controller itself is frozen.

A controller that was stopped (SIGSTOP, a paused virtual machine) wakes up with every deadline passed, although nobody
else was late. Time in which it could not have heard anything does not count against others, so the gap is left out.
"""

import time

LAG_LIMIT_S = 2.0
"""A wake-up that is later than this after its deadline was no scheduling delay."""


class Clock:
    """`now()` for every decision; `woke_late(deadline)` after every wait."""

    def __init__(self) -> None:
        self._left_out = 0.0

    def now(self) -> float:
        return time.monotonic() - self._left_out

    def woke_late(self, deadline: float) -> float:
        """Tell the clock that a wait until `deadline` has ended just now. Returns the seconds left out, mostly 0.0."""
        lag = self.now() - deadline
        if lag <= LAG_LIMIT_S:
            return 0.0
        self._left_out += lag
        return lag
