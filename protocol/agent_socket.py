"""An agent's socket: one DEALER to the controller, which libzmq connects again whenever the connection is lost.

* Nothing is queued while there is no connection: `send` says False. So no frame of an earlier connection arrives in a
  later one.
* Connected and Disconnected come in the same stream as the frames, in order: the frames of a connection lie between
  them.
"""

import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import trio
import zmq

from .keys import JobKeys
from .socket import Socket
from .wire import (
    Connected,
    Disconnected,
    HandshakeFailed,
    Received,
    end_context,
    new_context,
    parse_monitor_event,
    resolve,
    set_common_options,
    split_address,
    tcp_address,
)

BATCH = 1000

_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the controller does not know our key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "what listens there is no controller of this job",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the connection was closed during the handshake",
}
_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) | sum(_FAILURES)

AgentEvent = Received | Connected | Disconnected | HandshakeFailed


class AgentSocket:
    """`run()` in a nursery (or `async with wire.running():`), `await connect(address)`, then `recv_many()` and
    `send()`.
    """

    def __init__(
        self,
        keys: JobKeys | None,
        *,
        heartbeat_timeout_s: float,
        context: "zmq.Context[Any] | None" = None,
    ) -> None:
        """keys: None for plain text.

        context: shared by many agents of one process, which then ends it; by default one of its own.
        """
        self.routing_id = secrets.token_hex(8).encode()
        self._own_context = context is None
        self._context = context or new_context()
        self._dealer = Socket(self._context, zmq.DEALER)
        self._monitor = Socket(self._context, zmq.PAIR)
        self._heard: list[int] = []
        self._target = ""
        self._connected = False
        raw = self._dealer.raw
        set_common_options(raw, heartbeat_timeout_s)
        raw.setsockopt(zmq.ROUTING_ID, self.routing_id)
        raw.setsockopt(zmq.IMMEDIATE, 1)
        raw.setsockopt(zmq.CONNECT_TIMEOUT, 10_000)
        raw.setsockopt(zmq.RECONNECT_IVL, 100)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if keys is not None:
            raw.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
        monitor = f"inproc://agent-monitor-{self.routing_id.decode()}"
        raw.monitor(monitor, _EVENTS)
        self._monitor.raw.setsockopt(zmq.RCVHWM, 0)  # libzmq waits for room in this queue
        self._monitor.raw.connect(monitor)

    # ---- life ----

    async def connect(self, address: str) -> None:
        """Connect to `tcp://host:port`, and leave the controller of an earlier call.

        Returns at once; `Connected` tells.
        """
        host, port = split_address(address)
        target = tcp_address(await resolve(host), port)
        if self._target:
            with contextlib.suppress(zmq.ZMQError):
                self._dealer.raw.disconnect(self._target)
        self._target = target
        self._dealer.raw.connect(target)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen to the monitor until cancelled; then close everything."""
        try:
            task_status.started()
            while True:
                await self._monitor.readable()
                if self._hear():
                    self._dealer.wake()
        finally:
            await self.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["AgentSocket"]:
        """Run in the background, close."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()

    async def close(self) -> None:
        if not self._dealer.closed:
            self._dealer.raw.disable_monitor()
        self._monitor.close()
        self._dealer.close()
        if self._own_context:
            await end_context(self._context)

    # ---- messages ----

    async def recv_many(self) -> list[AgentEvent]:
        """What happened, oldest first, at least one event. One task at a time."""
        await trio.lowlevel.checkpoint()
        while True:
            batch = self._collect()
            if batch:
                return batch
            if not self._heard:
                await self._dealer.readable()

    def send(self, frame: bytes) -> bool:
        """True: handed to libzmq. False: no connection, or its queue is full."""
        return self._dealer.send_nowait((frame,))

    # ---- how ----

    def _hear(self) -> int:
        messages = self._monitor.recv_nowait(1 << 20)
        self._heard.extend(parse_monitor_event(message).kind for message in messages)
        return len(messages)

    def _collect(self) -> list[AgentEvent]:
        """Frames are taken first: when the monitor tells of a connection's end, all that came by it is there."""
        self._hear()
        heard = len(self._heard)
        messages = self._dealer.recv_nowait(BATCH)
        batch: list[AgentEvent] = [Received(b"", message[0]) for message in messages if len(message) == 1]
        if len(messages) < BATCH:
            for kind in self._heard[:heard]:
                batch.extend(self._event(kind))
            del self._heard[:heard]
        return batch

    def _event(self, kind: int) -> list[AgentEvent]:
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            before: list[AgentEvent] = [Disconnected(b"")] if self._connected else []
            self._connected = True
            return [*before, Connected()]
        if kind == zmq.EVENT_DISCONNECTED:
            was_connected, self._connected = self._connected, False
            return [Disconnected(b"")] if was_connected else []
        return [HandshakeFailed(_FAILURES[kind])]
