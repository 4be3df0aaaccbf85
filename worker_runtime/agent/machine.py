"""The agent's decisions: what it was told, what its ranks say, and the clock, in; actions, out. Pure.

Rules:
1. The last directive of the highest incarnation says what should be; `converging.py` compares each slot with it and
   mends the difference. So a directive may come twice, late, or after many were lost.
2. A rank that runs a round which is over, or in which it has no seat, is brought to the gate, not killed.
3. Without a controller everything goes on: hangs are judged, exits are kept for the next one. Only `controller_timeout`
   ends it.
4. Every state that the controller has not acknowledged is told again, in order.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ...protocol.checkpoints import NO_ORDERS, DepotOrders
from ...protocol.exit_codes import ExitCode
from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import Directive, ExitRecord, Phase, SlotState, Stage
from ...protocol.names import NO_ROUND, AgentName, Slot, slot_name
from ...protocol.rank_messages import Facts, FromRank
from ...protocol.settings import Settings
from .actions import Action, AskStop, KillProcess, Leave, OrderDepot, Spawn, Tell, TellSaved, Write
from .converging import converge
from .hang import NEARLY, Progress, judge
from .listening import hear
from .local_slot import LocalSlot

STOP_ANSWER_S = 5.0
"""How long the controller may take to answer a request to stop, before the agent ends its ranks by itself."""

LAG_LIMIT_S = 2.0
"""An agent that comes later than this after a deadline stood still (SIGSTOP, `scontrol suspend`, a paused machine)."""


class AgentMachine:
    """All slots of one agent."""

    def __init__(self, agent: AgentName, job: str, slots: int, settings: Settings, first_index: int = 0) -> None:
        """first_index: the local index of the first slot, where a node has several agents."""
        self.agent = agent
        self.job = job
        self.settings = settings
        self.incarnation = 0
        self.directive = Directive(NO_ROUND, Phase.HOLD)
        self.slots: dict[Slot, LocalSlot] = {}
        self._indices = range(first_index, first_index + slots)
        self._actions: list[Action] = []
        self._alone_since: float | None = None
        self._stop_asked = False
        self._stop_deadline: float | None = None
        self._kill_at: float | None = None
        self._awake_since = 0.0
        self._depot_orders = NO_ORDERS
        self._left = False

    # ---- the face ---------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Spawn the first process of each slot; the controller need not be there yet."""
        self._alone_since = now
        for index in self._indices:
            slot = slot_name(self.agent, index)
            self.slots[slot] = LocalSlot.new(slot, index, 1, now)
            self._actions.append(Spawn(slot, 1, spare=False))
        return self._done()

    def states(self) -> tuple[SlotState, ...]:
        return tuple(local.state for local in self.slots.values())

    def spawned(self, slot: Slot, life: int, pid: int) -> list[Action]:
        local = self._find(slot, life)
        if local is not None:
            local.change(pid=pid)
            self._tell(local)
        return self._done()

    def rank_said(self, slot: Slot, life: int, message: FromRank, step: int, now: float) -> list[Action]:
        """A message of a rank; `step` is what its page says."""
        if isinstance(message, Facts):
            return [TellSaved(message.facts)]  # true whatever has become of the process that says it
        local = self._find(slot, life)
        if local is None or not local.alive:
            return []
        judge_at = now + min(self.settings.soft_timeout, self.settings.hard_timeout)
        self._actions += hear(local, message, step, judge_at)
        self._converge(local, now)
        return self._done()

    def dying(self, slot: Slot, life: int, step: int) -> list[Action]:
        """The kernel has begun to tear the process down; how it died is known only when it has finished."""
        local = self._find(slot, life)
        if local is not None and local.alive:
            local.look_at = None
            outside = local.stage is Stage.OUTSIDE
            local.change(stage=Stage.DYING, step=step)
            if local.state.fault is None and not local.killing and not outside:
                fault = self._fault(local, FaultKind.SIGNAL, "is dying; the kernel is still freeing its memory")
                local.change(fault=fault)
            self._tell(local)
        return self._done()

    def exited(self, slot: Slot, life: int, record: ExitRecord, step: int, now: float) -> list[Action]:
        """A process is dead and reaped."""
        local = self._find(slot, life)
        if local is not None and local.stage is not Stage.GONE:
            local.look_at = None
            record = msgspec.structs.replace(record, killed_by=local.killing)
            local.change(stage=Stage.GONE, step=step, exit=record)
            self._tell(local)
            self._converge(local, now)
            self._leave_if_over()
        return self._done()

    def welcomed(self, incarnation: int, settings: Settings) -> list[Action]:
        """A controller accepted us: its settings count, and it has all our states."""
        if incarnation > self.incarnation:
            self._order_depot(NO_ORDERS)  # what its predecessor wanted done, it orders again or does not
        self.incarnation = max(self.incarnation, incarnation)
        self.settings = settings
        self._alone_since = None
        if self._over and self._stop_asked:
            self._actions.append(AskStop(self.directive.code, self.directive.cause))  # nobody else knows of it yet
        return self._done()

    def link_lost(self, now: float) -> list[Action]:
        if self._alone_since is None and not self._over:
            self._alone_since = now
            self._actions.append(Write("link", "the controller is away; training goes on", "warning"))
        return self._done()

    def directed(self, incarnation: int, directive: Directive, now: float) -> list[Action]:
        """A directive came. One of a lower incarnation is from the past and refused."""
        if incarnation < self.incarnation:
            text = f"refused a directive of incarnation {incarnation}: {self.incarnation} leads"
            return [Write("stale", text, "warning")]
        if self._over and directive.phase is not Phase.END:
            return self._done()  # it has ended its ranks by itself, and there is no way back
        self._order_depot(directive.depot)
        self.directive = directive
        if self._over or directive.hold:
            self._stop_deadline = None
        for local in self.slots.values():
            self._converge(local, now)
        self._leave_if_over()
        return self._done()

    def stop(self, code: int, reason: str, now: float) -> list[Action]:
        """Somebody wants the job to end: once by way of the controller, the second time at once."""
        again, self._stop_asked = self._stop_asked, True
        if again or self._over or self._alone_since is not None or not self.slots:
            self._end_alone(code, reason, now)
            if again:
                self._kill_all_at_once()
        elif not self.directive.hold:  # else the controller knows already
            self._stop_deadline = now + STOP_ANSWER_S
            self._actions.append(AskStop(code, reason))
        return self._done()

    def abandoned(self, code: int, reason: str, now: float) -> list[Action]:
        """The controller ended before this agent was told to end."""
        if not self._over:
            self._end_alone(code, reason, now)
        return self._done()

    def refused(self, reason: str, now: float) -> list[Action]:
        """The controller does not want this agent, and never will."""
        self._end_alone(int(ExitCode.USAGE), f"refused by the controller: {reason}", now)
        return self._done()

    def tick(self, pages: Mapping[Slot, Progress], now: float) -> list[Action]:
        """A deadline has come. `pages` holds the progress of at least the slots that `to_judge` names."""
        due = self.deadline()
        if due is not None and now - due > LAG_LIMIT_S:
            self._excuse(now - due, now)
        self._judge_all(pages, now)
        for local in self.slots.values():
            if local.stage is Stage.STARTING and not local.killing and now >= self._startup_deadline(local):
                self._kill(local, f"not at the gate within {self.settings.startup_timeout:g} s (startup_timeout)")
        if self._alone_since is not None and now >= self._alone_since + self.settings.controller_timeout:
            limit = f"{self.settings.controller_timeout:g} s (controller_timeout)"
            self._end_alone(int(ExitCode.CONTROLLER_LOST), f"no controller for {limit}", now)
        if self._stop_deadline is not None and now >= self._stop_deadline:
            self._end_alone(int(ExitCode.TERMINATED), "the controller did not answer a request to stop", now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for local in self.slots.values():
                if local.alive:
                    self._kill(local, "the job is over")
        return self._done()

    def _excuse(self, gap_s: float, now: float) -> None:
        """This agent stood still, and its ranks perhaps with it: time in which nobody looked counts against nobody."""
        self._awake_since = now
        for local in self.slots.values():
            if local.stage is Stage.STARTING:
                local.spawned += gap_s
        if self._alone_since is not None:
            self._alone_since += gap_s
        text = f"this agent stood still for {gap_s:.1f} s; nobody is blamed for that"
        self._actions.append(Write("frozen", text, "warning"))

    def killing(self, slot: Slot, life: int) -> str:
        """Why this process is being killed, empty if it is not."""
        local = self._find(slot, life)
        return local.killing if local is not None else ""

    def to_judge(self, now: float) -> list[Slot]:
        """Slots whose page must be read for `tick(now)`: all that are judged, if one is due."""
        judged = {s.slot: s.look_at for s in self.slots.values() if s.look_at is not None}
        return list(judged) if min(judged.values(), default=now + 1) <= now else []

    def deadline(self) -> float | None:
        """When `tick` is wanted, if nothing happens before."""
        wanted = [s.look_at for s in self.slots.values() if s.look_at is not None]
        wanted += [
            self._startup_deadline(s) for s in self.slots.values() if s.stage is Stage.STARTING and not s.killing
        ]
        if self._alone_since is not None and not self._over:
            wanted.append(self._alone_since + self.settings.controller_timeout)
        wanted += [at for at in (self._stop_deadline, self._kill_at) if at is not None]
        return min(wanted, default=None)

    # ---- hangs ------------------------------------------------------------------------------------------------

    def _judge_all(self, pages: Mapping[Slot, Progress], now: float) -> None:
        judged = [s for s in self.slots.values() if s.look_at is not None and s.slot in pages]
        found = [self._judge(s, pages[s.slot], now) for s in judged if s.look_at is not None and s.look_at <= now]
        for local in judged if any(found) else ():
            if local.state.fault is None:
                self._judge(local, pages[local.slot], now, NEARLY)

    def _judge(self, local: LocalSlot, progress: Progress, now: float, share: float = 1.0) -> bool:
        """Compare a rank's progress with `share` of the soft limit; whether it is newly found to hang."""
        fault = local.state.fault
        hangs = fault is not None and fault.kind is FaultKind.SOFT_HANG
        verdict = judge(
            replace(progress, pause_until=max(progress.pause_until, self._awake_since)),
            now,
            self.settings.soft_timeout * share,
            self.settings.hard_timeout,
            with_ping=hangs or local.interrupted < local.state.round,
        )
        # A pause may end before its time, so the page is looked at again before the pause's end.
        soonest = now + min(self.settings.soft_timeout, self.settings.hard_timeout)
        local.look_at = None if local.killing else min(verdict.again_at, soonest)
        if not verdict.soft and not verdict.hard:
            return False
        text = f"no progress for {verdict.stale_s:.2f} s: {progress.stuck_in(now, self.settings.soft_timeout)}"
        if self.settings.observe_only:
            self._actions.append(Write("observed", f"{text}; only observed (observe_only)", "warning", local.slot))
            local.look_at = soonest
            return False
        if fault is None:
            limit = "soft" if verdict.soft else "hard"
            kind = FaultKind.SOFT_HANG if verdict.soft else FaultKind.HARD_HANG
            limit_s = self.settings.soft_timeout if verdict.soft else self.settings.hard_timeout
            found = self._fault(local, kind, f"{text} ({limit}_timeout={limit_s:g})")
            runs = progress.interpreter_runs(now, self.settings.soft_timeout)
            found = msgspec.structs.replace(found, stale_s=verdict.stale_s, step=progress.step, interpreter_runs=runs)
            local.change(fault=found)
            self._tell(local)
        if verdict.hard and not local.killing:
            self._kill(local, f"{text} (hard_timeout={self.settings.hard_timeout:g})")
        return fault is None

    def _fault(self, local: LocalSlot, kind: FaultKind, message: str) -> Fault:
        state = local.state
        return Fault(
            state.slot, state.life, state.round, kind, message, step=state.step, entered=state.round != NO_ROUND
        )

    def _startup_deadline(self, local: LocalSlot) -> float:
        return local.spawned + self.settings.startup_timeout

    # ---- the depot --------------------------------------------------------------------------------------------

    def _order_depot(self, orders: DepotOrders) -> None:
        if orders != self._depot_orders:
            self._depot_orders = orders
            self._actions.append(OrderDepot(orders))

    # ---- converging -------------------------------------------------------------------------------------------

    def _converge(self, local: LocalSlot, now: float) -> None:
        """Bring one slot nearer to what the directive says."""
        order = self.directive
        wanted = order.lives.get(local.slot, 0)
        if local.stage is Stage.GONE and wanted > local.life and not self._over:
            self._respawn(local, wanted, now)
        elif local.alive:
            self._actions += converge(local, order, self.job)
            if self._over and self._kill_at is None:
                self._kill_at = now + self.settings.termination_grace_time

    def _respawn(self, local: LocalSlot, life: int, now: float) -> None:
        self.slots[local.slot] = LocalSlot.new(local.slot, local.state.index, life, now)
        self._actions.append(Spawn(local.slot, life, spare=True))
        self._tell(self.slots[local.slot])

    def _kill(self, local: LocalSlot, why: str) -> None:
        self._actions += local.kill(why)

    # ---- the end ----------------------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self.directive.phase is Phase.END

    def _end_alone(self, code: int, reason: str, now: float) -> None:
        """End the ranks without asking anybody."""
        self._stop_deadline = None
        self._alone_since = None
        if not self._over:
            self._actions.append(Write("ending", f"ending this agent's ranks with code {code}: {reason}", "error"))
            self.directive = Directive(self.directive.round, Phase.END, cause=reason, code=code)
        else:
            self._kill_at = now
        for local in self.slots.values():
            self._converge(local, now)
        self._leave_if_over()

    def _kill_all_at_once(self) -> None:
        self._kill_at = None
        for local in self.slots.values():
            if local.alive:
                local.killing = local.killing or "told to end the job twice"
                self._actions.append(KillProcess(local.slot, local.life, "told to end the job twice", at_once=True))

    def _leave_if_over(self) -> None:
        if self._over and not self._left and all(s.stage is Stage.GONE for s in self.slots.values()):
            self._left = True
            self._actions.append(Leave(self.directive.code, self.directive.cause))

    # ---- small helpers ----------------------------------------------------------------------------------------

    def _find(self, slot: Slot, life: int) -> LocalSlot | None:
        local = self.slots.get(slot)
        return local if local is not None and local.life == life else None

    def _tell(self, local: LocalSlot) -> None:
        self._actions.append(Tell((local.state,)))

    def _done(self) -> list[Action]:
        """Hand out the actions; states that changed together travel in one message."""
        actions, self._actions = self._actions, []
        told = [action for action in actions if isinstance(action, Tell)]
        if len(told) <= 1:
            return actions
        merged = Tell(tuple(state for tell in told for state in tell.states))
        return [action for action in actions if not isinstance(action, Tell)] + [merged]
