"""The job: events in, commands out. The only writer of the job's state.

Rules:
1. Only `move` changes the phase; the arrows are the table in `rounds.py`.
2. An event first changes what is *known* (`evidence.py`); then the rules of the present phase run until nothing moves.
   No rule acts on the event itself, so evidence may come in any order, twice, or late.
3. Every phase that waits has a timer, and says whom it missed when the timer fires. A timer that has fired is gone, and
   one that nobody waits for is taken away: `deadline` never names a past instant twice.
4. Agents are told states, not steps (`directives.py`): after each event the directives that differ from what was last
   sent go out.
5. After a controller's return nothing is planned and nobody is given up until every agent is back or its time has
   passed.
"""

from collections.abc import Callable

from ...protocol.faults import FaultKind
from ...protocol.messages import PROTOCOL_VERSION, Stage
from ...protocol.settings import Settings
from . import wording
from .budget import Budget
from .commands import Accept, Command, Finished, Refuse, Tell
from .commits import Commits
from .depots import Depots
from .directives import Directives
from .events import Attached, Event, LinkLost, Opened, Reported, Saved, Silent, Stocked, StopAsked, Tick
from .evidence import Evidence
from .links import ATTACH, LINK, Links
from .planning import Planning
from .roster import Roster, SlotRecord, Watch
from .rounds import JobPhase, Round, check_transition
from .stopping import Stopping
from .strikes import Strikes
from .verdict import close_round

STOP_GRACE_S = 10.0
"""How long agents may take to end their ranks, beyond `termination_grace_time`."""


class Job:
    """The state machine of one job."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.phase = JobPhase.FORMING
        self.incarnation = 0
        self.epoch = 0
        """Which journal this is: its first controller's wall time. Tells rounds of this job from those of others."""
        self.expected = 0
        self.roster = Roster()
        self.round: Round | None = None
        self.closed: Round | None = None
        """The round that ended last, until the next one runs and its story can be told."""
        self.completed = 0
        """Resilient functions that the job is through with."""
        self.budget = Budget()
        self.code = 0
        self.reason = ""
        self.timers: dict[str, float] = {}
        self.now = 0.0
        self.commands: list[Command] = []
        self.directives = Directives(self)
        self.depots = Depots(self.roster)
        self.commits = Commits(self)
        self.strikes = Strikes(self)
        self.links = Links(self)
        self.gathered: set[SlotRecord] = set()
        """Slots that have come to the gate of a further function; some may have left it again."""
        self._busy = Watch(self.roster, lambda r: r.state.stage is not Stage.GONE and not r.agent.lost)
        self.planning = Planning(self)
        self.evidence = Evidence(self)
        self.stopping = Stopping(self)
        self._handlers: dict[type[Event], Callable[..., None]] = {
            Opened: self._opened,
            Attached: self._attached,
            Reported: self._reported,
            LinkLost: self.links.lost,
            Silent: self.links.silent,
            Saved: self.commits.saved,
            Stocked: self.commits.stocked,
            StopAsked: self.stopping.asked,
            Tick: self.links.tick,
        }
        self._rules: dict[JobPhase, Callable[[], bool]] = {
            JobPhase.FORMING: self.planning.form,
            JobPhase.PLANNING: self.planning.plan,
            JobPhase.RUNNING: self._while_running,
            JobPhase.COMPLETING: self._while_completing,
            JobPhase.RELEASED: self.planning.after_release,
            JobPhase.ABORTING: self._while_aborting,
            JobPhase.STOPPING: self._while_stopping,
            JobPhase.ENDED: lambda: False,
        }

    # ---- the face ---------------------------------------------------------------------------------------------

    def on(self, event: Event, now: float) -> list[Command]:
        """Take in one event; return what is to be done. `now` is in seconds, and never goes back in an incarnation."""
        self.now = now
        self.commands = []
        self._handlers[type(event)](event)
        while self.stopping.moved() or self._rules[self.phase]():
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
        for timer in list(self.timers):
            if timer != ATTACH and not timer.startswith(LINK):
                del self.timers[timer]
        self.arm("stop", self.settings.termination_grace_time + STOP_GRACE_S)
        self.move(JobPhase.STOPPING)
        return True

    def arm(self, timer: str, seconds: float) -> None:
        """Set a timer. While agents are still to come back it does not fire before they have had their time."""
        self.timers[timer] = max(self.now + seconds, self.timers.get(ATTACH, self.now))

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
        return ATTACH in self.timers

    # ---- events -----------------------------------------------------------------------------------------------

    def _opened(self, event: Opened) -> None:
        first = self.incarnation == 0
        self.settings = event.settings
        self.incarnation = event.incarnation
        self.expected = event.expected or self.expected
        self.timers.clear()
        if first:
            self.epoch = int(event.wall)
            self.arm("forming", self.settings.forming_timeout)
            return
        if self.phase is JobPhase.ENDED:
            self.commands.append(Finished(self.code, self.reason))  # its predecessor may have died before it was said
        for agent in self.roster.agents.values():
            agent.attached = False
        self.depots.changed()
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
        settings = self.settings
        # Agents that have ended their ranks do not come back.
        ending = self.phase in (JobPhase.STOPPING, JobPhase.ENDED)
        if not ending and any(not a.lost for a in self.roster.agents.values()):
            self.links.await_agents()
        if self.phase is JobPhase.RUNNING and self._present_round().times.entered is None:
            self.arm("entry", settings.barrier_timeout)
        per_phase = {
            JobPhase.FORMING: ("forming", settings.forming_timeout),
            JobPhase.PLANNING: ("respawn", settings.barrier_timeout),
            JobPhase.COMPLETING: ("completion", settings.completion_timeout),
            JobPhase.ABORTING: ("barrier", settings.barrier_timeout),
            JobPhase.RELEASED: ("regather", settings.forming_timeout),
            JobPhase.STOPPING: ("stop", settings.termination_grace_time + STOP_GRACE_S),
        }
        armed = per_phase.get(self.phase)
        if armed is not None:
            self.arm(*armed)
        self.stopping.rearm()

    def _attached(self, event: Attached) -> None:
        hello = event.hello
        known = self.roster.agents.get(hello.agent)
        if hello.version != PROTOCOL_VERSION:
            why = f"agent {hello.agent} speaks protocol {hello.version}, this controller {PROTOCOL_VERSION}"
            self.commands.append(Refuse(hello.agent, f"{why}: install the same perdure on all nodes"))
            return
        if known is not None and known.attached and known.process != hello.process:
            why = (
                f"the name {hello.agent} is taken by process {known.process.pid} on {known.host}; "
                "give each machine its own PERDURE_NODE"
            )
            self.commands.append(Refuse(hello.agent, why))
            return
        agent, replaced = self.roster.admit(hello)
        self.depots.changed()
        self.commits.attached(agent, anew=known is not agent)
        for record in replaced:
            self.evidence.lose(record, FaultKind.AGENT_LOST, f"agent {agent.name} was replaced by another process")
        self.timers.pop(LINK + agent.name, None)
        self.expected = self.expected or hello.expected
        word = "joined" if known is None else "is back"
        self.tell("agent", f"agent {agent.name} {word} with {len(hello.slots)} slots", host=hello.host)
        for state in (*hello.pending, *hello.slots):
            self.evidence.apply(agent, state)
        self.commands.append(Accept(agent.name))
        self.directives.force(agent)
        if self.recovering and all(a.attached or a.lost for a in self.roster.agents.values()):
            del self.timers[ATTACH]

    def _reported(self, event: Reported) -> None:
        agent = self.roster.agents.get(event.agent)
        if agent is None or agent.lost:
            return
        for state in event.slots:
            self.evidence.apply(agent, state)

    # ---- the rules of the phases ------------------------------------------------------------------------------

    def _while_running(self) -> bool:
        round = self._present_round()
        if not round.to_enter and round.times.entered is None:
            self._entered(round)
        if self.due("entry"):
            limit = self.settings.barrier_timeout
            self.evidence.give_up(round.to_enter, f"did not enter the round within {limit:g} s (barrier_timeout)")
            return True
        if len(round.to_return) < round.size:
            self.timers.pop("entry", None)  # whoever has not entered cannot return either
            self.arm("completion", self.settings.completion_timeout)
            self.move(JobPhase.COMPLETING)
            return True
        return False

    def _entered(self, round: Round) -> None:
        round.times.entered = self.now
        self.timers.pop("entry", None)
        self.planning.tell_running()

    def _while_completing(self) -> bool:
        round = self._present_round()
        if not round.to_enter and round.times.entered is None:
            self._entered(round)
        if not round.to_return:
            self.timers.pop("completion", None)
            self.tell("complete", f"round {round.index} is complete: all {round.size} ranks returned")
            self.completed += 1
            self.gathered.clear()
            self.move(JobPhase.RELEASED)
            return True
        if self.due("completion"):
            limit = self.settings.completion_timeout
            why = f"did not return within {limit:g} s after the first rank had (completion_timeout)"
            self.evidence.give_up(round.to_return, why, kill=False)
            return True
        return False

    def _while_aborting(self) -> bool:
        round = self._present_round()
        if self.due("barrier"):
            limit = self.settings.barrier_timeout
            why = f"did not leave the training function within {limit:g} s (barrier_timeout)"
            self.evidence.give_up(set(round.to_settle), why)
            unfit = {rank for rank, r in round.seats.items() if r.unfit and r.alive}
            why = f"failed its health check and did not exit within {limit:g} s (barrier_timeout)"
            self.evidence.give_up(unfit, why)
        if round.to_settle or ("barrier" in self.timers and self.planning.needs_cause(round)):
            return False
        round.times.quiesced = self.now
        self.timers.pop("barrier", None)
        if self.closed is not None:
            self.planning.tell_running()  # the round ends before all had entered it: how it came to be is told now
        self.closed = round
        if close_round(self, round):
            return True
        self.arm("respawn", self.settings.barrier_timeout)
        self.move(JobPhase.PLANNING)
        return True

    def _while_stopping(self) -> bool:
        busy = self._busy.any()
        if busy or self.commits.orders.publishing:
            if not self.due("stop"):
                return False
            late = wording.listing(a.name for a in self.roster.agents.values() if a.busy)
            late = f"end their ranks in time: {late}" if busy else "publish all checkpoints in time"
            self.tell("stop_late", f"agents did not {late}", level="error")
        self.timers.clear()
        self.move(JobPhase.ENDED)
        self.commands.append(Finished(self.code, self.reason))
        return True

    # ---- aborting ---------------------------------------------------------------------------------------------

    def _present_round(self) -> Round:
        assert self.round is not None, f"phase {self.phase.value} has a round"
        return self.round

    def abort(self) -> None:
        """End the present round: bring every rank of it to the gate. A job that is to stop ends with it."""
        if self.stopping.request is not None:
            self.stopping.end()
            return
        round = self._present_round()
        round.times.fault = self.now
        round.to_settle = {
            rank
            for rank, record in round.seats.items()
            if record.state.life == round.lives[rank] and not record.settled(round.index)
        }
        for timer in ("entry", "completion"):
            self.timers.pop(timer, None)
        self.arm("barrier", self.settings.barrier_timeout)
        self.move(JobPhase.ABORTING)
