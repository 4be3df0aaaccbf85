"""The controller's shell: carries messages and time into the core, and the core's commands out.

One loop owns everything: take in what came, let the core decide, **bring the journal to the disk, then send, then
log**. The other tasks only fill its inbox:

    run ─┬─ ControllerSocket.run   encryption, admission, connections
         ├─ _receive               frames and lost connections -> inbox
         ├─ _signals               SIGINT, SIGTERM -> inbox; SIGUSR1 -> log
         └─ _lead                  the loop

Nothing is decided in this file.
"""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from ..protocol.codec import BadMessage, Envelope, decode_from_agent, encode_body, pack, unpack
from ..protocol.controller_socket import ControllerSocket
from ..protocol.endpoint import Endpoint
from ..protocol.exit_codes import ExitCode
from ..protocol.keys import JobKeys
from ..protocol.messages import (
    Acknowledge,
    Directive,
    FromAgent,
    Hello,
    Refused,
    Remark,
    Unknown,
    Welcome,
)
from ..protocol.names import AgentName, this_process
from ..protocol.settings import Settings
from ..protocol.socket import UnknownPeer
from ..protocol.wire import Disconnected, Received
from .clock import Clock
from .core.commands import Accept, Command, Direct, Finished, Refuse, Tell
from .core.events import Attached, Event, LinkLost, Opened, Silent, StopAsked, Tick, event_of
from .logbook import Logbook
from .peers import Peer, Peers
from .recovery import Memory
from .refusals import Refusals
from .run_directory import RunDirectory, RunDirectoryError

FAREWELL_S = 2.0
"""How long the agents may take to acknowledge the end of the job."""

STOPS = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}
"""SIGHUP ends the job only where it is not ignored: under nohup a job outlives its terminal."""

IDLE_S = 60.0
"""The loop's longest sleep."""


@dataclass(frozen=True, slots=True)
class Options:
    """expected: agents that the launcher starts, 0 if only they know. host, port, advertise: see `ControllerSocket`.
    signalled: signals that came before we listened.
    """

    job: str
    attempt: int
    settings: Settings
    expected: int = 0
    host: str = "*"
    port: int = 0
    advertise: str = ""
    signalled: Sequence[int] = ()


@dataclass(slots=True)
class _Inbox:
    """What the other tasks have for the loop."""

    items: list[Received | Disconnected | StopAsked] = field(default_factory=list[Received | Disconnected | StopAsked])
    bell: trio.Event = field(default_factory=trio.Event)

    def put(self, *items: Received | Disconnected | StopAsked) -> None:
        self.items.extend(items)
        self.bell.set()

    def take(self) -> list[Received | Disconnected | StopAsked]:
        items, self.items = self.items, []
        self.bell = trio.Event()
        return items


class Controller:
    """One controller of one job, from its start to the verdict."""

    def __init__(
        self, options: Options, directory: RunDirectory, keys: JobKeys | None, memory: Memory, logbook: Logbook
    ) -> None:
        self._options = options
        self._directory = directory
        self._keys = keys
        self._memory = memory
        self._log = logbook
        self._clock = Clock()
        self._inbox = _Inbox()
        self._peers = Peers()
        self._finished: Finished | None = None
        self._incarnation = memory.job.incarnation + 1
        self._refusals = Refusals(logbook)
        self._encoded: tuple[Directive | None, bytes] = (None, b"")
        self._next_look = self._clock.now() + options.settings.heartbeat_timeout
        self._stops = 0
        self._wire = ControllerSocket(
            keys,
            host=options.host,
            port=options.port,
            advertise=options.advertise,
            heartbeat_timeout_s=options.settings.heartbeat_timeout,
            expected_agents=max(options.expected, len(memory.job.roster.agents)),
        )

    async def run(self) -> int:
        """Lead the job until it has ended; its exit code."""
        await self._wire.bind()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._wire.run)
            await nursery.start(self._signals)
            nursery.start_soon(self._receive)
            self._publish()
            await self._lead()
            await self._say_goodbye()
            self._refusals.tell_totals()
            nursery.cancel_scope.cancel()
        assert self._finished is not None
        return self._finished.code

    def _publish(self) -> None:
        public = self._keys.server_public if self._keys else ""
        address = self._wire.address
        options = self._options
        Endpoint(options.job, options.attempt, self._incarnation, address, this_process(), public).publish(
            self._directory.endpoint
        )
        text = f"controller incarnation {self._incarnation} of job {options.job} listens on {address}"
        self._log.line("listening", text, incarnation=self._incarnation, replayed_events=self._memory.recovered)

    # ---- tasks that fill the inbox ----------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            self._inbox.put(*await self._wire.events())

    async def _signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        ours = [n for n in STOPS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        with trio.open_signal_receiver(*ours, signal.SIGUSR1) as received:
            for number in self._options.signalled:
                self._signalled(number)
            task_status.started()
            async for number in received:
                self._signalled(number)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGUSR1:
            text = "SIGUSR1: the scheduler is going to end this job; it runs on until then"
            self._log.line("notice", text, level="warning")
            return
        name = signal.Signals(number)
        self._inbox.put(StopAsked(int(STOPS[name]), f"{name.name} to the controller"))

    # ---- the loop ---------------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        options = self._options
        opened = Opened(
            options.job, options.attempt, self._incarnation, options.expected, options.settings, time.time()
        )
        await self._decide([opened])
        while self._finished is None:
            await self._wait()
            events: list[Event] = []
            for item in self._inbox.take():
                events.extend(self._understand(item))
            await self._decide([*events, *self._judge_silence()])
            self._send_due()
            self._refusals.connections(self._wire.refusals)

    async def _wait(self) -> None:
        """Sleep until something comes or a deadline passes."""
        now = self._clock.now()
        until = min([now + IDLE_S, self._next_look, *self._deadlines()])
        with trio.move_on_after(max(until - now, 0.0)):
            await self._inbox.bell.wait()
            return
        gap = self._clock.woke_late(until)
        if gap:
            self._log.line(
                "frozen", f"this controller stood still for {gap:.1f} s; nobody is blamed for that", level="warning"
            )
            # What waits in the socket was sent in time: let it come in first.
            with trio.move_on_after(0.2):
                await self._inbox.bell.wait()

    def _deadlines(self) -> list[float]:
        wanted = (self._memory.job.deadline(), self._peers.deadline)
        return [at for at in wanted if at is not None]

    async def _decide(self, events: list[Event]) -> None:
        """Journal, decide, make safe, act."""
        now = self._clock.now()
        commands = self._memory.take(events, now)
        deadline = self._memory.job.deadline()
        if deadline is not None and deadline <= now:
            commands += self._memory.take([Tick()], now)
        if any(not isinstance(command, Tell) for command in commands):
            await self._memory.make_safe()
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Direct():
                self._direct(command.agent, command.directive)
            case Tell():
                self._tell(command)
            case Accept():
                self._welcome(command.agent)
            case Refuse():
                self._refuse(command.agent, command.reason)
            case Finished():
                self._finished = command
                self._write_verdict(command)
                level = "info" if command.code == 0 else "error"
                self._log.line("ended", f"the job ended with code {command.code}: {command.reason}", level=level)

    def _write_verdict(self, end: Finished) -> None:
        try:
            self._directory.write_verdict(end.code, end.reason.partition("\n")[0], end.reason)
        except RunDirectoryError as error:  # a full disk, say: the agents must hear of the end all the same
            self._log.line("verdict", str(error), level="error")

    def _tell(self, said: Tell) -> None:
        fields: dict[str, Any] = dict(said.fields)
        self._log.line(
            said.event,
            said.text,
            level=said.level,
            round=said.round,
            rank=said.rank,
            slot=said.slot,
            host=said.host,
            **fields,
        )

    # ---- coming in --------------------------------------------------------------------------------------------

    def _understand(self, item: Received | Disconnected | StopAsked) -> list[Event]:
        """What an item means to the core."""
        if isinstance(item, StopAsked):
            self._stops += 1
            return [item]
        if isinstance(item, Disconnected):
            dead = self._peers.is_dead(item.peer)
            agent = self._peers.drop(item.peer)
            return [LinkLost(agent, dead)] if agent is not None else []
        try:
            envelope = unpack(item.frame)
            if envelope.job != self._options.job:
                raise BadMessage(f"it is of job {envelope.job[:80]!r}, this is {self._options.job!r}")
            message = decode_from_agent(envelope.body)
        except BadMessage as error:
            self._refusals.message(str(error))
            return []
        return self._hear(item.peer, envelope, message)

    def _hear(self, routing_id: bytes, envelope: Envelope, message: FromAgent) -> list[Event]:
        now = self._clock.now()
        if isinstance(message, Hello):
            self._peers.greeted(routing_id, envelope.session, message.agent, now).look_for(message.process)
            return [Attached(message)]
        peer = self._peers.of(routing_id, envelope.session)
        if peer is None:
            self._refusals.message("a session that was not introduced")
            self._ask_for_hello(routing_id, envelope.session)
            return []
        if not self._peers.is_accepted(peer):
            return []  # it has been refused, or is about to be
        peer.heard_at = now
        peer.orders.acknowledge(envelope.ack)
        if envelope.seq:
            self._peers.owe(peer, now)
            if not peer.reports.accept(envelope.seq):
                return []
        if isinstance(message, Remark):
            self._log.line(message.event, message.text, level=message.level, slot=message.slot or None)
        event = event_of(peer.agent, message)
        return [] if event is None else [event]

    def _judge_silence(self) -> list[Event]:
        """Who is silent. If nobody is heard any more, it may be this controller that is cut off: the core judges."""
        now = self._clock.now()
        if now < self._next_look:
            return []
        settings = self._options.settings
        silent = self._peers.take_silent(now, settings.heartbeat_interval, settings.heartbeat_timeout)
        oldest = min((peer.heard_at for peer in self._peers.all()), default=now)
        self._next_look = max(oldest + settings.heartbeat_timeout, now + settings.heartbeat_timeout / 100)
        if silent and not len(self._peers):
            # All connections go first, so that the core does not blame the first ones.
            last = silent[-1]
            return [*(LinkLost(peer.agent) for peer in silent), Silent(last.agent, now - last.heard_at)]
        return [Silent(peer.agent, now - peer.heard_at) for peer in silent]

    # ---- going out --------------------------------------------------------------------------------------------

    def _direct(self, agent: AgentName, directive: Directive) -> None:
        peer = self._peers.agent(agent)
        if peer is None:
            return  # it is told everything when it comes back
        known, body = self._encoded
        if known is not directive:
            body = encode_body(directive)
            self._encoded = (directive, body)
        peer.orders.push(body, self._clock.now())
        self._send_orders(peer)

    def _send_orders(self, peer: Peer) -> None:
        for seq, body in peer.orders.due(self._clock.now()):
            self._send(peer, seq, body)
        self._peers.expect(peer)

    def _welcome(self, agent: AgentName) -> None:
        peer = self._peers.newcomer(agent)
        if peer is not None:
            self._peers.accept(peer)
            self._send(peer, 0, encode_body(Welcome(self._incarnation, self._options.settings)))

    def _refuse(self, agent: AgentName, reason: str) -> None:
        self._log.line("refused", reason, level="error")
        peer = self._peers.newcomer(agent)
        if peer is not None:
            self._send(peer, 0, encode_body(Refused(reason)))

    def _send(self, peer: Peer, seq: int, body: bytes) -> None:
        """Losing it is fine: orders are sent again until acknowledged, and Hello is repeated until answered."""
        frame = pack(self._options.job, self._incarnation, peer.session, seq, peer.reports.acked, body)
        peer.owes_ack = False
        try:
            self._wire.send(peer.routing_id, frame)
        except UnknownPeer:
            self._inbox.put(Disconnected(peer.routing_id))

    def _ask_for_hello(self, routing_id: bytes, session: int) -> None:
        """An agent that was given up and is heard again, on the same connection, does not know that it was."""
        frame = pack(self._options.job, self._incarnation, session, 0, 0, encode_body(Unknown()))
        try:
            self._wire.send(routing_id, frame)
        except UnknownPeer:
            pass  # it begins a new session anyway when it connects again

    def _send_due(self) -> None:
        """Acknowledgements that no directive has carried meanwhile, and orders that nobody has acknowledged."""
        now = self._clock.now()
        body = encode_body(Acknowledge())
        for peer in self._peers.owed(now):
            self._send(peer, 0, body)
        for peer in self._peers.overdue(now):
            self._send_orders(peer)

    async def _say_goodbye(self) -> None:
        """Wait until every agent knows that the job is over, or FAREWELL_S."""
        with trio.move_on_after(FAREWELL_S):
            while any(len(peer.orders) for peer in self._peers.all()):
                await self._wait()
                for item in self._inbox.take():
                    self._understand(item)
                self._send_due()
