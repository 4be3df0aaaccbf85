"""A simulated controller: the real core and the real sessions, around them what the shell does: journal, then act."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from perdure.controller.core.commands import Accept, Command, Direct, Finished, Refuse, Tell
from perdure.controller.core.events import Attached, Entry, Event, LinkLost, Opened, Silent, Tick, event_of
from perdure.controller.core.job import Job
from perdure.controller.peers import Peer, Peers
from perdure.protocol.codec import decode_from_agent, encode_body, pack, unpack
from perdure.protocol.messages import Acknowledge, Hello, Refused, Welcome

from .clockwork import Alarm
from .invariants import check_job
from .network import Connection

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import World

_entries = msgspec.msgpack.Decoder(Entry)


class SimController:
    """All incarnations of one job's controller. What outlives a crash is `journal`; `said` is there to compare."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = world.clock
        self.journal: list[bytes] = []
        self.said: list[bytes] = []
        self.job = Job()
        self.up = False
        self.finished: Finished | None = None
        self.log: list[Tell] = []
        self._offset = 0.0
        self._peers = Peers()
        self._behind: dict[bytes, tuple[SimAgent, Connection]] = {}
        self._tick_alarm = Alarm(self.clock, self._tick)
        self._resend_alarm = Alarm(self.clock, self._resend)

    @property
    def now(self) -> float:
        """This incarnation's clock: another machine's, perhaps."""
        return self.clock.now + self._offset

    def start(self) -> None:
        """Lead: for the first time, or from the journal of those before."""
        self.job = Job()
        for number, record in enumerate(self.journal):
            entry = _entries.decode(record)
            commands = msgspec.msgpack.encode(self.job.on(entry.event, entry.now))
            assert commands == self.said[number], f"replayed record {number} ({entry.event}) decides otherwise"
        self.up = True
        self.finished = None
        self._offset = self.clock.chance.choice((0.0, 5000.0, -5000.0))
        self._peers = Peers()
        self._behind = {}
        incarnation = self.job.incarnation + 1
        self.clock.say("controller", f"incarnation {incarnation}")
        wall = 1_000_000.0 + self.clock.now
        self.decide(Opened("job", 1, incarnation, self.world.expected, self.world.settings, wall))
        self._look_for_silence(incarnation)

    def crash(self) -> None:
        """SIGKILL. The journal stays; every connection breaks."""
        if not self.up:
            return
        self.clock.say("controller", "crashes")
        self.up = False
        self._tick_alarm.set(None)
        self._resend_alarm.set(None)
        for agent, connection in self._behind.values():
            connection.open = False
            self.clock.after(0.005, lambda a=agent, c=connection: a.disconnect() if a.connection is c else None)

    # ---- decide -----------------------------------------------------------------------------------------------

    def decide(self, *events: Event) -> None:
        commands: list[Command] = []
        for event in events:
            commands += self._take(event)
        deadline = self.job.deadline()
        if deadline is not None and deadline <= self.now:
            commands += self._take(Tick())
            deadline = self.job.deadline()
            assert deadline is None or deadline > self.now, f"a timer fires for ever: {self.job.timers}"
        check_job(self.world)
        if self.clock.chance.random() < self.world.crash_chance:
            # Between the journal and the deeds: the worst moment to die.
            self.crash()
            self.clock.after(self.clock.chance.uniform(0.1, 5.0), self.world.start_controller)
            return
        for command in commands:
            self._carry_out(command)
        for peer in self._peers.all():
            if peer.owes_ack:
                self._send(peer, 0, encode_body(Acknowledge()))
        self._set_alarms()

    def _take(self, event: Event) -> list[Command]:
        self.journal.append(msgspec.msgpack.encode(Entry(self.now, event)))
        commands = self.job.on(event, self.now)
        self.said.append(msgspec.msgpack.encode(commands))
        return commands

    def _set_alarms(self) -> None:
        if not self.up:
            return
        deadline = self.job.deadline()
        self._tick_alarm.set(None if deadline is None else deadline - self._offset)
        orders = [peer.orders.deadline() for peer in self._peers.all()]
        self._resend_alarm.set(min((at for at in orders if at is not None), default=None))

    def _tick(self) -> None:
        if self.up:
            # The clocks differ by an offset, which may round a deadline to just after this instant.
            self.clock.at(self.clock.now + 1e-9, lambda: self.decide() if self.up else None)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Direct():
                peer = self._peers.agent(command.agent)
                if peer is not None:
                    peer.orders.push(encode_body(command.directive), self.clock.now)
                    self._send_orders(peer)
            case Accept():
                peer = self._peers.newcomer(command.agent)
                if peer is not None:
                    self._peers.accept(peer)
                    self._send(peer, 0, encode_body(Welcome(self.job.incarnation, self.world.settings)))
            case Refuse():
                peer = self._peers.newcomer(command.agent)
                if peer is not None:
                    self._send(peer, 0, encode_body(Refused(command.reason)))
            case Tell():
                self.log.append(command)
                self.clock.say("LOG", f"{command.event}: {command.text}")
            case Finished():
                self.finished = command
                self.clock.say("controller", str(command))

    # ---- sessions ---------------------------------------------------------------------------------------------

    def connected(self, agent: SimAgent) -> None:
        assert agent.connection is not None
        self._behind[_id(agent)] = (agent, agent.connection)

    def broke(self, agent: SimAgent, connection: Connection) -> None:
        """This end learns that a connection is gone."""
        if not self.up or self._behind.get(_id(agent), (None, None))[1] is not connection:
            return
        del self._behind[_id(agent)]
        name = self._peers.drop(_id(agent))
        if name is not None:
            self.decide(LinkLost(name))

    def received(self, agent: SimAgent, connection: Connection, frame: bytes) -> None:
        if not self.up or self._behind.get(_id(agent), (None, None))[1] is not connection:
            return
        envelope = unpack(frame)
        message = decode_from_agent(envelope.body)
        if isinstance(message, Hello):
            self._peers.greeted(_id(agent), envelope.session, message.agent, self.clock.now)
            self.decide(Attached(message))
            return
        peer = self._peers.of(_id(agent), envelope.session)
        if peer is None:
            return
        peer.heard_at = self.clock.now
        peer.orders.acknowledge(envelope.ack)
        if envelope.seq:
            peer.owes_ack = True
            if not peer.reports.accept(envelope.seq):
                self.decide()
                return
        event = event_of(peer.agent, message)
        self.decide(*([event] if event is not None else []))

    def _send_orders(self, peer: Peer) -> None:
        for seq, body in peer.orders.due(self.clock.now):
            self._send(peer, seq, body)

    def _send(self, peer: Peer, seq: int, body: bytes) -> None:
        peer.owes_ack = False
        behind = self._behind.get(peer.routing_id)
        if behind is not None:
            agent, connection = behind
            frame = pack("job", self.job.incarnation, peer.session, seq, peer.reports.acked, body)
            connection.carry("down", frame, agent.received)

    def _resend(self) -> None:
        if self.up:
            for peer in self._peers.all():
                self._send_orders(peer)
            self._set_alarms()

    def _look_for_silence(self, incarnation: int) -> None:
        if not self.up or self.job.incarnation != incarnation:
            return
        limit = self.world.settings.heartbeat_timeout
        for peer in self._peers.all():
            age = self.clock.now - peer.heard_at
            if age >= limit:
                agent, connection = self._behind.pop(peer.routing_id)
                self._peers.drop(peer.routing_id)
                connection.open = False
                self.clock.after(0.01, lambda a=agent, c=connection: a.disconnect() if a.connection is c else None)
                self.decide(Silent(peer.agent, age))
        self.clock.after(limit / 10, lambda: self._look_for_silence(incarnation))


def _id(agent: SimAgent) -> bytes:
    return str(agent.process.pid).encode()
