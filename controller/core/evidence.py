"""What is known: takes in what agents say of their slots, and notes in the present round what speaks of a fault.

Nothing is decided here but that a round must end: evidence of a fault in a round that runs ends it. Everything may
come twice, late, or in another order; a process that is not in the present round, by slot *and* life, says nothing
about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...protocol.exit_codes import PASSED_THROUGH
from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import SlotState, Stage
from . import wording
from .roster import AgentRecord, SlotRecord
from .rounds import JobPhase

if TYPE_CHECKING:
    from .job import Job


class Evidence:
    """Roster and findings of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def apply(self, agent: AgentRecord, state: SlotState) -> None:
        """An agent says how a slot stands."""
        job = self._job
        updated = job.roster.update(agent, state)
        if updated is None:
            return
        record, before = updated
        if state.step > job.budget.furthest_step:
            job.budget.furthest_step = state.step
        if state.stage is Stage.GATE:
            record.failed_starts = 0
        if state.stage not in (Stage.DYING, Stage.GONE):
            record.outside = state.stage is Stage.OUTSIDE
        if state.fault is not None:
            self._on_fault(record, state.fault, answered=state.stage is Stage.GATE)
        was_gone = before is not None and before.stage is Stage.GONE and before.life == state.life
        if state.stage is Stage.GONE and not was_gone:
            self._on_gone(record)
        self._count(record)
        if job.phase is JobPhase.RELEASED and record.waits_for(job.completed):
            job.gathered.add(record)
        if record.condemned or record.wanted > state.life:
            job.directives.dirty(agent)

    def _count(self, record: SlotRecord) -> None:
        """Strike a slot off the present round's lists of awaited ranks."""
        round, state = self._job.round, record.state
        rank = round.rank_of.get(record) if round else None
        if round is None or rank is None:
            return
        same_process = round.lives[rank] == state.life
        if rank in round.to_settle and (not same_process or record.settled(round.index)):
            round.to_settle.discard(rank)
        if same_process and state.round == round.index and state.stage in (Stage.RUNNING, Stage.RETURNED):
            round.to_enter.discard(rank)
            if state.stage is Stage.RETURNED:
                round.to_return.discard(rank)

    def _on_fault(self, record: SlotRecord, fault: Fault, *, answered: bool = False) -> None:
        round = self._job.round
        rank = round.seat_of(record) if round else None
        if round is None or rank is None or fault.life != record.state.life:
            return
        if self._job.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return
        if record.state.stage is Stage.DYING and rank in round.to_enter and fault.round < round.index:
            # It dies on its way into the round, so it speaks of the one before.
            fault = msgspec.structs.replace(fault, round=round.index)
        if fault.round == round.index:
            self._found(record, rank, fault, answered=answered)

    def _on_gone(self, record: SlotRecord) -> None:
        job, state = self._job, record.state
        exit = state.exit
        assert exit is not None, "a slot that is GONE has an exit record"
        if job.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return
        if job.phase is JobPhase.RELEASED or record.outside:
            if not exit.killed_by:  # whom we had given up before, and who is dead only now, does not spoil the end
                job.code = job.code or wording.exit_status(exit)
            return
        rank = job.round.seat_of(record) if job.round else None
        fault = wording.fault_of_exit(state)
        if exit.code in PASSED_THROUGH and not exit.killed_by:
            job.end(exit.code, wording.describe(fault, rank))
            return
        if rank is not None:
            self._on_seat_gone(record, rank, fault, exit.killed_by)
        elif not exit.killed_by and not self._was_known(record, fault):
            self._tell_gone(record, fault)
        job.planning.consider_respawn(record, fault)

    def _was_known(self, record: SlotRecord, fault: Fault) -> bool:
        """Whether this process had failed in the round whose story is not told yet, though the next is planned."""
        closed = self._job.closed
        rank = closed.seat_of(record) if closed else None
        if closed is None or rank is None or (fault.slot, fault.life) not in closed.findings:
            return False
        if closed.add(fault, rank):
            self._tell_fault(record, fault, rank)
        return True

    def _on_seat_gone(self, record: SlotRecord, rank: int, fault: Fault, killed_by: str) -> None:
        job, round = self._job, self._job.round
        assert round is not None
        if killed_by:
            round.late[rank] = killed_by
            text = f"rank {rank} ({record.slot}) was killed: {killed_by}"
            job.tell("killed", text, rank=rank, slot=record.slot, level="warning")
            if (fault.slot, fault.life) in round.findings:
                return
        known = round.findings.get((fault.slot, fault.life))
        if known is not None and known.fault.kind not in (fault.kind, FaultKind.SIGNAL):
            # It failed in another way before; that it is dead now must be said, too.
            self._tell_gone(record, fault, rank)
        self._found(record, rank, fault)
        if job.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
            job.abort()

    def _tell_gone(self, record: SlotRecord, fault: Fault, rank: int | None = None) -> None:
        self._job.tell(
            "slot_gone",
            wording.describe(fault, rank),
            level="warning",
            rank=rank,
            slot=fault.slot,
            host=record.agent.host,
            pid=record.state.pid,
            detail=fault.detail,
        )

    def _tell_fault(self, record: SlotRecord, fault: Fault, rank: int) -> None:
        self._job.tell(
            "fault",
            wording.describe(fault, rank),
            level="warning" if fault.peer_error else "error",
            rank=rank,
            slot=fault.slot,
            host=record.agent.host,
            pid=record.state.pid,
            kind=fault.kind.value,
            detail=fault.detail,
        )

    def _found(self, record: SlotRecord, rank: int, fault: Fault, *, answered: bool = False) -> None:
        """There is evidence of a fault in the present round. News ends the round, if it still runs."""
        job, round = self._job, self._job.round
        assert round is not None
        if not round.add(fault, rank, answered):
            return
        self._tell_fault(record, fault, rank)
        if fault.peer_error:
            job.links.hurry()
        if job.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
            job.abort()

    def give_up(self, waited_for: set[int], why: str, *, kill: bool = True) -> None:
        """Nobody waits longer for these ranks. With `kill` their processes are condemned and left out of every plan."""
        job, round = self._job, self._job.round
        assert round is not None
        for rank in sorted(waited_for):
            record = round.seats[rank]
            state = record.state
            fault = Fault(state.slot, state.life, round.index, FaultKind.BARRIER_LATE, why, step=state.step)
            if kill:
                record.condemned = why
                round.late[rank] = why
                job.directives.dirty(record.agent)
                job.planning.consider_respawn(record, fault)
            self._found(record, rank, fault)
        if kill:
            round.to_settle -= waited_for

    def lose_agent(self, agent: AgentRecord, why: str) -> None:
        """An agent is given up, with all its ranks; if it ever comes back, its ranks come back as reserves."""
        job = self._job
        agent.lost = True
        agent.attached = False
        job.depots.changed()
        job.commits.lost(agent)
        if job.round is not None:
            job.round.lost_agents.append(agent)
        job.timers.pop(f"link:{agent.name}", None)
        siblings = [a for a in job.roster.agents.values() if a.node == agent.node]
        # A node's agents go one after the other, within moments: the first already speaks for all of them.
        kind = FaultKind.AGENT_LOST if any(a.attached for a in siblings) else FaultKind.NODE_LOST
        text = f"agent {agent.name} is lost with {len(agent.slots)} slots: {why}"
        job.tell(kind.value, text, level="error", host=agent.host)
        for record in agent.slots.values():
            if record.state.stage is not Stage.GONE:
                self.lose(record, kind, f"agent {agent.name} is lost: {why}")

    def lose(self, record: SlotRecord, kind: FaultKind, why: str) -> None:
        """A slot's process is out of reach for good."""
        job, round = self._job, self._job.round
        rank = round.seat_of(record) if round else None
        if round is None or rank is None:
            return
        round.to_settle.discard(rank)
        state = record.state
        round.add(Fault(state.slot, state.life, round.index, kind, why, step=state.step), rank)
        if job.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
            job.abort()
