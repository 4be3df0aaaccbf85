"""All agents of a large job, as events for the core: as many ranks as wanted, and none of them there."""

from __future__ import annotations

import msgspec

from perdure.controller.core.commands import Direct
from perdure.controller.core.events import Attached, Event, LinkLost, Opened, Reported, Tick
from perdure.controller.core.job import Job
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import PROTOCOL_VERSION, Hello, Phase, SlotState, Stage
from perdure.protocol.names import AgentName, ProcessId, slot_name
from perdure.protocol.settings import Settings


class Crowd:
    """agents x per_agent ranks. Methods named after what happens return its events; `take` hands them in."""

    def __init__(self, agents: int, per_agent: int, settings: Settings | None = None) -> None:
        self.job = Job()
        self.now = 0.0
        self.directed: list[Direct] = []
        self.settings = settings or Settings()
        self.agents = [AgentName(f"n{number:04}") for number in range(agents)]
        self.states: dict[AgentName, tuple[SlotState, ...]] = {
            name: tuple(SlotState(slot_name(name, index), index, 1, Stage.STARTING) for index in range(per_agent))
            for name in self.agents
        }
        self.lost: set[AgentName] = set()

    def take(self, events: list[Event]) -> None:
        self.now += 0.001
        for event in events:
            for command in self.job.on(event, self.now):
                if isinstance(command, Direct):
                    self.directed.append(command)

    def join(self) -> None:
        """All agents come, with processes that still start."""
        self.take([Opened("job", 1, 1, len(self.agents), self.settings)])
        self.take([Attached(self._hello(number, name)) for number, name in enumerate(self.agents)])

    def form(self) -> None:
        """Everybody joins and enters round 0."""
        self.join()
        self.take(self._all(stage=Stage.GATE, port=9000))
        self.take(self.enter())

    def _hello(self, number: int, name: AgentName) -> Hello:
        process = ProcessId("boot", number + 1, 1)
        return Hello(
            PROTOCOL_VERSION, name, name, name, "10.0.0.1", number, len(self.agents), process, 0, self.states[name]
        )

    def _all(self, **changes: object) -> list[Event]:
        """One report of each agent in which all its slots change alike."""
        events: list[Event] = []
        for name in self.agents:
            if name in self.lost:
                continue
            states = self.states[name] = tuple(
                msgspec.structs.replace(state, change=state.change + 1, **changes) for state in self.states[name]
            )
            events.append(Reported(name, states))
        return events

    def fault(self, number: int) -> list[Event]:
        """Some rank raises."""
        assert self.job.round is not None
        name = self.agents[number % len(self.agents)]
        state = self.states[name][-1]
        index = self.job.round.index
        fault = Fault(state.slot, 1, index, FaultKind.EXCEPTION, "ValueError", error=f"Error{number}", step=number)
        state = msgspec.structs.replace(state, fault=fault, step=number, change=state.change + 1)
        self.states[name] = (*self.states[name][:-1], state)
        self.directed.clear()
        return [Reported(name, (state,))]

    def lose_node(self) -> list[Event]:
        """The node of rank 0 is gone."""
        name = self.agents[0]
        self.lost.add(name)
        self.take([LinkLost(name)])
        deadline = self.job.deadline()
        assert deadline is not None
        self.now = deadline
        self.directed.clear()
        return [Tick()]

    def settle(self) -> list[Event]:
        """Everybody has left the function."""
        assert self.job.round is not None
        return self._all(stage=Stage.GATE, round=self.job.round.index, port=9000)

    def enter(self) -> list[Event]:
        assert self.job.round is not None
        return self._all(stage=Stage.RUNNING, round=self.job.round.index, port=0, fault=None)

    def decided(self, index: int) -> bool:
        """Whether round `index` runs and every agent that is there was told its seats."""
        round = self.job.round
        seated = {each.agent for each in self.directed if each.directive.phase is Phase.RUN and each.directive.seats}
        there = [name for name in self.agents if name not in self.lost]
        return (
            round is not None
            and round.index == index
            and self.job.phase is JobPhase.RUNNING
            and sorted(round.seats) == list(range(sum(len(self.states[name]) for name in there)))
            and seated == set(there)
        )
