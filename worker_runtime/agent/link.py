"""The agent's connection to the controller: finds it, introduces the agent, delivers reports, hands on directives.

The endpoint file in the run directory says where the present controller is. A controller that comes back has another
port, so while there is no connection the file is looked at again, with a growing pause. Each connection is a new
session: it begins with a Hello that carries everything no controller has acknowledged, and is repeated until answered.

An agent belongs to one attempt of the job. The endpoint of an earlier one is a leftover and passed by; one of a later
attempt says that this agent's own is over.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import trio

from ...protocol.agent_socket import AgentEvent, AgentSocket
from ...protocol.checkpoints import Fact
from ...protocol.codec import BadMessage, decode_from_agent, decode_from_controller, encode_body, pack, unpack
from ...protocol.endpoint import Endpoint, EndpointError
from ...protocol.keys import JobKeys, KeysError, keys_from_environment, load_keys
from ...protocol.link import LIMIT, LinkFull, ReceiveWindow, ReliableQueue
from ...protocol.messages import (
    Acknowledge,
    Beat,
    Directive,
    FromController,
    Hello,
    Refused,
    Remark,
    Report,
    Saved,
    SlotState,
    Stock,
    StopRequest,
    Unknown,
    Welcome,
)
from ...protocol.verdict import Verdict
from ...protocol.wire import Connected, Disconnected, HandshakeFailed, WireError, local_address
from .ending import Ending

RESEND_AFTER_S = 1.0
HELLO_AGAIN_S = 1.0
ACKNOWLEDGE_WITHIN_S = 0.1
LOOK_AGAIN_S = (0.02, 1.0)
"""First and longest pause between two looks at the endpoint file."""

PATIENCE_S = 10.0
"""How long no controller is found before the log says so."""

READ_TIMEOUT_S = 5.0
"""How long the run directory's file system may take to answer."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the link does with what it learns; all are called in the agent's trio thread and return at once."""

    hello: Callable[[str, tuple[SlotState, ...]], Hello]
    """Builds the Hello from this host's address and the states that nobody has acknowledged."""
    welcomed: Callable[[Welcome], None]
    directed: Callable[[int, Directive], None]
    refused: Callable[[str], None]
    lost: Callable[[], None]
    ended: Callable[[int, str], None]
    """The controller has ended the job, and could not tell us: with which code, and why."""
    complain: Callable[[str], None]


class Link:
    """One agent's connection, whichever controller it leads to."""

    def __init__(
        self, job: str, run_dir: Path, environ: dict[str, str], heartbeat_timeout_s: float, handlers: Handlers
    ) -> None:
        self._job = job
        self._run_dir = run_dir
        self._environ = environ
        self._attempt = attempt_of(environ)
        """The earliest that may be ours; once a controller has accepted this agent, the one that is."""
        self._joined = False
        self._over = False
        self._endpoint: Endpoint | None = None
        self._keys: JobKeys | None = None
        self._ending = Ending(run_dir)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on = handlers
        self._queue = ReliableQueue(RESEND_AFTER_S)
        self._orders = ReceiveWindow(ordered=False)
        self._wire: AgentSocket | None = None
        self._session = 0
        self._incarnation = 0
        self._welcomed = False
        self._pending: tuple[SlotState, ...] = ()
        self._other: list[bytes] = []
        """Bodies other than reports that were unacknowledged when the last session ended."""
        self._hello_at: float | None = None
        self._acknowledge_at: float | None = None
        self._address = ""
        self._said = ""
        self.bell = trio.Event()
        """Rings when a deadline may have come nearer."""

    # ---- what the agent calls ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of this host, as the controller's host reaches it."""
        return self._address

    @property
    def keys(self) -> JobKeys | None:
        """Those of the present connection; None if it is in plain text."""
        return self._keys

    @property
    def up(self) -> bool:
        """A controller has accepted this session."""
        return self._welcomed

    @property
    def idle(self) -> bool:
        """Everything that was to be delivered has been."""
        return len(self._queue) == 0 and not self._pending and not self._other

    def report(self, states: tuple[SlotState, ...]) -> None:
        """Deliver, in order, once, to this controller or the next. So is all that follows."""
        self._push(encode_body(Report(states)))

    def saved(self, facts: tuple[Fact, ...]) -> None:
        self._push(encode_body(Saved(facts)))

    def stock(self, address: str, facts: tuple[Fact, ...], durable: bool) -> None:
        self._push(encode_body(Stock(address, facts, durable)))

    def ask_stop(self, code: int, reason: str) -> None:
        self._push(encode_body(StopRequest(code, reason)))

    def remark(self, remark: Remark) -> bool:
        """Send a log line if there is a connection; False if not."""
        return self._welcomed and self._send(0, encode_body(remark))

    def beat(self, beat: Beat) -> None:
        if self._welcomed:
            self._send(0, encode_body(beat))

    def deadline(self) -> float | None:
        """When `poke` is wanted."""
        if self._hello_at is not None:
            return self._hello_at
        wanted = [at for at in (self._queue.deadline(), self._acknowledge_at) if at is not None]
        return min(wanted, default=None) if self._welcomed else None

    def acknowledge(self) -> None:
        """Say now how far everything has arrived, if the controller waits to hear it."""
        if self._acknowledge_at is not None and self._welcomed:
            self._send(0, encode_body(Acknowledge()))

    def poke(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        if self._acknowledge_at is not None and now >= self._acknowledge_at:
            self.acknowledge()
        if self._hello_at is not None and now >= self._hello_at:
            self._say_hello()
        if self._welcomed:
            for seq, body in self._queue.due(now):
                self._send(seq, body)

    # ---- finding a controller ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a connection, for ever."""
        while True:
            endpoint, keys = await self._find()
            self._endpoint, self._keys = endpoint, keys
            try:
                self._address = await local_address(endpoint.address)
                await self._stay(endpoint, keys)
            except WireError as error:
                self._complain(str(error))
                await trio.sleep(LOOK_AGAIN_S[1])
            self._gone()

    async def _find(self) -> tuple[Endpoint, JobKeys | None]:
        """The endpoint and its keys, as soon as there is one."""
        pause, longest = LOOK_AGAIN_S
        patient_until = time.monotonic() + PATIENCE_S
        while True:
            found = await self._read()
            if found is not None:
                return found
            if time.monotonic() >= patient_until:
                patient_until = float("inf")
                self._complain(
                    f"no controller is there yet: {self._run_dir} has no endpoint.json of this attempt. Start "
                    "`perdure controller` with this run directory, which all machines must share; on one machine "
                    "alone --agents 1 starts it here"
                )
            await trio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _read(self) -> tuple[Endpoint, JobKeys | None] | None:
        """Our attempt's present endpoint. Never blocks the agent, however sick the file system is."""
        try:
            with trio.move_on_after(READ_TIMEOUT_S):
                found, verdict = await trio.to_thread.run_sync(self._read_files, abandon_on_cancel=True)
                if found is not None and not self._is_ours(found[0]):
                    return None
                if verdict is not None and not self._welcomed and not self._over:
                    self._over = True
                    self._on.ended(verdict.code, verdict.reason)
                return found
            self._complain(f"the run directory {self._run_dir} does not answer")
        except (EndpointError, KeysError) as error:
            self._complain(str(error))
        return None

    def _read_files(self) -> tuple[tuple[Endpoint, JobKeys | None] | None, Verdict | None]:
        """Runs in a thread. The keys are read last: a controller makes them before it publishes its endpoint."""
        verdict = self._ending.look()
        endpoint = Endpoint.read(self._run_dir / "endpoint.json")
        if endpoint is None or not endpoint.server_public:
            return (None if endpoint is None else (endpoint, None)), verdict
        keys = keys_from_environment(self._environ) or load_keys(self._run_dir / "keys.json")
        return (endpoint, keys), verdict

    def _is_ours(self, endpoint: Endpoint) -> bool:
        if endpoint.job != self._job:
            self._complain(
                f"{self._run_dir} belongs to job {endpoint.job!r}, this agent to {self._job!r}; "
                "give every job its own run directory"
            )
            return False
        newer = endpoint.attempt > self._attempt
        if newer and self._joined and not self._over:
            self._over = True
            self._on.refused(
                f"attempt {endpoint.attempt} of the job has begun, and this agent belongs to attempt {self._attempt}"
            )
        return endpoint.attempt == self._attempt or (newer and not self._joined)

    async def _stay(self, endpoint: Endpoint, keys: JobKeys | None) -> None:
        """Hold the connection to `endpoint` until another one is published while nobody there has accepted us."""
        wire = AgentSocket(keys, heartbeat_timeout_s=self._heartbeat_timeout_s)
        async with wire.running():
            self._wire = wire
            await wire.connect(endpoint.address)
            pause = LOOK_AGAIN_S[0]
            look_at = trio.current_time() + pause
            while True:
                batch: list[AgentEvent] = []
                with trio.move_on_at(float("inf") if self._welcomed else look_at):
                    batch = await wire.recv_many()
                for event in batch:
                    self._hear(event)
                if self._welcomed:
                    pause, look_at = LOOK_AGAIN_S[0], trio.current_time()
                elif trio.current_time() >= look_at:
                    present = await self._read()
                    if present is not None and present[0] != endpoint:
                        return
                    pause, look_at = min(pause * 2, LOOK_AGAIN_S[1]), trio.current_time() + pause

    # ---- a session --------------------------------------------------------------------------------------------

    def _hear(self, event: AgentEvent) -> None:
        match event:
            case Connected():
                self._begin_session()
            case Disconnected():
                self._gone()
            case HandshakeFailed():
                self._complain(f"no connection to the controller: {event.reason}")
            case _:
                self._received(event.frame)

    def _begin_session(self) -> None:
        self._session = secrets.randbits(63)
        self._orders.reset()
        states: list[SlotState] = list(self._pending)
        for body in self._queue.reset():
            message = decode_from_agent(body)
            if isinstance(message, Report):
                states.extend(message.slots)
            elif len(self._other) < LIMIT:
                self._other.append(body)
            else:
                self._complain(f"reports are lost: {LIMIT} wait for a controller")
        self._pending = tuple(states)
        self._welcomed = False
        self._say_hello()

    def _say_hello(self) -> None:
        self._send(0, encode_body(self._on.hello(self._address, self._pending)))
        self._hello_at = time.monotonic() + HELLO_AGAIN_S
        self.bell.set()

    def _gone(self) -> None:
        self._wire = self._wire if self._session else None
        self._hello_at = None
        if self._welcomed:
            self._welcomed = False
            self._on.lost()

    def _received(self, frame: bytes) -> None:
        try:
            envelope = unpack(frame)
            message = decode_from_controller(envelope.body)
        except BadMessage as error:
            self._complain(f"refused a message of the controller: {error}")
            return
        if envelope.job != self._job or envelope.session != self._session:
            return  # of an earlier connection
        if isinstance(message, Refused):
            self._hello_at = None
            self._on.refused(message.reason)
            return
        if isinstance(message, Unknown):
            self._gone()
            self._begin_session()
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif not self._welcomed:
            return
        self._queue.acknowledge(envelope.ack)
        if envelope.seq:
            # The report that answers an order carries the acknowledgement; only if none follows it goes on its own.
            self._acknowledge_at = self._acknowledge_at or time.monotonic() + ACKNOWLEDGE_WITHIN_S
            if self._orders.accept(envelope.seq):
                self._obey(envelope.incarnation, message)
        self.poke()
        self.bell.set()

    def _welcome(self, message: Welcome) -> None:
        self._hello_at = None
        if self._welcomed:
            return
        self._welcomed = True
        self._joined = True
        self._attempt = max(self._attempt, self._endpoint.attempt if self._endpoint else 0)
        self._incarnation = message.incarnation
        self._pending = ()
        # What was pushed while nobody had accepted us comes after what was pushed before; nothing of it has been sent.
        others, self._other = [*self._other, *self._queue.reset()], []
        for body in others:
            self._push(body)
        self._on.welcomed(message)

    def _obey(self, incarnation: int, message: FromController) -> None:
        if isinstance(message, Directive):
            self._on.directed(incarnation, message)

    # ---- sending ----------------------------------------------------------------------------------------------

    def _push(self, body: bytes) -> None:
        try:
            self._queue.push(body, time.monotonic())
        except LinkFull as error:
            self._complain(f"a report is lost: {error}")
        self.poke()
        self.bell.set()

    def _send(self, seq: int, body: bytes) -> bool:
        if self._wire is None or not self._session:
            return False
        self._acknowledge_at = None
        return self._wire.send(pack(self._job, self._incarnation, self._session, seq, self._orders.acked, body))

    def _complain(self, text: str) -> None:
        """Each complaint once, until another one comes."""
        if text != self._said:
            self._said = text
            self._on.complain(text)


def attempt_of(environ: Mapping[str, str]) -> int:
    """The earliest attempt to which a process may belong. A job that Slurm has queued again is not in its first."""
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return int(restarts) + 1 if restarts.isdigit() else 1
