"""Writes the journal of a job that never ran: events as agents and time would bring them, through the real journal."""

from pathlib import Path
from typing import Any

import msgspec

from perdure.controller.core.events import Attached, Entry, Event, Opened, Reported, Saved, Tick
from perdure.controller.journal import Journal
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import PROTOCOL_VERSION, ExitRecord, Hello, SlotState, Stage
from perdure.protocol.names import AgentName, ProcessId, Slot, slot_name
from perdure.protocol.settings import Settings

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 12, in train\nValueError: boom\n'


class Past:
    """One job. Each method writes one event, `after` seconds later; a slot's states count up by themselves."""

    def __init__(self, folder: Path, job: str = "llama", **knobs: Any) -> None:
        self.path = folder / "journal"
        self.settings = Settings(granularity="rank", **knobs)
        self.now = 1000.0
        self._journal = Journal.open(self.path, job, 1)
        self._job = job
        self._change = 0
        self._incarnation = 0

    def write(self, event: Event, after: float = 0.0) -> int:
        """Its offset."""
        self.now += after
        return self._journal.append(msgspec.msgpack.encode(Entry(self.now, event)))

    def close(self) -> None:
        self._journal.close()

    def opened(self, wall: float = 1_800_000_000.0, expected: int = 1) -> None:
        self._incarnation += 1
        self.write(Opened(self._job, 1, self._incarnation, expected, self.settings, wall))

    def attached(self, agent: str = "n0", slots: int = 3, after: float = 0.5, **state: Any) -> None:
        """An agent whose slots are at the gate."""
        states = tuple(self.state(agent, index, pid=100 + index, **state) for index in range(slots))
        hello = Hello(
            PROTOCOL_VERSION, AgentName(agent), agent, agent, "127.0.0.1", 0, 1, ProcessId("boot", 7, 7), 0, states
        )
        self.write(Attached(hello), after)

    def state(self, agent: str, index: int, stage: Stage = Stage.GATE, **rest: Any) -> SlotState:
        self._change += 1
        rest.setdefault("life", 1)
        return SlotState(slot_name(AgentName(agent), index), index, stage=stage, port=9000, change=self._change, **rest)

    def reported(self, *states: SlotState, after: float = 0.01) -> None:
        self.write(Reported(AgentName(states[0].slot.partition("/")[0]), states), after)

    def entered(self, round: int, *indices: int, agent: str = "n0", after: float = 0.003) -> None:
        self.reported(*(self.state(agent, i, Stage.RUNNING, round=round) for i in indices), after=after)

    def gathered(self, round: int, *indices: int, agent: str = "n0", after: float = 0.007) -> None:
        self.reported(*(self.state(agent, i, Stage.GATE, round=round) for i in indices), after=after)

    def failed(self, round: int, index: int, after: float = 1.0, **fault: Any) -> None:
        """A rank of n0 raises."""
        told = Fault(
            Slot(f"n0/{index}"), 1, round,
            **{"kind": FaultKind.EXCEPTION, "message": "ValueError: boom", "detail": TRACEBACK,
               "error": "ValueError", "place": "/x/train.py:12",
               "step": 7, **fault},
        )  # fmt: skip
        self.reported(self.state("n0", index, Stage.RUNNING, round=round, step=7, fault=told), after=after)

    def died(self, round: int, index: int, code: int = -9, after: float = 1.0, **exit: Any) -> None:
        """A process of n0 is dead."""
        record = ExitRecord(code, stderr=exit.pop("stderr", "last words"), **exit)
        self.reported(self.state("n0", index, Stage.GONE, round=round, step=8, exit=record), after=after)

    def saved(self, step: int, round: int, ranks: int = 3, epoch: int = 1_800_000_000) -> None:
        """Agent n0 and its ranks save a step on the durable tier, and publish it."""
        save = SaveId(step, epoch, round)
        shards = [Fact(save, What.WRITTEN, Tier.DURABLE, rank, "", ranks, 1000, b"d", 0.25) for rank in range(ranks)]
        done = Fact(save, What.PUBLISHED, Tier.DURABLE, world_size=ranks)
        self.write(Saved(AgentName("n0"), tuple(shards)), 0.2)
        self.write(Saved(AgentName("n0"), (done,)), 0.1)

    def tick(self, after: float) -> None:
        self.write(Tick(), after)
