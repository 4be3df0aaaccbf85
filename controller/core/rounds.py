"""One round: one life of the training function on one set of ranks.

Everything that belongs to a round hangs off its `Round` object, which is dropped whole when the next one begins, so
nothing can leak across.
"""

from dataclasses import dataclass, field
from enum import Enum

from ...protocol.faults import Fault
from .blame import Finding, is_bare_death
from .choice import Choice
from .roster import AgentRecord, SlotRecord


class JobPhase(str, Enum):
    FORMING = "forming"
    RUNNING = "running"
    COMPLETING = "completing"
    RELEASED = "released"
    ABORTING = "aborting"
    PLANNING = "planning"
    STOPPING = "stopping"
    ENDED = "ended"


TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.FORMING: frozenset({JobPhase.PLANNING, JobPhase.STOPPING}),
    JobPhase.PLANNING: frozenset({JobPhase.RUNNING, JobPhase.STOPPING}),
    JobPhase.RUNNING: frozenset({JobPhase.COMPLETING, JobPhase.ABORTING, JobPhase.STOPPING}),
    JobPhase.COMPLETING: frozenset({JobPhase.RELEASED, JobPhase.ABORTING, JobPhase.STOPPING}),
    # A trainer may call a second resilient function, or simply exit.
    JobPhase.RELEASED: frozenset({JobPhase.PLANNING, JobPhase.STOPPING}),
    JobPhase.ABORTING: frozenset({JobPhase.PLANNING, JobPhase.STOPPING}),
    JobPhase.STOPPING: frozenset({JobPhase.ENDED}),
    JobPhase.ENDED: frozenset(),
}


class IllegalTransition(Exception):
    """The core tried to move where no arrow leads: a defect. The phase is unchanged."""


def check_transition(old: JobPhase, new: JobPhase) -> None:
    if new not in TRANSITIONS[old]:
        raise IllegalTransition(f"{old.value} -> {new.value}")


@dataclass(slots=True)
class Times:
    """When each phase of a round began, on the controller's clock; None if it never did."""

    planned: float
    entered: float | None = None
    fault: float | None = None
    quiesced: float | None = None


@dataclass(slots=True)
class Round:
    """index: 0, 1, ... seats: rank -> slot record, and `lives` which of its processes.

    findings: (slot, life) -> evidence. late: who had to be given up, and why.
    """

    index: int
    seats: dict[int, SlotRecord]
    lives: dict[int, int]
    times: Times
    master_port: int = 0
    choice: Choice | None = None
    """What it resumes from; None: it begins anew."""
    saved_step: int = -1
    """The furthest step of which a save of this round is complete, on any tier."""
    rank_of: dict[SlotRecord, int] = field(default_factory=dict[SlotRecord, int])
    findings: dict[tuple[str, int], Finding] = field(default_factory=dict[tuple[str, int], Finding])
    late: dict[int, str] = field(default_factory=dict[int, str])
    to_enter: set[int] = field(default_factory=set[int])
    to_return: set[int] = field(default_factory=set[int])
    to_settle: set[int] = field(default_factory=set[int])
    """Ranks that are awaited: inside the function, back from it, or (while aborting) known to be out of it."""
    interrupted_by_restart: bool = False
    """A controller died during this round: its phase times are not measurements."""
    lost_agents: list[AgentRecord] = field(default_factory=list[AgentRecord])
    """Agents that were given up during this round."""
    counted: int = 0
    """Ranks that failed by themselves, as far as the budget knows."""
    noted: int = 0
    """Pieces of evidence so far."""

    def __post_init__(self) -> None:
        self.rank_of = {record: rank for rank, record in self.seats.items()}
        self.to_enter = set(self.seats)
        self.to_return = set(self.seats)

    @property
    def ran_s(self) -> float:
        """How long the function ran before the fault; 0 if that is not known, since a controller died meanwhile."""
        times = self.times
        if times.fault is None or times.entered is None or self.interrupted_by_restart:
            return 0.0
        return times.fault - times.entered

    @property
    def size(self) -> int:
        return len(self.seats)

    def seat_of(self, record: SlotRecord) -> int | None:
        """The rank of `record`'s *present* process in this round, None if it has none."""
        rank = self.rank_of.get(record)
        if rank is None or self.lives[rank] != record.state.life:
            return None
        return rank

    def add(self, fault: Fault, rank: int, answered: bool = False) -> bool:
        """Note evidence; True if it is news.

        Of one process the first evidence stays, unless the same kind comes again with more detail, or a stronger one.
        How a process died is news, even if it is known that it did.
        """
        key = (fault.slot, fault.life)
        known = self.findings.get(key)
        finding = Finding(self.noted, rank, fault, answered)
        self.noted += 1
        if known is None:
            self.findings[key] = finding
            return True
        was_bare = is_bare_death(known.fault)
        if known.fault.kind is fault.kind or was_bare:
            known.fault = fault
            known.answered = known.answered or answered
            return was_bare and not is_bare_death(fault)
        if finding.strength < known.strength:
            self.findings[key] = finding
            return True
        return False
