"""Who is there: every agent and slot that the job knows, and what each last said.

A `SlotRecord` belongs to one agent *process*. When another process takes over an agent's name, the old records are
dead for good and new ones are made, so that nothing said of an old process can touch a new one.
"""

from collections.abc import Callable, Iterator

from ...protocol.faults import FaultKind
from ...protocol.messages import Hello, SlotState, Stage
from ...protocol.names import AgentName, ProcessId, Slot


class AgentRecord:
    """One agent process. depot: where its node's shards can be read; None until it has taken stock of them.

    has_looked: it has told what is on the durable tier.
    """

    __slots__ = (
        "address",
        "attached",
        "depot",
        "expected",
        "group",
        "has_looked",
        "host",
        "lost",
        "name",
        "node",
        "order",
        "process",
        "slots",
    )

    def __init__(self, hello: Hello) -> None:
        self.name: AgentName = hello.agent
        self.node = hello.node
        self.host = hello.host
        self.group = hello.group
        self.address = hello.address
        self.order = hello.order
        self.expected = hello.expected
        self.process: ProcessId = hello.process
        self.attached = True
        self.lost = False
        self.depot: str | None = None
        self.has_looked = False
        self.slots: dict[Slot, SlotRecord] = {}

    @property
    def busy(self) -> bool:
        """Has processes that are not known to be dead."""
        return not self.lost and any(record.state.stage is not Stage.GONE for record in self.slots.values())


class SlotRecord:
    """One slot of an agent.

    wanted: the life that should be there. condemned: why its process was given up on, though nobody saw it die yet.
    failed_starts: processes in a row that died before they reached the gate. suspect: left out by the loop breaker.
    outside: was outside of it when last seen alive.
    """

    __slots__ = ("agent", "condemned", "failed_starts", "outside", "state", "suspect", "wanted")

    def __init__(self, agent: AgentRecord, state: SlotState) -> None:
        self.agent = agent
        self.state = state
        self.wanted = state.life
        self.condemned = ""
        self.failed_starts = 0
        self.suspect = False
        self.outside = False

    def __repr__(self) -> str:
        return f"<{self.state.slot} life {self.state.life} {self.state.stage.value}>"

    @property
    def slot(self) -> Slot:
        return self.state.slot

    @property
    def unfit(self) -> bool:
        """It failed its health check: it leaves, and must not be seated meanwhile."""
        fault = self.state.fault
        return fault is not None and fault.kind is FaultKind.HEALTH_CHECK

    @property
    def alive(self) -> bool:
        """Whether its process may take part in anything again."""
        stage = self.state.stage
        dead = stage is Stage.DYING or stage is Stage.GONE
        return not dead and not self.condemned and not self.agent.lost

    @property
    def dying(self) -> bool:
        """As good as dead: how it dies is not yet known, or it has failed its health check and is about to leave."""
        leaves = self.unfit and self.state.stage is Stage.GATE and not self.condemned
        return (self.state.stage is Stage.DYING or leaves) and not self.agent.lost

    @property
    def at_gate(self) -> bool:
        return self.state.stage is Stage.GATE and self.alive and not self.unfit

    def waits_for(self, function: int) -> bool:
        """At the gate of the job's present function (0, 1, ...), and not of one that the job has completed."""
        return self.at_gate and self.state.functions >= function

    def lags(self, function: int) -> bool:
        """On its way to the present function's gate: out of an older round, or through functions that are completed."""
        stage = self.state.stage
        behind = stage is Stage.GATE and self.state.functions < function
        return self.alive and (behind or stage in (Stage.RUNNING, Stage.RETURNED, Stage.OUTSIDE))

    @property
    def coming(self) -> bool:
        """A process is starting in it, or about to be."""
        if self.agent.lost:
            return False
        return self.wanted > self.state.life or (self.state.stage is Stage.STARTING and not self.condemned)

    def settled(self, round: int) -> bool:
        """Whether its process is known to be outside the training function of `round`."""
        state = self.state
        out = state.stage is Stage.OUTSIDE or (state.stage is Stage.GATE and state.round >= round)
        return out or not self.alive


class Roster:
    """All agents of a job, by name."""

    def __init__(self) -> None:
        self.agents: dict[AgentName, AgentRecord] = {}

    def slots(self) -> Iterator[SlotRecord]:
        for agent in self.agents.values():
            yield from agent.slots.values()

    def slot(self, agent: AgentName, slot: Slot) -> SlotRecord | None:
        record = self.agents.get(agent)
        return record.slots.get(slot) if record else None

    def admit(self, hello: Hello) -> tuple[AgentRecord, list[SlotRecord]]:
        """Take in a Hello. Returns the agent's record and the records of a former process that this one replaces."""
        known = self.agents.get(hello.agent)
        replaced: list[SlotRecord] = []
        if known is None or known.process != hello.process:
            if known is not None:
                known.lost = True
                replaced = list(known.slots.values())
            known = self.agents[hello.agent] = AgentRecord(hello)
        known.attached = True
        known.lost = False
        known.address = hello.address
        return known, replaced

    def update(self, agent: AgentRecord, state: SlotState) -> tuple[SlotRecord, SlotState | None] | None:
        """Note what an agent says of a slot. Returns its record and what was known before; None if it is old news."""
        record = agent.slots.get(state.slot)
        if record is None:
            record = agent.slots[state.slot] = SlotRecord(agent, state)
            return record, None
        before = record.state
        if state.life < before.life or (state.life == before.life and _is_older(state, before)):
            return None
        if state.life > before.life:
            record.condemned = ""
            record.wanted = max(record.wanted, state.life)
        record.state = state
        return record, before


def _is_older(state: SlotState, known: SlotState) -> bool:
    """Within one life: death is final, and of two states the one with more changes behind it is the newer.

    A Hello says the newest state of a slot; what was reported before it was answered may arrive after it.
    """
    return known.stage is Stage.GONE or state.change < known.change


class Watch:
    """Whether there is any slot of a kind, without a look at all of them after every event.

    It remembers those that it found, and looks at the whole roster only when none of them is of that kind any more.
    """

    def __init__(self, roster: Roster, is_of_kind: Callable[[SlotRecord], bool]) -> None:
        self._roster = roster
        self._is_of_kind = is_of_kind
        self._found: list[SlotRecord] = []

    def any(self) -> bool:
        while self._found:
            if self._is_of_kind(self._found[-1]):
                return True
            self._found.pop()
        self._found = [record for record in self._roster.slots() if self._is_of_kind(record)]
        return bool(self._found)
