"""Many agents in one process, for `scale.py`: real sockets, encryption, sequence numbers and messages, but no ranks.

Each agent says what a real one would say for ranks that obey at once: all of its ranks come to the gate, or enter
a round, together, and are told of in one report. They share a libzmq context and a trio loop.
Commands come by standard input: `fault` makes a rank of the first agent raise, `calm` slows the heartbeats down to
their default interval, `end` ends the process.
"""

import argparse
import secrets
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from events import Events

from perdure.protocol.agent_socket import AgentSocket
from perdure.protocol.codec import decode_from_controller, encode_body, pack, unpack
from perdure.protocol.endpoint import Endpoint
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.keys import JobKeys, load_keys
from perdure.protocol.link import ReceiveWindow, ReliableQueue
from perdure.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    Beat,
    Directive,
    FromAgent,
    Hello,
    Phase,
    Report,
    SlotState,
    Stage,
)
from perdure.protocol.names import AgentName, ProcessId, slot_name
from perdure.protocol.wire import Connected, Received, new_context

PORT = 29_500
"""Any number will do: nobody opens a store there."""

RESEND_AFTER_S = 1.0
CALM_S = 30.0
HEARTBEAT_TIMEOUT_S = 60.0


class Agent:
    """One agent as the controller sees it."""

    def __init__(self, number: int, ranks: int, expected: int, endpoint: Endpoint, wire: AgentSocket) -> None:
        self.name = AgentName(f"node{number:05d}")
        self.number, self.expected, self.endpoint, self.wire = number, expected, endpoint, wire
        self.session = 0
        self.incarnation = 0
        self.reports = ReliableQueue(RESEND_AFTER_S)
        self.orders = ReceiveWindow(ordered=False)
        slots = [slot_name(self.name, index) for index in range(ranks)]
        self.slots = [SlotState(slot, index, 1, Stage.GATE, port=PORT) for index, slot in enumerate(slots)]
        self.directive = Directive(-1, Phase.HOLD)

    def take(self, events: list[Any]) -> bool:
        """Obey what came; whether there was a new directive."""
        fresh = owes = False
        for event in events:
            if isinstance(event, Connected):
                self.greet()
            elif isinstance(event, Received):
                envelope = unpack(event.frame)
                if envelope.session != self.session:
                    continue
                self.incarnation = envelope.incarnation
                self.reports.acknowledge(envelope.ack)
                message = decode_from_controller(envelope.body)
                owes = owes or bool(envelope.seq)
                if isinstance(message, Directive) and self.orders.accept(envelope.seq):
                    self.obey(message)
                    fresh = True
        if not self.flush() and owes:
            self.send(0, Acknowledge())
        return fresh

    def greet(self) -> None:
        self.session = secrets.randbits(48)
        self.reports.reset()
        self.orders.reset()
        process = ProcessId("benchmark", self.number, 0)
        self.send(
            0,
            Hello(
                *(PROTOCOL_VERSION, self.name, self.name, self.name, "127.0.0.1", self.number, self.expected, process),
                incarnation=self.incarnation,
                slots=tuple(self.slots),
            ),
        )

    def obey(self, directive: Directive) -> None:
        self.directive = directive
        if directive.phase is Phase.RUN:
            seated = {seat.slot for seat in directive.seats}
            self.change(Stage.RUNNING, [index for index, slot in enumerate(self.slots) if slot.slot in seated])
        elif directive.phase is Phase.ABORT:
            running = [index for index, slot in enumerate(self.slots) if slot.stage is Stage.RUNNING]
            self.change(Stage.GATE, running)

    def change(self, stage: Stage, indices: list[int]) -> None:
        if not indices:
            return
        for index in indices:
            slot = self.slots[index]
            fault = None if stage is Stage.RUNNING else slot.fault
            # Each round gets a step further: equal failures without progress would end the job.
            round = self.directive.round
            self.slots[index] = msgspec.structs.replace(slot, stage=stage, round=round, step=round, fault=fault)
        self.report(indices)

    def fail(self) -> None:
        """Rank 0 of this agent raises."""
        slot = self.slots[0]
        fault = Fault(slot.slot, slot.life, slot.round, FaultKind.EXCEPTION, "injected", error="RuntimeError")
        self.slots[0] = msgspec.structs.replace(slot, fault=fault)
        self.report([0])
        self.flush()

    def report(self, indices: list[int]) -> None:
        message = Report(tuple(self.slots[index] for index in indices))
        self.reports.push(encode_body(message), time.monotonic())

    def flush(self) -> bool:
        """Send what is due; whether anything was."""
        due = self.reports.due(time.monotonic())
        for seq, body in due:
            self.send_body(seq, body)
        return bool(due)

    def beat(self) -> None:
        self.send(0, Beat(tuple((slot.index, 1, 0.1) for slot in self.slots)))

    def send(self, seq: int, message: FromAgent) -> None:
        self.send_body(seq, encode_body(message))

    def send_body(self, seq: int, body: bytes) -> None:
        job = self.endpoint.job
        self.wire.send(pack(job, self.incarnation, self.session, seq, self.orders.acked, body))


class Crowd:
    """All agents of this process, and what they have in common."""

    agent_type = Agent

    def __init__(self, options: argparse.Namespace, events: Events) -> None:
        self.options, self.events = options, events
        self.agents: list[Agent] = []
        self.told: dict[tuple[str, int], int] = {}
        self.beat_interval_s: float = options.beat_interval

    async def run(self) -> None:
        keys = load_keys(self.options.run_dir / "keys.json")
        endpoint = Endpoint.read(self.options.run_dir / "endpoint.json")
        assert endpoint is not None, "the controller listens before the agents start"
        context = new_context()
        async with trio.open_nursery() as nursery:
            for number in range(self.options.first, self.options.first + self.options.agents):
                await nursery.start(partial(self.run_agent, number, endpoint, keys, context))
            nursery.start_soon(self.keep_time)
            await self.obey_commands()
            nursery.cancel_scope.cancel()

    async def run_agent(
        self, number: int, endpoint: Endpoint, keys: JobKeys, context: Any, task_status: trio.TaskStatus[None]
    ) -> None:
        wire = AgentSocket(keys, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S, context=context)
        async with wire.running():
            agent = self.agent_type(number, self.options.ranks_per_agent, self.options.expected, endpoint, wire)
            self.agents.append(agent)
            await wire.connect(endpoint.address)
            task_status.started()
            while True:
                if agent.take(await wire.recv_many()):
                    self.count(agent.directive)

    def count(self, directive: Directive) -> None:
        """Tell the benchmark when the last agent of this process has got an order."""
        order = (directive.phase.value, directive.round)
        self.told[order] = self.told.get(order, 0) + 1
        if self.told[order] == len(self.agents):
            self.events.emit("told", phase=order[0], round=order[1], agents=len(self.agents))

    async def keep_time(self) -> None:
        """Heartbeats, evenly spread, and messages that must be sent again."""
        while True:
            for agent in self.agents:
                agent.beat()
                agent.flush()
                await trio.sleep(self.beat_interval_s / len(self.agents))

    async def obey_commands(self) -> None:
        async for line in trio.lowlevel.FdStream(sys.stdin.fileno()):
            for command in line.decode().split():
                if command == "end":
                    return
                self.obey(command)

    def obey(self, command: str) -> None:
        if command == "calm":
            self.beat_interval_s = CALM_S
            return
        self.events.emit("fault", round=self.agents[0].directive.round)
        self.agents[0].fail()


def main(crowd: type[Crowd] = Crowd) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--first", type=int, required=True, help="number of this process's first agent")
    parser.add_argument("--agents", type=int, required=True, help="in this process")
    parser.add_argument("--expected", type=int, required=True, help="agents in all")
    parser.add_argument("--ranks-per-agent", type=int, required=True)
    parser.add_argument("--beat-interval", type=float, required=True)
    options = parser.parse_args()
    trio.run(crowd(options, Events(options.events)).run)


if __name__ == "__main__":
    main()
