"""What can go wrong with a rank, and what is known of it when it does.

A `Fault` is evidence, stated by the one who saw it. Who is to blame is decided in the controller
(`controller/core/blame.py`), from all evidence of a round.
"""

from enum import Enum

import msgspec

from .names import Slot

DETAIL_LIMIT = 16_384
"""Characters kept of a traceback or of the last stderr lines; what is longer is cut in the middle, with a mark."""


class FaultKind(str, Enum):
    """Every kind of fault. The value is what logs, metrics and the journal say."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    SOFT_HANG = "soft_hang"
    HARD_HANG = "hard_hang"
    SECTION_TIMEOUT = "section_timeout"
    HEARTBEAT_LOST = "heartbeat_lost"
    NODE_LOST = "node_lost"
    AGENT_LOST = "agent_lost"
    BARRIER_LATE = "barrier_late"
    HEALTH_CHECK = "health_check"
    REJECTED_RESULT = "rejected_result"
    STRAGGLER = "straggler"
    PREEMPTED = "preempted"
    OPERATOR = "operator"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of evidence that a rank failed.

    slot, life, round: which process, in which round (NO_ROUND: before its first).
    kind: what was seen. message: one line for people.
    detail: traceback or last stderr lines, at most DETAIL_LIMIT characters.
    code: exit code (EXIT), signal number (SIGNAL, OOM) or 0. error: the exception's type name, if there was one.
    place: `file:line` of the innermost frame that is the user's, if known. Part of the failure's signature.
    step: the last step that the rank reached, -1 if it never said.
    entered: whether the training function had been entered by this process.
    peer_error: the failure is what a rank sees when *another* one is gone (connection reset, collective timed out).
    in_collective: the main thread was inside a collective when it was interrupted or judged.
    stale_s: for hangs, seconds without progress at the time of judging.
    interpreter_runs: for hangs, only the work stood still, while the main thread ran Python: it did not wait in C for
    somebody else.
    """

    slot: Slot
    life: int
    round: int
    kind: FaultKind
    message: str
    detail: str = ""
    code: int = 0
    error: str = ""
    place: str = ""
    step: int = -1
    entered: bool = True
    peer_error: bool = False
    in_collective: bool = False
    stale_s: float = 0.0
    interpreter_runs: bool = False

    @property
    def signature(self) -> str:
        """What makes two failures 'the same': kind, error, code and place, but never the slot, step or message."""
        return ":".join((self.kind.value, self.error, str(self.code), self.place))


def clip(text: str, limit: int = DETAIL_LIMIT) -> str:
    """`text` in at most `limit` characters: head and tail are kept, and the mark says how much is gone."""
    if len(text) <= limit:
        return text
    mark = f"\n... [{len(text) - limit} characters cut] ...\n"
    head = (limit - len(mark)) // 4
    return text[:head] + mark + text[-(limit - len(mark) - head) :]
