"""Checkpoints that cannot be trained from: found by what becomes of the rounds that resume from them.

Rules:
1. Two rounds in a row that resumed from the same save on the same tier, and ended in the same failure without having
   saved anything and without a new furthest step, strike that candidate. The next round takes the other tier of that
   save, or an older one. It is not deleted. A rank that can read the save nowhere (RestoreError) strikes it at once.
2. Only failures count that a bad state can cause: an exception, an exit, a failed check, a crash of the process. A
   SIGKILL, a lost node or a hang says nothing of a checkpoint.
3. A checkpoint is not to blame for what would happen without it. The same failure at the same step after resuming from
   another step, or after other saves have been made, is the program's. One that always comes from one slot is first
   taken for the slot's, as long as a reserve could take its place and no other tier of that save is left to try.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol.checkpoints import SaveId, Tier
from ...protocol.faults import Fault, FaultKind
from . import wording
from .choice import Choice
from .rounds import Round

if TYPE_CHECKING:
    from .job import Job

_COUNT = frozenset({FaultKind.EXCEPTION, FaultKind.EXIT, FaultKind.HEALTH_CHECK, FaultKind.REJECTED_RESULT})
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})

RESTORE_ERROR = "RestoreError"


@dataclass(frozen=True, slots=True)
class Strike:
    """A candidate was struck: `signature` and `step` are those of the failure."""

    save: SaveId
    signature: str
    step: int


class Strikes:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: tuple[SaveId, Tier, str] | None = None
        """What the last round resumed from and how it ended, if that may be held against the save."""
        self._furthest = -1
        self._given: list[Strike] = []
        """Strikes since the furthest step last moved on."""
        self._excused: set[str] = set()
        """Failures that came back whatever was resumed from."""

    def judge(self, round: Round, cause: Fault) -> bool:
        """Whether the end of `round` strikes what it resumed from."""
        job, choice, last = self._job, round.choice, self._last
        progressed = job.budget.furthest_step > self._furthest
        self._furthest = job.budget.furthest_step
        self._last = None
        if progressed:
            self._given.clear()
            self._excused.clear()
        if choice is None or not _counts(cause):
            return False
        if cause.error == RESTORE_ERROR:
            if round.lost_agents:
                return False  # it may have been lost with them
            self._strike(choice, (Tier.LOCAL, Tier.DURABLE), "a rank could not read it", cause)
            return True
        signature = cause.signature
        if round.saved_step > choice.resume.step:
            if any(strike.signature == signature for strike in self._given):
                self._excused.add(signature)
            return False
        here = self._last = (choice.resume.save, choice.tier, signature)
        if last != here or progressed or self._is_excused(choice, cause):
            return False
        self._last = None
        self._strike(choice, (choice.tier,), "two rounds that resumed from it ended in the same failure", cause)
        return True

    def _is_excused(self, choice: Choice, cause: Fault) -> bool:
        """Whether something else than the checkpoint is to blame."""
        signature, step = cause.signature, choice.resume.step
        if any(
            strike.signature == signature and strike.step == cause.step >= 0 and strike.save.step != step
            for strike in self._given
        ):
            self._excused.add(signature)
        if signature in self._excused:
            return True
        other_tier_left = choice.tier is Tier.LOCAL and choice.resume.durable
        return not other_tier_left and self._job.budget.same_slot and self._slot_is_tried_first()

    def _slot_is_tried_first(self) -> bool:
        """Whether the loop breaker is soon to leave a slot out. Once that was in vain, the checkpoint is to blame."""
        round, slots = self._job.round, list(self._job.roster.slots())
        assert round is not None
        if self._job.budget.furthest_step < 0:
            return False  # without steps it waits for many more failures
        reserves = any(r.at_gate and round.seat_of(r) is None and not r.suspect for r in slots)
        return reserves and not any(r.suspect for r in slots)

    def _strike(self, choice: Choice, tiers: tuple[Tier, ...], why: str, cause: Fault) -> None:
        job, save = self._job, choice.resume.save
        record = job.commits.records.get(save)
        used = [tier for tier in tiers if (choice.resume.local if tier is Tier.LOCAL else choice.resume.durable)]
        for tier in used:
            if record is not None:
                record.on(tier).struck = True
        self._given.append(Strike(save, cause.signature, cause.step))
        where = " and ".join(tier.value for tier in used)
        job.tell(
            "struck",
            f"{save} is set aside on the {where} tier: {why} ({wording.what(cause, short=True)}); it is not deleted",
            level="warning",
            step=save.step,
            tiers=[tier.value for tier in used],
        )


def _counts(cause: Fault) -> bool:
    if cause.peer_error:
        return False
    return cause.kind in _COUNT or (cause.kind is FaultKind.SIGNAL and cause.code in _CRASHES)
