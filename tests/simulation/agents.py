"""A simulated agent: the real agent machine, its processes, and the session logic of its link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.protocol.codec import decode_from_agent, decode_from_controller, encode_body, pack, unpack
from perdure.protocol.link import ReceiveWindow, ReliableQueue
from perdure.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    Beat,
    Directive,
    ExitRecord,
    Hello,
    Refused,
    Report,
    Saved,
    SlotState,
    Stock,
    StopRequest,
    Welcome,
)
from perdure.protocol.names import AgentName, ProcessId, Slot
from perdure.protocol.rank_messages import FromRank
from perdure.worker_runtime.agent.actions import (
    Action,
    AskStop,
    KillProcess,
    Leave,
    OrderDepot,
    Say,
    Spawn,
    Tell,
    TellSaved,
)
from perdure.worker_runtime.agent.machine import AgentMachine

from .clockwork import Alarm
from .invariants import may_be_killed
from .network import Connection
from .ranks import SimRank
from .storage import SimDepot

if TYPE_CHECKING:
    from .world import World

RECONNECT_S = 0.1
HELLO_AGAIN_S = 1.0


class SimAgent:
    """One agent process and its trainers."""

    def __init__(self, world: World, name: AgentName, node: str, slots: int, number: int) -> None:
        self.world = world
        self.clock = world.clock
        self.name = name
        self.node = node
        self.process = ProcessId("boot", number, number)
        self.machine = AgentMachine(name, "job", slots, world.settings)
        self.ranks: dict[Slot, SimRank] = {}
        self.alive = True
        self.left: Leave | None = None
        self.parted = False
        self.welcomed = False
        self.session = 0
        self.connection: Connection | None = None
        self._queue = ReliableQueue(1.0)
        self._orders = ReceiveWindow(ordered=False)
        self._pending: tuple[SlotState, ...] = ()
        self._other: list[bytes] = []
        self._machine_alarm = Alarm(self.clock, self._tick)
        self._link_alarm = Alarm(self.clock, self._poke)
        self._depot = SimDepot(world.storage, self) if world.storage is not None else None
        self._do(self.machine.start(self.clock.now))
        self.clock.after(RECONNECT_S, self._connect)
        self.clock.after(world.settings.heartbeat_interval, self._beat)

    def __repr__(self) -> str:
        return f"{self.name}#{self.process.pid}"

    # ---- the machine ------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn():
                    self._spawn(action)
                case Say():
                    rank = self.ranks[action.slot]
                    if rank.life == action.life:
                        self.clock.say(self, f"to {rank}: {action.message}")
                        rank.hear(action.message)
                case KillProcess():
                    self._kill(action)
                case Tell():
                    self.push(Report(action.states))
                case TellSaved() | OrderDepot():
                    self._do_with_checkpoints(action)
                case AskStop():
                    self.push(StopRequest(action.code, action.reason))
                case Leave():
                    self.clock.say(self, f"leaves: {action.code} {action.reason}")
                    self.left = action
                    self.clock.after(2.0, self.die)
                case _:
                    self.clock.say(self, str(action))
        self._machine_alarm.set(self.machine.deadline())

    def _do_with_checkpoints(self, action: TellSaved | OrderDepot) -> None:
        if isinstance(action, TellSaved):
            self.push(Saved(action.facts))
        elif self._depot is not None:
            self._depot.order(action.orders)

    def _spawn(self, action: Spawn) -> None:
        former = self.ranks.get(action.slot)
        assert former is None or not former.alive, f"{action.slot}: a second process beside {former}"
        self.ranks[action.slot] = SimRank(self, action.slot, action.life)
        self.clock.say(self, f"spawns {action.slot}.{action.life}")
        self.clock.after(0.01, lambda: self._spawned(action))

    def _spawned(self, action: Spawn) -> None:
        if self.alive:
            self._do(self.machine.spawned(action.slot, action.life, 1000 + action.life))

    def _kill(self, action: KillProcess) -> None:
        rank = self.ranks[action.slot]
        self.clock.say(self, f"kills {rank}: {action.why}")
        if rank.life == action.life and rank.alive:
            may_be_killed(self.world, self, rank, action.why)
            self.clock.after(
                self.clock.chance.uniform(0.0, self.world.settings.termination_grace_time), rank_killer(rank)
            )

    def rank_said(self, rank: SimRank, message: FromRank, step: int) -> None:
        if self.alive:
            self.clock.say(rank, str(message))
            self._do(self.machine.rank_said(rank.slot, rank.life, message, step, self.clock.now))

    def rank_died(self, rank: SimRank, code: int) -> None:
        if not self.alive:
            return
        if self.clock.chance.random() < 0.5:
            self._do(self.machine.dying(rank.slot, rank.life, rank.step))
            self.clock.after(self.clock.chance.uniform(0.0, 0.5), lambda: self._buried(rank, code))
        else:
            self._buried(rank, code)

    def _buried(self, rank: SimRank, code: int) -> None:
        if self.alive:
            self.clock.say(rank, f"exit {code}")
            self._do(self.machine.exited(rank.slot, rank.life, ExitRecord(code), rank.step, self.clock.now))

    def _tick(self) -> None:
        if not self.alive:
            return
        now = self.clock.now
        for rank in self.ranks.values():
            rank.walk()
        pages = {slot: self.ranks[slot].progress() for slot in self.machine.to_judge(now)}
        self._do(self.machine.tick(pages, now))
        deadline = self.machine.deadline()
        assert deadline is None or deadline > now, f"{self} wants to be woken in the past: {deadline} at {now}"

    def stop(self, code: int, reason: str) -> None:
        if self.alive:
            self._do(self.machine.stop(code, reason, self.clock.now))

    def die(self) -> None:
        """The agent process ends, and its guard ends what it had started."""
        self.alive = False
        self.disconnect()
        for rank in self.ranks.values():
            rank.die(-9)

    # ---- the link ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self.alive or self.connection is not None:
            return
        controller = self.world.controller
        if self.parted or not controller.up:
            self.clock.after(RECONNECT_S, self._connect)
            return
        self.connection = Connection(self.clock, self.world.weather)
        controller.connected(self)
        self.session = self.clock.chance.getrandbits(63)
        self._orders.reset()
        states = list(self._pending)
        for body in self._queue.reset():
            message = decode_from_agent(body)
            if isinstance(message, Report):
                states.extend(message.slots)
            else:
                self._other.append(body)
        self._pending = tuple(states)
        self.welcomed = False
        self._say_hello(self.session)

    def disconnect(self) -> None:
        """This end learns that the connection is gone."""
        if self.connection is None:
            return
        self.connection.open = False
        self.connection = None
        if self.welcomed:
            self.welcomed = False
            self._do(self.machine.link_lost(self.clock.now))
        if self.alive:
            self.clock.after(RECONNECT_S, self._connect)

    def _say_hello(self, session: int) -> None:
        if not self.alive or self.welcomed or session != self.session or self.connection is None:
            return
        hello = Hello(
            PROTOCOL_VERSION, self.name, self.node, self.node, "127.0.0.1", self.process.pid, self.world.expected,
            self.process, self.machine.incarnation, self.machine.states(), self._pending,
        )  # fmt: skip
        self._send(0, encode_body(hello))
        self.clock.after(HELLO_AGAIN_S, lambda: self._say_hello(session))

    def push(self, message: Report | StopRequest | Saved | Stock) -> None:
        self._queue.push(encode_body(message), self.clock.now)
        self._poke()

    def _poke(self) -> None:
        if self.welcomed and self.alive:
            for seq, body in self._queue.due(self.clock.now):
                self._send(seq, body)
            self._link_alarm.set(self._queue.deadline())

    def _send(self, seq: int, body: bytes) -> None:
        if self.connection is not None:
            frame = pack("job", self.machine.incarnation, self.session, seq, self._orders.acked, body)
            connection = self.connection
            connection.carry("up", frame, lambda got: self.world.controller.received(self, connection, got))

    def _beat(self) -> None:
        if self.alive:
            if self.welcomed:
                self._send(0, encode_body(Beat()))
            self.clock.after(self.world.settings.heartbeat_interval, self._beat)

    def received(self, frame: bytes) -> None:
        envelope = unpack(frame)
        message = decode_from_controller(envelope.body)
        if not self.alive or envelope.session != self.session:
            return
        if isinstance(message, Refused):
            self._do(self.machine.refused(message.reason, self.clock.now))
            return
        if isinstance(message, Welcome) and not self.welcomed:
            self.welcomed = True
            self._pending = ()
            others, self._other = self._other, []
            for body in others:
                self._queue.push(body, self.clock.now)
            self._do(self.machine.welcomed(message.incarnation, message.settings))
        elif not self.welcomed:
            return
        self._queue.acknowledge(envelope.ack)
        if envelope.seq and self._orders.accept(envelope.seq):
            assert isinstance(message, Directive)
            self._obey(envelope.incarnation, message)
        if envelope.seq:
            self._send(0, encode_body(Acknowledge()))
        self._poke()

    def _obey(self, incarnation: int, directive: Directive) -> None:
        before = self.machine.directive, self.machine.incarnation
        self.clock.say(self, f"is told {directive.phase.value} {directive.round}")
        self._do(self.machine.directed(incarnation, directive, self.clock.now))
        if incarnation < before[1]:
            assert self.machine.directive is before[0], f"{self} obeyed incarnation {incarnation} after {before[1]}"


def rank_killer(rank: SimRank) -> Callable[[], None]:
    return lambda: rank.die(-9)
