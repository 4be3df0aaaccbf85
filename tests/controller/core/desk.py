"""Plays every agent of a job by hand: each call is one event, and what the core answers is kept to look at."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.controller.core.commands import Command, Direct, Finished, Refuse, Tell
from perdure.controller.core.events import Attached, Event, LinkLost, Opened, Reported, Silent, StopAsked, Tick
from perdure.controller.core.job import Job
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import PROTOCOL_VERSION, Directive, ExitRecord, Hello, SlotState, Stage
from perdure.protocol.names import AgentName, ProcessId, Slot, slot_name
from perdure.protocol.settings import Settings

RANK = Settings(granularity="rank", respawn=False)
"""The plainest settings: a dead rank takes only itself out, and nobody comes instead."""


class Desk:
    """layout: slots of each agent n0, n1, ...; `per_node` agents share a node, `per_group` nodes a group."""

    def __init__(
        self,
        layout: Sequence[int] = (2, 2),
        settings: Settings = RANK,
        *,
        expected: int | None = None,
        per_node: int = 1,
        per_group: int = 0,
    ) -> None:
        self.job = Job()
        self.settings = settings
        self.now = 0.0
        self.commands: list[Command] = []
        self.journal: list[tuple[float, Event]] = []
        self.answers: list[bytes] = []
        self.states: dict[str, SlotState] = {}
        self.nodes: dict[str, str] = {}
        self.groups: dict[str, str] = {}
        self.processes: dict[str, int] = {}
        for number, slots in enumerate(layout):
            name = AgentName(f"n{number}")
            self.nodes[name] = f"host{number // per_node}"
            self.groups[name] = f"rack{number // per_node // per_group}" if per_group else ""
            self.processes[name] = number + 1
            for index in range(slots):
                slot = slot_name(name, index)
                self.states[slot] = SlotState(slot, index, 1, Stage.STARTING)
        self.do(Opened("job", 1, 1, len(layout) if expected is None else expected, settings))

    # ---- events -----------------------------------------------------------------------------------------------

    def do(self, event: Event, after_s: float = 0.001) -> list[Command]:
        """One event, and the Tick that is due, as the shell would."""
        self.now += after_s
        commands = self._take(event)
        deadline = self.job.deadline()
        if deadline is not None and deadline <= self.now:
            commands = commands + self._take(Tick())
        self.commands += commands
        return commands

    def _take(self, event: Event) -> list[Command]:
        self.journal.append((self.now, event))
        commands = self.job.on(event, self.now)
        self.answers.append(msgspec.msgpack.encode(commands))
        return commands

    def wait(self) -> list[Command]:
        """Nothing happens until the next deadline."""
        deadline = self.job.deadline()
        assert deadline is not None, f"{self.job.phase} waits for ever"
        self.now = max(self.now, deadline)
        return self.do(Tick(), 0.0)

    def hello(self, agent: str, /, **changes: object) -> Hello:
        own = tuple(state for slot, state in self.states.items() if slot.startswith(f"{agent}/"))
        hello = Hello(
            PROTOCOL_VERSION, AgentName(agent), self.nodes[agent], self.nodes[agent],
            f"10.0.0.{self.processes[agent]}", 0, len(self.nodes),
            ProcessId("boot", self.processes[agent], 1), 0, own, group=self.groups[agent],
        )  # fmt: skip
        return msgspec.structs.replace(hello, **changes)

    def attach(self, *agents: str) -> None:
        for agent in agents or self.nodes:
            self.do(Attached(self.hello(agent)))

    def report(self, slot: str, **changes: object) -> list[Command]:
        """The agent says that a slot changed."""
        state = self.states[slot]
        state = self.states[slot] = msgspec.structs.replace(state, change=state.change + 1, **changes)
        return self.do(Reported(AgentName(slot.split("/")[0]), (state,)))

    def gate(self, *slots: str) -> None:
        """At the gate, after the present round if it took part in it or was told that it is over."""
        for slot in slots:
            state = self.states[slot]
            index = self.job.round.index if self.job.round and self.job.phase is not JobPhase.RUNNING else state.round
            self.report(slot, stage=Stage.GATE, round=index, port=9000, functions=self.job.completed)

    def enter(self, *slots: str) -> None:
        assert self.job.round is not None
        for slot in slots:
            self.report(slot, stage=Stage.RUNNING, round=self.job.round.index, fault=None, port=0, passed=None)

    def returns(self, *slots: str) -> None:
        for slot in slots:
            self.report(slot, stage=Stage.RETURNED)

    def fault(self, slot: str, kind: FaultKind = FaultKind.EXCEPTION, **changes: object) -> Fault:
        """Its process says that it failed, or its agent does."""
        state = self.states[slot]
        text = f"{kind.value} in {slot}"
        fault = Fault(Slot(slot), state.life, state.round, kind, text, error="ValueError", step=state.step)
        fault = msgspec.structs.replace(fault, **changes)
        self.report(slot, fault=fault)
        return fault

    def gone(self, slot: str, code: int = -9, **record: object) -> list[Command]:
        exit = msgspec.structs.replace(ExitRecord(code), **record)
        return self.report(slot, stage=Stage.GONE, exit=exit)

    def respawn(self, slot: str) -> None:
        """The agent starts the next process in a slot, and it comes to the gate."""
        state = self.states[slot]
        self.states[slot] = SlotState(Slot(slot), state.index, state.life + 1, Stage.STARTING)
        self.report(slot)
        self.report(slot, stage=Stage.GATE, port=9000, functions=self.job.completed)

    def link_lost(self, agent: str) -> None:
        self.do(LinkLost(AgentName(agent)))

    def silent(self, agent: str) -> None:
        self.do(Silent(AgentName(agent), self.settings.heartbeat_timeout))

    def stop(self, code: int = 143, reason: str = "SIGTERM") -> None:
        self.do(StopAsked(code, reason))

    def stop_at_once(self, code: int = 143, reason: str = "SIGTERM") -> None:
        """The same somebody asks twice."""
        self.stop(code, reason)
        self.stop(code, reason)

    def passed(self, slot: str, step: int) -> None:
        """A rank that was told to hold says which step it passed last."""
        self.report(slot, passed=step)

    # ---- longer ways ------------------------------------------------------------------------------------------

    def form(self) -> Desk:
        """All agents attach, all ranks come to the gate, and enter round 0."""
        self.attach()
        self.gate(*self.states)
        self.enter(*self.seats)
        assert self.job.phase is JobPhase.RUNNING
        return self

    def settle(self) -> None:
        """Everybody who is awaited comes back to the gate; then whoever has a seat enters."""
        assert self.job.round is not None
        self.gate(*[self.job.round.seats[rank].slot for rank in sorted(self.job.round.to_settle)])
        if self.job.phase is JobPhase.RUNNING:
            self.enter(*self.seats)

    # ---- what came of it --------------------------------------------------------------------------------------

    @property
    def phase(self) -> JobPhase:
        return self.job.phase

    @property
    def index(self) -> int:
        assert self.job.round is not None
        return self.job.round.index

    @property
    def seats(self) -> list[str]:
        """The slot of each rank, from rank 0 on."""
        assert self.job.round is not None
        return [self.job.round.seats[rank].slot for rank in range(self.job.round.size)]

    def told(self, event: str) -> list[str]:
        return [said.text for said in self.commands if isinstance(said, Tell) and said.event == event]

    def order(self, agent: str) -> Directive:
        """What an agent was told last."""
        return [c.directive for c in self.commands if isinstance(c, Direct) and c.agent == agent][-1]

    @property
    def refused(self) -> list[str]:
        return [said.reason for said in self.commands if isinstance(said, Refuse)]

    @property
    def ending(self) -> tuple[int, str]:
        """With which code and reason the job ends or has ended."""
        assert self.phase in (JobPhase.STOPPING, JobPhase.ENDED), self.phase
        return self.job.code, self.job.reason

    @property
    def finished(self) -> Finished | None:
        done = [said for said in self.commands if isinstance(said, Finished)]
        assert len(done) <= 1
        return done[0] if done else None
