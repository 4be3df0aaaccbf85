"""The job: events in, commands out. The only writer of the job's state.

Rules:
1. Everything that changes the phase is in this file; the arrows are the table in `rounds.py`.
2. An event first changes what is *known* (roster, findings); then the rules of the present phase run until nothing moves.
   No rule acts on the event itself, so evidence may come in any order, twice, or late.
3. Every phase that waits has a timer, and says whom it missed when the timer fires.
4. Agents are told states, not steps (`directives.py`): after each event the directives that differ from what was last sent
   go out.
5. After a controller's return nothing is planned and nobody is given up until every agent is back or its time has passed.
"""

from collections.abc import Callable

from ...protocol.exit_codes import PASSED_THROUGH
from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import PROTOCOL_VERSION, SlotState, Stage
from ...protocol.settings import Settings
from . import wording
from .budget import Budget
from .commands import Accept, Command, Finished, Refuse, Tell
from .directives import Directives
from .events import Attached, Event, LinkLost, Opened, Reported, Silent, StopAsked, Tick
from .planning import Planning
from .roster import AgentRecord, Roster, SlotRecord
from .rounds import JobPhase, Round, check_transition
from .verdict import close_round

LINK_GRACE_WITH_PEER_ERRORS_S = 0.25
"""How long a lost connection may take to come back when ranks elsewhere already see broken connections."""

STOP_GRACE_S = 10.0
"""How long agents may take to end their ranks, beyond `termination_grace_time`."""


class Job:
    """The state machine of one job."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.phase = JobPhase.FORMING
        self.incarnation = 0
        self.expected = 0
        self.roster = Roster()
        self.round: Round | None = None
        self.closed: Round | None = None
        """The round that ended last, until the next one runs and its story can be told."""
        self.budget = Budget()
        self.code = 0
        self.reason = ""
        self.timers: dict[str, float] = {}
        self.now = 0.0
        self.commands: list[Command] = []
        self.directives = Directives(self)
        self._planning = Planning(self)
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Opened: self._opened,
            Attached: self._attached,
            Reported: self._reported,
            LinkLost: self._link_lost,
            Silent: self._silent,
            StopAsked: self._stop_asked,
            Tick: self._tick,
        }
        self._rules: dict[JobPhase, Callable[[], bool]] = {
            JobPhase.FORMING: self._planning.form,
            JobPhase.PLANNING: self._planning.plan,
            JobPhase.RUNNING: self._while_running,
            JobPhase.COMPLETING: self._while_completing,
            JobPhase.RELEASED: self._planning.after_release,
            JobPhase.ABORTING: self._while_aborting,
            JobPhase.STOPPING: self._while_stopping,
            JobPhase.ENDED: lambda: False,
        }

    # ---- the face ---------------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Command]:
        """Take in one event at `now` (seconds, never less than before within one incarnation); return what is to be done."""
        self.now = now
        self.commands = []
        self._handlers[type(event)](event)
        while self._rules[self.phase]():
            pass
        self.commands += self.directives.changed()
        return self.commands

    def deadline(self) -> float | None:
        """When the core wants a Tick, if nothing happens before; None: never."""
        return min(self.timers.values(), default=None)

    # ---- helpers of this package's other files ----------------------------------------------------------------

    def move(self, phase: JobPhase) -> None:
        check_transition(self.phase, phase)
        self.phase = phase
        self.directives.dirty_all()

    def tell(self, event: str, text: str, *, level: str = "info", rank: int | None = None, **fields: object) -> None:
        slot = fields.pop("slot", None)
        host = fields.pop("host", None)
        index = self.round.index if self.round else None
        self.commands.append(
            Tell(event, text, level, index, rank, str(slot) if slot else None, str(host) if host else None, fields)
        )

    def end(self, code: int, reason: str) -> bool:
        """Begin to stop. Returns True, as a rule that moved."""
        if self.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return False
        self.code, self.reason = int(code), reason
        self.tell("ending", f"ending the job with code {int(code)}: {reason}", level="info" if code == 0 else "error")
        self.timers.clear()
        self.timers["stop"] = self.now + self.settings.termination_grace_time + STOP_GRACE_S
        self.move(JobPhase.STOPPING)
        return True

    def due(self, timer: str) -> bool:
        """Whether `timer` has fired; if so it is gone."""
        at = self.timers.get(timer)
        if at is None or self.now < at:
            return False
        del self.timers[timer]
        return True

    @property
    def recovering(self) -> bool:
        """A controller has come back, and not yet every agent has."""
        return "attach" in self.timers

    # ---- events -----------------------------------------------------------------------------------------------

    def _opened(self, event: Opened) -> None:
        first = self.incarnation == 0
        self.settings = event.settings
        self.incarnation = event.incarnation
        self.expected = event.expected or self.expected
        self.timers.clear()
        if first:
            self.timers["forming"] = self.now + self.settings.forming_timeout
            return
        for agent in self.roster.agents.values():
            agent.attached = False
        if self.round is not None:
            self.round.interrupted_by_restart = True
        self.directives.forget()
        self._rearm()
        self.tell(
            "controller_back",
            f"controller incarnation {event.incarnation} leads from the journal, in phase {self.phase.value}; "
            f"waiting for {len(self.roster.agents)} agents",
            level="warning",
        )

    def _rearm(self) -> None:
        """The clock may be another machine's: every running deadline starts anew."""
        settings, now = self.settings, self.now
        per_phase = {
            JobPhase.FORMING: ("forming", settings.forming_timeout),
            JobPhase.PLANNING: ("respawn", settings.barrier_timeout),
            JobPhase.RUNNING: ("entry", settings.barrier_timeout),
            JobPhase.COMPLETING: ("completion", settings.completion_timeout),
            JobPhase.ABORTING: ("barrier", settings.barrier_timeout),
            JobPhase.RELEASED: ("regather", settings.forming_timeout),
            JobPhase.STOPPING: ("stop", settings.termination_grace_time + STOP_GRACE_S),
        }
        armed = per_phase.get(self.phase)
        if armed is not None:
            self.timers[armed[0]] = now + armed[1]
        if self.phase is not JobPhase.ENDED and any(not a.lost for a in self.roster.agents.values()):
            self.timers["attach"] = now + settings.heartbeat_timeout

    def _attached(self, event: Attached) -> None:
        hello = event.hello
        known = self.roster.agents.get(hello.agent)
        if hello.version != PROTOCOL_VERSION:
            why = f"agent {hello.agent} speaks protocol {hello.version}, this controller {PROTOCOL_VERSION}: install the same perdure on all nodes"
            self.commands.append(Refuse(hello.agent, why))
            return
        if known is not None and known.attached and known.process != hello.process:
            why = (
                f"the name {hello.agent} is taken by process {known.process.pid} on {known.host}; "
                "give each machine its own PERDURE_NODE"
            )
            self.commands.append(Refuse(hello.agent, why))
            return
        agent, replaced = self.roster.admit(hello)
        for record in replaced:
            self._lose(record, FaultKind.AGENT_LOST, f"agent {agent.name} was replaced by another process")
        self.timers.pop(f"link:{agent.name}", None)
        self.expected = self.expected or hello.expected
        word = "joined" if known is None else "is back"
        self.tell("agent", f"agent {agent.name} {word} with {len(hello.slots)} slots", host=hello.host)
        for state in (*hello.pending, *hello.slots):
            self._apply(agent, state)
        self.commands.append(Accept(agent.name))
        self.directives.force(agent)
        if self.recovering and all(a.attached or a.lost for a in self.roster.agents.values()):
            del self.timers["attach"]

    def _reported(self, event: Reported) -> None:
        agent = self.roster.agents.get(event.agent)
        if agent is None or agent.lost:
            return
        for state in event.slots:
            self._apply(agent, state)

    def _link_lost(self, event: LinkLost) -> None:
        agent = self.roster.agents.get(event.agent)
        if agent is None or agent.lost or not agent.attached:
            return
        agent.attached = False
        grace = self.settings.last_call_wait
        if self.round and any(finding.fault.peer_error for finding in self.round.findings.values()):
            grace = min(grace, LINK_GRACE_WITH_PEER_ERRORS_S)
        self.timers[f"link:{agent.name}"] = self.now + grace
        self.tell(
            "link",
            f"connection to agent {agent.name} closed; it has {grace:g} s to come back",
            host=agent.host,
            level="warning",
        )

    def _silent(self, event: Silent) -> None:
        agent = self.roster.agents.get(event.agent)
        if agent is not None and not agent.lost:
            self._lose_agent(
                agent, f"not heard from for {event.age_s:.1f} s (heartbeat_timeout={self.settings.heartbeat_timeout:g})"
            )

    def _stop_asked(self, event: StopAsked) -> None:
        self.end(event.code, event.reason)

    def _tick(self, event: Tick) -> None:
        for agent in list(self.roster.agents.values()):
            if self.due(f"link:{agent.name}"):
                self._lose_agent(agent, "its connection closed and did not come back")
        if self.due("attach"):
            for agent in self.roster.agents.values():
                if not agent.attached and not agent.lost:
                    self._lose_agent(
                        agent, f"did not come back to the new controller within {self.settings.heartbeat_timeout:g} s"
                    )

    # ---- what is known ----------------------------------------------------------------------------------------

    def _apply(self, agent: AgentRecord, state: SlotState) -> None:
        updated = self.roster.update(agent, state)
        if updated is None:
            return
        record, before = updated
        self.budget.furthest_step = max(self.budget.furthest_step, state.step)
        if state.stage is Stage.GATE:
            record.failed_starts = 0
        record.released = record.released or state.stage is Stage.OUTSIDE
        if state.fault is not None:
            self._on_fault(record, state.fault, answered=state.stage is Stage.GATE)
        if state.stage is Stage.GONE and (
            before is None or before.stage is not Stage.GONE or before.life != state.life
        ):
            self._on_gone(record, before)
        self._count(record)
        if record.condemned or record.wanted > state.life:
            self.directives.dirty(agent)

    def _count(self, record: SlotRecord) -> None:
        """Strike a slot off the present round's lists of awaited ranks."""
        round = self.round
        rank = round.rank_of.get(record) if round else None
        if round is None or rank is None:
            return
        same_process = round.lives[rank] == record.state.life
        stage = record.state.stage
        if same_process and record.state.round == round.index and stage in (Stage.RUNNING, Stage.RETURNED):
            round.to_enter.discard(rank)
        if same_process and record.state.round == round.index and stage is Stage.RETURNED:
            round.to_return.discard(rank)
        if not same_process or record.settled(round.index):
            round.to_settle.discard(rank)

    def _on_fault(self, record: SlotRecord, fault: Fault, *, answered: bool = False) -> None:
        round = self.round
        rank = round.seat_of(record) if round else None
        if round is None or rank is None or fault.round != round.index or fault.life != record.state.life:
            return
        if round.add(fault, rank, self.now, answered):
            self._tell_fault(fault, rank, record)
            if self.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
                self._abort()

    def _on_gone(self, record: SlotRecord, before: SlotState | None) -> None:
        state = record.state
        exit = state.exit
        assert exit is not None, "a slot that is GONE has an exit record"
        if self.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return
        if self.phase is JobPhase.RELEASED or (before is not None and before.stage is Stage.OUTSIDE):
            self.code = self.code or (exit.code if exit.code >= 0 else 128 - exit.code)
            return
        rank = self.round.seat_of(record) if self.round else None
        fault = wording.fault_of_exit(state)
        if exit.code in PASSED_THROUGH and not exit.killed_by:
            self.end(exit.code, wording.describe(fault, rank))
            return
        if rank is not None:
            self._on_seat_gone(record, rank, fault, exit.killed_by)
        elif not exit.killed_by:
            self.tell(
                "slot_gone",
                wording.describe(fault),
                level="warning",
                slot=state.slot,
                host=record.agent.host,
                detail=fault.detail,
            )
        self._planning.consider_respawn(record, fault)

    def _on_seat_gone(self, record: SlotRecord, rank: int, fault: Fault, killed_by: str) -> None:
        round = self.round
        assert round is not None
        if killed_by:
            round.late[rank] = killed_by
            self.tell(
                "killed",
                f"rank {rank} ({record.slot}) was killed: {killed_by}",
                rank=rank,
                slot=record.slot,
                level="warning",
            )
            if (fault.slot, fault.life) in round.findings:
                return
        if round.add(fault, rank, self.now):
            self._tell_fault(fault, rank, record)
        if self.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
            self._abort()

    def _tell_fault(self, fault: Fault, rank: int, record: SlotRecord) -> None:
        self.tell(
            "fault",
            wording.describe(fault),
            level="warning" if fault.peer_error else "error",
            rank=rank,
            slot=fault.slot,
            host=record.agent.host,
            kind=fault.kind.value,
            detail=fault.detail,
        )

    def _lose_agent(self, agent: AgentRecord, why: str) -> None:
        """An agent is given up, with all its ranks; if it ever comes back, its ranks come back as reserves."""
        agent.lost = True
        agent.attached = False
        self.timers.pop(f"link:{agent.name}", None)
        siblings = [a for a in self.roster.agents.values() if a.node == agent.node]
        kind = FaultKind.NODE_LOST if all(a.lost for a in siblings) else FaultKind.AGENT_LOST
        self.tell(
            kind.value,
            f"agent {agent.name} is lost with {len(agent.slots)} slots: {why}",
            level="error",
            host=agent.host,
        )
        for record in agent.slots.values():
            if record.state.stage is not Stage.GONE:
                self._lose(record, kind, f"agent {agent.name} is lost: {why}")

    def _lose(self, record: SlotRecord, kind: FaultKind, why: str) -> None:
        round = self.round
        rank = round.seat_of(record) if round else None
        if round is None or rank is None:
            return
        round.to_settle.discard(rank)
        state = record.state
        fault = Fault(state.slot, state.life, round.index, kind, why, step=state.step)
        round.add(fault, rank, self.now)
        if self.phase in (JobPhase.RUNNING, JobPhase.COMPLETING):
            self._abort()

    # ---- the rules of the phases ------------------------------------------------------------------------------

    def _while_running(self) -> bool:
        round = self._present_round()
        if not round.to_enter and round.times.entered is None:
            round.times.entered = self.now
            self.timers.pop("entry", None)
            self._planning.tell_running()
        if round.times.entered is None and self.due("entry"):
            self._give_up(
                round.to_enter,
                FaultKind.BARRIER_LATE,
                f"did not enter the round within {self.settings.barrier_timeout:g} s (barrier_timeout)",
            )
            self._abort()
            return True
        if len(round.to_return) < round.size:
            self.timers["completion"] = self.now + self.settings.completion_timeout
            self.move(JobPhase.COMPLETING)
            return True
        return False

    def _while_completing(self) -> bool:
        round = self._present_round()
        if not round.to_return:
            self.timers.clear()
            self.timers["regather"] = self.now + self.settings.forming_timeout
            if round.times.entered is None:
                round.times.entered = self.now
                self._planning.tell_running()
            self.tell("complete", f"round {round.index} is complete: all {round.size} ranks returned")
            self.move(JobPhase.RELEASED)
            return True
        if self.due("completion"):
            why = f"did not return within {self.settings.completion_timeout:g} s after the first rank had (completion_timeout)"
            self._give_up(round.to_return, FaultKind.BARRIER_LATE, why, kill=False)
            self._abort()
            return True
        return False

    def _while_aborting(self) -> bool:
        round = self._present_round()
        if self.due("barrier"):
            why = f"did not leave the training function within {self.settings.barrier_timeout:g} s (barrier_timeout)"
            self._give_up(round.to_settle, FaultKind.BARRIER_LATE, why)
        if round.to_settle:
            return False
        round.times.quiesced = self.now
        self.timers.pop("barrier", None)
        self.closed = round
        if close_round(self, round):
            return True
        self.timers["respawn"] = self.now + self.settings.barrier_timeout
        self.move(JobPhase.PLANNING)
        return True

    def _while_stopping(self) -> bool:
        busy = [
            a
            for a in self.roster.agents.values()
            if a.attached and any(r.state.stage is not Stage.GONE for r in a.slots.values())
        ]
        if busy and not self.due("stop"):
            return False
        if busy:
            self.tell(
                "stop_late",
                f"agents did not end their ranks in time: {wording.listing(a.name for a in busy)}",
                level="error",
            )
        self.timers.clear()
        self.move(JobPhase.ENDED)
        self.commands.append(Finished(self.code, self.reason))
        return True

    # ---- aborting ---------------------------------------------------------------------------------------------

    def _present_round(self) -> Round:
        assert self.round is not None, f"phase {self.phase.value} has a round"
        return self.round

    def _abort(self) -> None:
        """End the present round: bring every rank of it to the gate."""
        round = self._present_round()
        round.times.fault = self.now
        round.to_settle = {
            rank
            for rank, record in round.seats.items()
            if record.state.life == round.lives[rank] and not record.settled(round.index)
        }
        for timer in ("entry", "completion"):
            self.timers.pop(timer, None)
        self.timers["barrier"] = self.now + self.settings.barrier_timeout
        self.move(JobPhase.ABORTING)

    def _give_up(self, waited_for: set[int], kind: FaultKind, why: str, *, kill: bool = True) -> None:
        """Nobody waits longer for these ranks. With `kill` their processes are condemned and left out of every plan."""
        round = self._present_round()
        for rank in sorted(waited_for):
            record = round.seats[rank]
            state = record.state
            fault = Fault(state.slot, state.life, round.index, kind, why, step=state.step)
            if round.add(fault, rank, self.now):
                self._tell_fault(fault, rank, record)
            if kill:
                record.condemned = kind.value
                round.late[rank] = why
                self.directives.dirty(record.agent)
                self._planning.consider_respawn(record, fault)
        if kill:
            round.to_settle -= set(waited_for)
