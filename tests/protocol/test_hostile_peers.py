"""Hostile and mistaken peers on the controller's port: refused and counted, nobody else disturbed."""

import os
import pickle
import resource
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
import trio

from perdure.protocol import wire
from perdure.protocol.agent_socket import AgentEvent, AgentSocket
from perdure.protocol.codec import MESSAGE_LIMIT
from perdure.protocol.controller_socket import ControllerSocket
from perdure.protocol.keys import JobKeys, new_keys
from perdure.protocol.wire import Connected, Disconnected, HandshakeFailed, Received

KEYS = new_keys()
STRANGER = new_keys()


def run(test: Callable[[], Awaitable[None]], within_s: float = 20.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(within_s):
            await test()

    trio.run(bounded)


def a_controller(keys: JobKeys | None = KEYS) -> ControllerSocket:
    return ControllerSocket(keys, host="127.0.0.1", heartbeat_timeout_s=4, expected_agents=10)


def an_agent(keys: JobKeys | None = KEYS) -> AgentSocket:
    return AgentSocket(keys, heartbeat_timeout_s=4)


async def next_event(agent: AgentSocket) -> AgentEvent:
    """The one thing that happens next."""
    (event,) = await agent.recv_many()
    return event


async def join(controller: ControllerSocket, agent: AgentSocket) -> bytes:
    """Connect and say hello; returns the agent's peer name."""
    await agent.connect(controller.address)
    assert await next_event(agent) == Connected()
    assert agent.send(b"hello")
    assert await controller.events() == [Received(agent.routing_id, b"hello")]
    return agent.routing_id


async def refusals(controller: ControllerSocket, count: int) -> dict[str, int]:
    """Let the controller work until so many refusals were counted."""
    while controller.refusals.total() < count:
        with trio.move_on_after(0.01):
            await controller.events()
    return dict(controller.refusals)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)

HOSTILE = {
    "garbage": os.urandom(512),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": pickle.dumps({"stop": True}) * 20,
    "zeros": bytes(500),
    "plain greeting and 400 MB header": GREETING + b"\x02" + struct.pack(">Q", 400 << 20),
    "half a greeting": GREETING[:11],
    "nothing": b"",
}


async def attack(controller: ControllerSocket, data: bytes) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", wire.split_address(controller.address)[1])
    async with stream:
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            pass  # being cut while sending is what should happen


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("keys", [KEYS, None])
def test_foreign_bytes_are_refused_and_counted_and_disturb_nobody(name: str, keys: JobKeys | None) -> None:
    async def test() -> None:
        async with a_controller(keys).listening() as controller:
            agent = an_agent(keys)
            async with agent.running():
                peer = await join(controller, agent)
                for _ in range(3):
                    await attack(controller, HOSTILE[name])
                assert sum((await refusals(controller, 3)).values()) >= 3
                assert controller.send(peer, b"still here?")
                assert await next_event(agent) == Received(b"", b"still here?")
                assert agent.send(b"yes")
                assert await controller.events() == [Received(peer, b"yes")]

    run(test)


def test_a_frame_too_long_is_cut_at_its_header() -> None:
    """Even from one who holds the keys; memory does not grow by what the header promises."""

    async def test() -> None:
        async with a_controller(None).listening() as controller:
            stream = await trio.open_tcp_stream("127.0.0.1", wire.split_address(controller.address)[1])
            async with stream:
                ready = (
                    b"\x05READY\x0bSocket-Type"
                    + struct.pack(">I", 6)
                    + b"DEALER\x08Identity"
                    + struct.pack(">I", 1)
                    + b"x"
                )
                await stream.send_all(GREETING + b"\x04" + bytes([len(ready)]) + ready)
                answer = b""
                while b"READY" not in answer:
                    answer += await stream.receive_some()
                await stream.send_all(b"\x00\x05hello")
                assert await controller.events() == [Received(b"x", b"hello")]
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                await stream.send_all(b"\x02" + struct.pack(">Q", 400 << 20))
                assert await controller.events() == [Disconnected(b"x")]
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000

    run(test)


def test_the_longest_frame_arrives_and_many_frames_in_one_message_are_refused() -> None:
    async def test() -> None:
        async with a_controller().listening() as controller:
            agent = an_agent()
            async with agent.running():
                peer = await join(controller, agent)
                assert agent.send(bytes(MESSAGE_LIMIT))
                assert await controller.events() == [Received(peer, bytes(MESSAGE_LIMIT))]
                assert agent._dealer.send_nowait([b"two", b"frames"])
                assert agent.send(b"one")
                assert await controller.events() == [Received(peer, b"one")]
                assert controller.refusals == {"not one frame": 1}

    run(test)


@pytest.mark.parametrize(
    ("keys", "reasons"),
    [
        (None, {"invalid handshake", "left during the handshake"}),
        (
            JobKeys(KEYS.server_public, KEYS.server_secret, STRANGER.client_public, STRANGER.client_secret),
            {"key refused"},
        ),
        (STRANGER, {"invalid handshake", "left during the handshake"}),
    ],
    ids=["plain text", "another client key", "the keys of another job"],
)
def test_a_peer_with_other_keys_never_says_a_word(keys: JobKeys | None, reasons: set[str]) -> None:
    async def test() -> None:
        async with a_controller().listening() as controller:
            agent = an_agent(keys)
            async with agent.running():
                await agent.connect(controller.address)
                assert isinstance(await next_event(agent), HandshakeFailed)
                assert agent.send(b"let me in") is False
                counted = await refusals(controller, 1)
                assert counted
                assert set(counted) <= reasons
                assert controller.peers == 0

    run(test)


def test_silent_connections_do_not_keep_agents_out() -> None:
    async def test() -> None:
        async with a_controller().listening() as controller:
            address = ("127.0.0.1", wire.split_address(controller.address)[1])
            silent = [socket.create_connection(address) for _ in range(200)]
            try:
                agent = an_agent()
                async with agent.running():
                    await join(controller, agent)
            finally:
                for connection in silent:
                    connection.close()

    run(test)
