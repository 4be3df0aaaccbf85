"""The controller's socket: one ROUTER for all agents.

* Every TCP connection is encrypted and authenticated (CURVE) unless `keys` is None, which is plain text and must be
  asked for.
* A newer connection of a peer replaces its older one. After a network cut an agent's end notices and reconnects while
  ours still looks alive; without this rule libzmq would ignore the new connection silently, for as long as it lasts.
  Only holders of the job's key can connect, and only the agent knows its random routing id, so nobody else can replace
  it.
* Sending never waits: whoever sends learns at once that a peer is gone or its queue is full.
"""

import contextlib
import errno
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Callable

import trio
import zmq

from . import connections
from .admission import DOMAIN, Admission
from .connections import Connections
from .keys import JobKeys
from .socket import Socket
from .wire import (
    Disconnected,
    Received,
    WireError,
    end_context,
    host_address,
    new_context,
    parse_monitor_event,
    resolve,
    set_common_options,
    split_address,
    tcp_address,
)

BATCH = 1000
SPARE_DESCRIPTORS = 200
"""Open files beside the agents' connections: journal, logs, status pages, libzmq's own."""

_MONITOR = "inproc://controller-monitor"
_WILDCARDS = ("*", "0.0.0.0", "::")

ControllerEvent = Received | Disconnected


class ControllerSocket:
    """`await bind()`, then `run()` in a nursery (or `async with wire.listening():`), then `events()` and `send()`."""

    def __init__(
        self,
        keys: JobKeys | None,
        *,
        host: str = "*",
        port: int = 0,
        advertise: str = "",
        heartbeat_timeout_s: float,
        expected_agents: int,
    ) -> None:
        """host, port: where to listen; port 0 takes a free one.

        advertise: the name or address under which agents reach this host.
        """
        if not 0 <= port < 65_536:
            raise WireError(f"port {port}: it must be from 0 (any free port) to 65535")
        self._host, self._port, self._advertise = host, port, advertise
        ensure_descriptors(expected_agents + SPARE_DESCRIPTORS)
        self._context = new_context()
        self._admission: Admission | None = None
        self._router = Socket(self._context, zmq.ROUTER)
        self._monitor = Socket(self._context, zmq.PAIR)
        self._connections = Connections()
        self._malformed = 0
        self._address = ""
        set_common_options(self._router.raw, heartbeat_timeout_s)
        self._router.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.raw.setsockopt(zmq.BACKLOG, 4096)
        if keys is not None:
            self._require_curve(keys)

    @property
    def address(self) -> str:
        """Where agents connect: `tcp://host:port` with the real port."""
        return self._address

    @property
    def peers(self) -> int:
        """Peers that have spoken and are connected."""
        return len(self._connections)

    @property
    def refusals(self) -> Counter[str]:
        """What was turned away so far, by reason."""
        return self._connections.refusals + Counter({"not one frame": self._malformed})

    # ---- life ----

    async def bind(self) -> None:
        """Listen. Every way in which this can fail is a `WireError`."""
        try:
            host = self._host if self._host in _WILDCARDS else await resolve(self._host)
            self._bind(host)
        except BaseException:
            await self._close()
            raise
        _, port = split_address(self._router.raw.getsockopt_string(zmq.LAST_ENDPOINT))
        shown = self._advertise or (host_address() if self._host in _WILDCARDS else self._host)
        self._address = tcp_address(shown, port)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve admission and the monitor until cancelled; then close everything."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_monitor)
                if self._admission is not None:
                    nursery.start_soon(self._admission.run)
                task_status.started()
        finally:
            await self._close()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator["ControllerSocket"]:
        """Bind, run in the background, close."""
        await self.bind()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()

    # ---- messages ----

    async def events(self) -> list[ControllerEvent]:
        """What happened, oldest first, at least one event. One task at a time."""
        await trio.lowlevel.checkpoint()
        while True:
            batch = self._collect()
            if batch:
                return batch
            if not self._connections.ended:
                await self._router.readable()

    def send(self, peer: bytes, frame: bytes) -> bool:
        """True: handed to libzmq.

        False: the peer's queue is full. Raises `UnknownPeer` (a LookupError) if it is not connected.
        """
        return self._router.send_nowait((peer, frame))

    # ---- how ----

    def _require_curve(self, keys: JobKeys) -> None:
        self._admission = Admission(self._context, keys.client_public)
        raw = self._router.raw
        raw.setsockopt(zmq.CURVE_SERVER, 1)
        raw.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        raw.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def _bind(self, host: str) -> None:
        # The monitor's other end is connected first, and its queue has no limit: libzmq waits for room in it, inside
        # bind() too.
        self._router.raw.monitor(_MONITOR, connections.EVENTS)
        self._monitor.raw.setsockopt(zmq.RCVHWM, 0)
        self._monitor.raw.connect(_MONITOR)
        address = f"tcp://{'*' if host in _WILDCARDS else f'[{host}]' if ':' in host else host}:{self._port or '*'}"
        try:
            self._router.raw.bind(address)
        except zmq.ZMQError as error:
            raise WireError(self._explained(error)) from error

    def _explained(self, error: zmq.ZMQError) -> str:
        where = f"cannot listen on port {self._port} of {self._host!r}"
        if error.errno == errno.EADDRINUSE:
            return f"{where}: another program has it; choose another port, or 0 for any free one"
        if error.errno == errno.EACCES:
            return f"{where}: not permitted; choose a port above 1023, or 0 for any free one"
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            return f"{where}: this host has no such address; give one of its own, or '*' for all"
        return f"{where}: {error.strerror}"

    async def _watch_monitor(self) -> None:
        while True:
            await self._monitor.readable()
            if self._hear():
                self._router.wake()

    def _hear(self) -> int:
        messages = self._monitor.recv_nowait(1 << 20)
        for message in messages:
            self._connections.hear(parse_monitor_event(message))
        return len(messages)

    def _collect(self) -> list[ControllerEvent]:
        """The order of these steps is what makes the events exact; see `connections`."""
        self._hear()
        ended = self._connections.ended
        messages = self._router.recv_frames_nowait(BATCH)
        self._hear()
        batch: list[ControllerEvent] = []
        for frames in messages:
            received = self._received(frames)
            if received is not None:
                batch.append(received)
        if len(messages) < BATCH:
            batch.extend(Disconnected(peer) for peer in self._connections.take_ended(ended))
        return batch

    def _received(self, frames: list[zmq.Frame]) -> Received | None:
        peer = frames[0].bytes
        try:
            self._connections.spoke(peer, int(frames[-1].get(zmq.SRCFD)))
        except zmq.ZMQError:
            self._malformed += 1  # a peer of ZMTP 1, which plain text lets in, and which has no such property
            return None
        if len(frames) != 2:
            self._malformed += 1
            return None
        return Received(peer, frames[1].bytes)

    async def _close(self) -> None:
        if not self._router.closed:
            self._router.raw.disable_monitor()
        closing: list[Callable[[], None]] = [self._monitor.close, self._router.close]
        if self._admission is not None:
            closing.append(self._admission.close)
        for close in closing:
            close()
        await end_context(self._context)


def ensure_descriptors(needed: int) -> None:
    """Raise the soft limit of open files to what is needed, if the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise WireError(
            f"this host allows {hard} open files per process, {needed} are needed; "
            "raise the limit (ulimit -Hn, LimitNOFILE=) or start fewer agents, each with more ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
