"""How a rank takes part in an orderly stop: it holds, says which step it passed last, and learns after which to leave.

A step is *passed* when `should_stop` has returned False for it while no stop was known. The job leaves after the first
step that no rank has passed, so an answer must never be less than what the rank has passed, or passes later.

Why that holds, with two threads and no lock in the trainer's innermost loop:

    main thread      (1) passed = step    (2) was it told to hold? no: return False; yes: wait for the agreement
    runtime thread   (3) held = True      (4) answer with `passed`

If (2) sees no hold, then (2) comes before (3), so (1) comes before (4), and the answer counts the step. If (2) sees it,
the step is not passed but judged by the agreement, whichever value (4) has found: one that counts the step makes the
agreed step a later one, which is right for all ranks alike. The four are single loads and stores of attributes, which
the interpreter's lock puts into one order. Without that lock, (1) and (2) would need a fence between them.
"""

from queue import SimpleQueue

from .beats import STEP_MAX


class Stop:
    """Of one life of the training function. held: no further step is passed. step: after which to leave, once known."""

    __slots__ = ("_answer", "_bell", "held", "passed", "step")

    def __init__(self) -> None:
        self.held = False
        self.passed = -1
        self.step: int | None = None
        self._answer: int | None = None
        # Not an Event: its lock is Python code, which an interrupt could leave locked for the runtime thread.
        self._bell: SimpleQueue[None] = SimpleQueue()

    # ---- the trainer's thread ---------------------------------------------------------------------------------

    def passes(self, step: int) -> bool:
        """Pass `step`, unless this rank is held."""
        if self.held:
            return False
        self.passed = step
        return not self.held

    def sleep(self) -> None:
        """Until the next `wake`."""
        self._bell.get()

    # ---- the runtime thread -----------------------------------------------------------------------------------

    def hold(self) -> int:
        """Pass no further step. Returns the last one; the same if it is asked again."""
        self.held = True
        if self._answer is None:
            self._answer = max(-1, min(self.passed, STEP_MAX - 1))
        return self._answer

    def settle(self, step: int) -> None:
        if self.step is None:
            self.step = step
            self.wake()

    def wake(self) -> None:
        self._bell.put(None)
