"""The controller's and the agents' sockets over real TCP: joining, dying, returning, hostile and mistaken peers."""

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import zmq

from perdure.protocol import wire
from perdure.protocol.agent_socket import AgentEvent, AgentSocket
from perdure.protocol.controller_socket import ControllerEvent, ControllerSocket
from perdure.protocol.keys import JobKeys, new_keys
from perdure.protocol.socket import UnknownPeer
from perdure.protocol.wire import Connected, Disconnected, Received

KEYS = new_keys()
STRANGER = new_keys()

CHILD = """
import sys, trio
from perdure.protocol.agent_socket import AgentSocket
from perdure.protocol.keys import keys_from_environment
async def main():
    agent = AgentSocket(keys_from_environment({"PERDURE_KEYS": sys.argv[2]}), heartbeat_timeout_s=4)
    async with agent.running():
        await agent.connect(sys.argv[1])
        await agent.recv_many()
        agent.send(b"hello")
        await trio.sleep_forever()
trio.run(main)
"""


def run(test: Callable[[], Awaitable[None]], within_s: float = 20.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(within_s):
            await test()

    trio.run(bounded)


def a_controller(keys: JobKeys | None = KEYS, heartbeat_timeout_s: float = 4.0, **options: object) -> ControllerSocket:
    arguments: dict[str, object] = {"host": "127.0.0.1", "expected_agents": 10, **options}
    return ControllerSocket(keys, heartbeat_timeout_s=heartbeat_timeout_s, **arguments)  # type: ignore[arg-type]


def an_agent(keys: JobKeys | None = KEYS, heartbeat_timeout_s: float = 4.0) -> AgentSocket:
    return AgentSocket(keys, heartbeat_timeout_s=heartbeat_timeout_s)


async def a_process(controller: ControllerSocket) -> trio.Process:
    """An agent in a process of its own."""
    return await trio.lowlevel.open_process([sys.executable, "-c", CHILD, controller.address, KEYS.text()])


async def next_event(agent: AgentSocket) -> AgentEvent:
    """The one thing that happens next."""
    (event,) = await agent.recv_many()
    return event


async def until(controller: ControllerSocket, wanted: Callable[[ControllerEvent], bool]) -> ControllerEvent:
    while True:
        for event in await controller.events():
            if wanted(event):
                return event


async def join(controller: ControllerSocket, agent: AgentSocket) -> bytes:
    """Connect and say hello; returns the agent's peer name."""
    await agent.connect(controller.address)
    assert await next_event(agent) == Connected()
    assert agent.send(b"hello")
    event = await until(controller, lambda event: isinstance(event, Received))
    assert event == Received(agent.routing_id, b"hello")
    return event.peer


@pytest.mark.parametrize("keys", [KEYS, None])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_both_sides_talk_and_learn_of_the_end(keys: JobKeys | None, host: str) -> None:
    async def test() -> None:
        async with a_controller(keys, host=host).listening() as controller:
            assert wire.split_address(controller.address)[0] == host
            agent = an_agent(keys)
            assert agent.send(b"nowhere to go") is False
            async with agent.running():
                peer = await join(controller, agent)
                assert controller.peers == 1
                for number in range(2_000):
                    while not controller.send(peer, b"%d" % number):
                        await trio.lowlevel.checkpoint()
                received: list[AgentEvent] = []
                while len(received) < 2_000:
                    received.extend(await agent.recv_many())
                assert received == [Received(b"", b"%d" % number) for number in range(2_000)]
                assert agent.send(b"last words")
            events = await controller.events()
            while Disconnected(peer) not in events:
                events += await controller.events()
            assert events == [Received(peer, b"last words"), Disconnected(peer)]
            assert controller.peers == 0
            with pytest.raises(UnknownPeer):
                controller.send(peer, b"too late")
            assert not controller.refusals

    run(test)


def test_a_long_backlog_is_delivered_before_the_end_is_told() -> None:
    """More frames than one batch: the end must wait for the last of them."""

    async def test() -> None:
        async with a_controller().listening() as controller:
            agent = an_agent()
            async with agent.running():
                peer = await join(controller, agent)
                sent = 0
                while sent < 1_900:
                    sent += agent.send(b"%d" % sent)
                    await trio.lowlevel.checkpoint()
            received: list[ControllerEvent] = []
            while Disconnected(peer) not in received:
                received += await controller.events()
            assert received.pop() == Disconnected(peer)
            assert received == [Received(peer, b"%d" % number) for number in range(len(received))]
            assert len(received) > 900  # what libzmq had not yet sent when the agent closed is lost

    run(test)


def test_a_killed_process_is_noticed_in_milliseconds() -> None:
    async def test() -> None:
        async with a_controller().listening() as controller:
            child = await a_process(controller)
            try:
                hello = await until(controller, lambda event: isinstance(event, Received))
                assert child.returncode is None
                started = time.monotonic()
                child.send_signal(signal.SIGKILL)
                assert await controller.events() == [Disconnected(hello.peer)]
                assert time.monotonic() - started < 1.0
            finally:
                child.kill()
                with trio.CancelScope(shield=True):
                    await child.wait()

    run(test)


def test_a_frozen_process_is_noticed_by_heartbeat() -> None:
    async def test() -> None:
        async with a_controller(heartbeat_timeout_s=0.4).listening() as controller:
            child = await a_process(controller)
            try:
                hello = await until(controller, lambda event: isinstance(event, Received))
                with trio.move_on_after(1.0) as quiet:
                    await controller.events()
                assert quiet.cancelled_caught, "a healthy peer stays connected"
                child.send_signal(signal.SIGSTOP)
                started = time.monotonic()
                assert await controller.events() == [Disconnected(hello.peer)]
                assert 0.2 < time.monotonic() - started < 2.0
            finally:
                child.kill()
                with trio.CancelScope(shield=True):
                    await child.wait()

    run(test)


def test_an_agent_comes_back_to_a_controller_restarted_on_the_same_port() -> None:
    async def test() -> None:
        agent = an_agent()
        async with agent.running():
            port = 0
            for life in range(4):
                async with a_controller(port=port).listening() as controller:
                    port = wire.split_address(controller.address)[1]
                    if life == 0:
                        await agent.connect(controller.address)
                    assert await next_event(agent) == Connected()
                    assert agent.send(b"life %d" % life)
                    assert await controller.events() == [Received(agent.routing_id, b"life %d" % life)]
                    assert controller.send(agent.routing_id, b"welcome %d" % life)
                    assert await next_event(agent) == Received(b"", b"welcome %d" % life)
                assert await next_event(agent) == Disconnected(b"")
                assert agent.send(b"lost for ever") is False

    run(test)


def test_an_agent_moves_to_another_controller() -> None:
    async def test() -> None:
        async with a_controller().listening() as first, a_controller().listening() as second:
            agent = an_agent()
            async with agent.running():
                await join(first, agent)
                await agent.connect(second.address)
                events: list[AgentEvent] = []
                while Connected() not in events:
                    events.extend(await agent.recv_many())
                assert events == [Disconnected(b""), Connected()]
                assert await first.events() == [Disconnected(agent.routing_id)]
                assert agent.send(b"hello")
                assert await second.events() == [Received(agent.routing_id, b"hello")]
                with pytest.raises(UnknownPeer):
                    first.send(agent.routing_id, b"x")

    run(test)


def test_a_newer_connection_of_a_peer_takes_over() -> None:
    """After a network cut the old connection looks alive for a while; the new one must be heard at once."""

    async def test() -> None:
        async with a_controller().listening() as controller:
            old, new = an_agent(), an_agent()
            new.routing_id = old.routing_id
            new._dealer.raw.setsockopt(zmq.ROUTING_ID, old.routing_id)
            async with old.running(), new.running():
                await join(controller, old)
                peer = await join(controller, new)
                assert controller.send(peer, b"to the new one")
                assert await next_event(new) == Received(b"", b"to the new one")
            events = await controller.events()
            assert events == [Disconnected(peer)]

    run(test)


def test_a_thousand_short_lived_peers_are_each_told_once() -> None:
    """Descriptors are reused all the time; whoever said hello is reported gone exactly once, after its hello."""
    rounds, width = 25, 16

    async def test() -> None:
        heard: list[bytes] = []
        gone: list[bytes] = []
        async with a_controller(None).listening() as controller, trio.open_nursery() as nursery:
            finished = trio.Event()

            async def watch() -> None:
                while len(gone) < rounds * width:
                    for event in await controller.events():
                        if isinstance(event, Received):
                            heard.append(event.peer)
                            assert controller.send(event.peer, b"welcome")
                        else:
                            assert event.peer in heard
                            gone.append(event.peer)
                finished.set()

            async def live(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
                agent = AgentSocket(None, heartbeat_timeout_s=4, context=context)
                async with agent.running():
                    await agent.connect(controller.address)
                    assert await next_event(agent) == Connected()
                    assert agent.send(b"hello")
                    assert await next_event(agent) == Received(b"", b"welcome")

            nursery.start_soon(watch)
            context = wire.new_context()
            for _ in range(rounds):
                async with trio.open_nursery() as lives:
                    for _ in range(width):
                        lives.start_soon(live, context)
            await finished.wait()
            await wire.end_context(context)
        assert sorted(gone) == sorted(set(heard))

    run(test)


# ---- closing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["controller", "agent"])
def test_closing_is_quick_in_either_order_with_frames_under_way(first: str) -> None:
    async def test() -> None:
        controller, agent = a_controller(), an_agent()
        await controller.bind()
        async with trio.open_nursery() as nursery:
            scopes = {"controller": trio.CancelScope(), "agent": trio.CancelScope()}
            done = {"controller": trio.Event(), "agent": trio.Event()}

            async def serve(name: str, run: Callable[[], Awaitable[None]]) -> None:
                with scopes[name]:
                    await run()
                done[name].set()

            nursery.start_soon(serve, "controller", controller.run)
            nursery.start_soon(serve, "agent", agent.run)
            peer = await join(controller, agent)
            for _ in range(500):
                controller.send(peer, bytes(10_000))
                agent.send(bytes(10_000))
            second = "agent" if first == "controller" else "controller"
            for name in (first, second):
                started = time.monotonic()
                scopes[name].cancel()
                await done[name].wait()
                assert time.monotonic() - started < 1.0
            with pytest.raises(trio.ClosedResourceError):
                await controller.events()
            with pytest.raises(trio.ClosedResourceError):
                await agent.recv_many()

    run(test)


def test_an_agent_whose_controller_was_never_there_closes_quickly() -> None:
    async def test() -> None:
        for address in ("tcp://127.0.0.1:1", "tcp://192.0.2.77:9"):
            agent = an_agent()
            async with agent.running():
                await agent.connect(address)
                assert agent.send(b"anybody?") is False
                started = time.monotonic()
            assert time.monotonic() - started < 1.0

    run(test)


def test_nothing_is_left_open() -> None:
    async def test() -> None:
        async def once() -> None:
            async with a_controller().listening() as controller:
                agent = an_agent()
                async with agent.running():
                    await join(controller, agent)

        await once()
        before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        for _ in range(5):
            await once()
        assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before

    run(test)
