"""How often a job may fail: durable counts over every restart path, and the loop breaker.

The counts live in the core's state, so replaying the journal restores them: a new controller, or a new node, never
resets a budget. `max_iterations` counts rounds, the first included. `max_rank_faults` counts ranks that failed by
themselves, never their victims.
"""

from ...protocol.faults import Fault, FaultKind
from ...protocol.settings import Settings
from .blame import is_bare_death

SAME_FAILURE_LIMIT = 3
"""Rounds in a row that may end with the same signature without a new furthest step."""

SAME_FAILURE_LIMIT_WITHOUT_STEPS = 10
"""The same, for functions that never call `ping`: without steps, nobody can tell whether they move on."""

FIRST_STEPS_S = 60.0
"""A function that ran for longer has done some work, even if it never says so by `ping`."""

_DETERMINISTIC_ERRORS = frozenset(
    {
        "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError", "TypeError",
        "AttributeError", "ArgumentError", "ConfigurationError", "StateMismatch",
    }
)  # fmt: skip
"""What a wrong program raises, every time, before it has done any work."""


_DEATHS = frozenset({FaultKind.SIGNAL, FaultKind.OOM, FaultKind.EXIT})


class Budget:
    """Counts of one job."""

    def __init__(self) -> None:
        self.rank_faults = 0
        self.furthest_step = -1
        self.same_failures = 0
        self._last: Fault | None = None
        self.same_slot = True
        """Whether all of these equal failures were of one slot."""
        self._last_slot: str = ""
        self._furthest_at_last_failure = -1

    def spend(self, cause: Fault, culprits: int, settings: Settings) -> str:
        """Count the end of a round. Returns why the job must stop, empty if it may go on."""
        self.rank_faults += culprits
        progressed = self.furthest_step > self._furthest_at_last_failure
        if progressed or not self._is_like_the_last(cause):
            self.same_failures = 0
            self.same_slot = True
        elif cause.slot != self._last_slot:
            self.same_slot = False
        self.same_failures += 1
        self._last = cause
        self._last_slot = cause.slot
        self._furthest_at_last_failure = self.furthest_step
        return self.spend_more(0, settings)

    def _is_like_the_last(self, cause: Fault) -> bool:
        last = self._last
        if last is None:
            return False
        if is_bare_death(cause) or is_bare_death(last):
            return cause.kind in _DEATHS and last.kind in _DEATHS  # how one of them died was not known in time
        return cause.signature == last.signature

    def spend_more(self, culprits: int, settings: Settings) -> str:
        """Count ranks that failed after their round was counted. Returns as `spend`."""
        self.rank_faults += culprits
        limit = settings.max_rank_faults
        if limit is not None and self.rank_faults > limit:
            return f"rank fault {self.rank_faults} of at most {limit} (max_rank_faults)"
        return ""

    def loops(self) -> bool:
        """Whether the same failure has come too often without progress."""
        return self.same_failures >= self.same_failure_limit

    @property
    def same_failure_limit(self) -> int:
        return SAME_FAILURE_LIMIT if self.furthest_step >= 0 else SAME_FAILURE_LIMIT_WITHOUT_STEPS

    def forgive(self) -> None:
        """Start counting equal failures anew, after the circumstances were changed (a suspect node was left out)."""
        self.same_failures = 0


def round_allowed(index: int, settings: Settings) -> str:
    """Why round `index` must not run, empty if it may."""
    limit = settings.max_iterations
    if limit is not None and index >= limit:
        return f"round {index} would be number {index + 1} of at most {limit} (max_iterations)"
    return ""


def is_hopeless(cause: Fault, furthest_step: int) -> bool:
    """Whether a retry cannot help: the program itself is wrong, and fails before the first step."""
    if furthest_step >= 0:
        return False
    if cause.kind is FaultKind.EXCEPTION:
        return cause.error in _DETERMINISTIC_ERRORS
    return cause.kind is FaultKind.EXIT and not cause.entered and cause.code != 0
