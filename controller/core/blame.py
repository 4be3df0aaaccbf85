"""Who is to blame for the end of a round: from everything that was seen, one cause, its companions, and the victims.

Evidence has four strengths. A stronger one outranks a weaker one however late it comes, because the kernel tells of a
death only after it has torn the memory down, while the peers' connections break at once. Within one strength the
first wins, except among hangs. There the rank that answers nothing comes before one that answered; then one whose main
thread ran Python, which cannot have waited in C for anybody; then the one that was silent for longest.

    culprit   a process died by itself, a node is gone, a health check failed, an exception that is the rank's own
    hang      no progress, and not inside a collective
    waiting   no progress, inside a collective: most likely it waited for the culprit
    victim    an exception that only says that some other rank is gone
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ...protocol.faults import Fault, FaultKind

_HANGS = frozenset({FaultKind.SOFT_HANG, FaultKind.HARD_HANG, FaultKind.SECTION_TIMEOUT, FaultKind.BARRIER_LATE})


def is_bare_death(fault: Fault) -> bool:
    """A death seen before the kernel has told how."""
    return fault.kind is FaultKind.SIGNAL and fault.code == 0


class Strength(IntEnum):
    CULPRIT = 0
    HANG = 1
    WAITING = 2
    VICTIM = 3


@dataclass(slots=True)
class Finding:
    """One fault and the rank that the process had in the round. number: 0, 1, ... as the controller learned of them."""

    number: int
    rank: int
    fault: Fault
    answered: bool = False
    """The rank came to the gate by itself after it was judged to hang."""

    @property
    def strength(self) -> Strength:
        if self.fault.kind in _HANGS:
            return Strength.WAITING if self.fault.in_collective else Strength.HANG
        return Strength.VICTIM if self.fault.peer_error else Strength.CULPRIT


@dataclass(frozen=True, slots=True)
class Verdict:
    """cause: the first cause. companions: others that failed by themselves. victims: failed because others had."""

    cause: Finding
    companions: tuple[Finding, ...]
    victims: tuple[Finding, ...]


def judge(findings: Sequence[Finding]) -> Verdict:
    """Decide from all findings of one round; there must be at least one.

    If everybody is a victim (the network failed for a moment, say), the first of them stands as the cause.
    """
    ordered = sorted(findings, key=_order)
    cause = ordered[0]
    strongest = cause.strength
    companions = tuple(f for f in ordered[1:] if f.strength is strongest and strongest is Strength.CULPRIT)
    victims = tuple(f for f in ordered[1:] if f not in companions)
    return Verdict(cause, companions, victims)


def _order(finding: Finding) -> tuple[int, bool, bool, float, int]:
    strength = finding.strength
    fault = finding.fault
    if strength in (Strength.HANG, Strength.WAITING):
        return (strength, finding.answered, not fault.interpreter_runs, -fault.stale_s, finding.number)
    return (strength, False, False, finding.number, 0)
