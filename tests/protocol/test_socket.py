"""The trio ZeroMQ socket under random cancellation, concurrency and closing: no message lost, doubled or forgotten."""

import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from perdure.protocol.socket import Socket, UnknownPeer


class Room:
    """A context and its sockets."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self._sockets.append(Socket(self.context, kind))
        return self._sockets[-1]

    def close(self) -> None:
        for socket in self._sockets:
            socket.raw.close(0)
        self.context.term()


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.close()


def run(test: Callable[[], Awaitable[None]], within_s: float = 20.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(within_s):
            await test()

    trio.run(bounded)


def a_pair(room: Room, transport: str, directory: Path, limit: int) -> tuple[Socket, Socket]:
    bound, connected = room.socket(zmq.DEALER), room.socket(zmq.DEALER)
    for side in (bound, connected):
        side.raw.setsockopt(zmq.SNDHWM, limit)
        side.raw.setsockopt(zmq.RCVHWM, limit)
    name = secrets.token_hex(4)
    bound.raw.bind(
        {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{directory}/{name}", "inproc": f"inproc://{name}"}[transport]
    )
    connected.raw.connect(bound.raw.getsockopt_string(zmq.LAST_ENDPOINT))
    return bound, connected


class Endpoint:
    """One end of a duplex stream: sends 0..count-1 and expects the same; its operations are cancelled at random."""

    def __init__(self, socket: Socket, count: int, seed: int) -> None:
        self.socket = socket
        self.count = count
        self.random = random.Random(seed)
        self.cancelled = 0

    def impatience(self) -> trio.CancelScope:
        """One operation in twenty is cancelled: before it starts, at once, or a little later."""
        if self.random.random() > 0.05:
            return trio.CancelScope()
        return trio.CancelScope(deadline=trio.current_time() + self.random.choice((-1.0, 0.0, 0.0001)))

    async def send(self) -> None:
        number = 0
        while number < self.count:
            with self.impatience() as scope:
                await self.socket.send([b"%d" % number])
                number += 1
            self.cancelled += scope.cancelled_caught

    async def receive(self) -> None:
        expected = 0
        while expected < self.count:
            messages: list[list[bytes]] = []
            with self.impatience() as scope:
                if self.random.random() < 0.1:
                    messages = await self.socket.recv_many(self.random.choice((1, 7, 512)))
                else:
                    messages = [await self.socket.recv()]
            self.cancelled += scope.cancelled_caught
            for message in messages:
                assert message == [b"%d" % expected]
                expected += 1


async def duplex(pair: tuple[Socket, Socket], count: int) -> int:
    ends = [Endpoint(socket, count, seed) for seed, socket in enumerate(pair)]
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.send)
            nursery.start_soon(end.receive)
    for socket in pair:
        assert socket.recv_nowait() == []
    return sum(end.cancelled for end in ends)


@pytest.mark.parametrize(
    ("transport", "limit", "count"),
    [("ipc", 5, 20_000), ("tcp", 5, 20_000), ("inproc", 5, 5_000), ("tcp", 1000, 5_000)],
)
def test_duplex_with_random_cancellation_loses_nothing(
    room: Room, tmp_path: Path, transport: str, limit: int, count: int
) -> None:
    """`count` messages each way; with a queue of five both sides wait for room all the time."""

    async def test() -> None:
        assert await duplex(a_pair(room, transport, tmp_path, limit), count) > count // 50

    run(test)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("transport", "limit"), [("ipc", 50), ("tcp", 50)])
def test_a_million_messages(room: Room, tmp_path: Path, transport: str, limit: int) -> None:
    async def test() -> None:
        assert await duplex(a_pair(room, transport, tmp_path, limit), 500_000) > 10_000

    run(test, within_s=550.0)


def test_many_tasks_share_one_router(room: Room) -> None:
    """Three receivers, cancelled at random, and eight peers: each message is taken by exactly one."""
    count, peers = 1_000, 8

    async def test() -> None:
        router = room.socket(zmq.ROUTER)
        router.raw.bind("tcp://127.0.0.1:*")
        address = router.raw.getsockopt_string(zmq.LAST_ENDPOINT)
        taken: list[tuple[bytes, ...]] = []
        complete = trio.Event()
        chance = random.Random(1)

        async def receive() -> None:
            while True:
                with trio.move_on_after(0.0002 if chance.random() < 0.2 else float("inf")):
                    taken.extend(tuple(message) for message in await router.recv_many(chance.choice((1, 16))))
                if len(taken) >= count * peers:
                    complete.set()

        async def send(name: bytes) -> None:
            dealer = room.socket(zmq.DEALER)
            dealer.raw.setsockopt(zmq.ROUTING_ID, name)
            dealer.raw.connect(address)
            for number in range(count):
                await dealer.send([b"%d" % number])
            await complete.wait()
            dealer.close()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(receive)
            async with trio.open_nursery() as senders:
                for index in range(peers):
                    senders.start_soon(send, b"peer%d" % index)
            nursery.cancel_scope.cancel()
        expected = sorted((b"peer%d" % index, b"%d" % number) for index in range(peers) for number in range(count))
        assert sorted(taken) == expected

    run(test)


@pytest.mark.parametrize("transport", ["ipc", "inproc"])
def test_sending_does_not_swallow_the_wake_up_of_a_receiver(room: Room, tmp_path: Path, transport: str) -> None:
    """Bursts both ways, then silence: whatever was sent must have been delivered."""
    burst = 300
    near, far = a_pair(room, transport, tmp_path, 1000)

    async def echo() -> None:
        while True:
            for message in await far.recv_many():
                await far.send(message)

    async def collect(received: list[int]) -> None:
        while len(received) < burst:
            received.extend(int(message[0]) for message in await near.recv_many())

    async def exchange() -> None:
        received: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, received)
            for number in range(burst):
                await near.send([b"%d" % number])
        assert received == list(range(burst))

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            for _ in range(25):
                await exchange()
            nursery.cancel_scope.cancel()

    run(test)


def test_a_cancelled_leader_hands_over(room: Room) -> None:
    async def test() -> None:
        near, far = a_pair(room, "inproc", Path(), 10)
        received: list[list[bytes]] = []

        async def receive() -> None:
            received.append(await near.recv())

        async with trio.open_nursery() as nursery:
            leader = trio.CancelScope()

            async def lead(task_status: trio.TaskStatus[None]) -> None:
                task_status.started()
                with leader:
                    await receive()

            await nursery.start(lead)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(receive)
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            leader.cancel()
            await trio.testing.wait_all_tasks_blocked()
            await far.send([b"1"])
            await far.send([b"2"])
        assert sorted(received) == [[b"1"], [b"2"]]

    run(test)


def test_closing_wakes_everybody_and_lets_the_context_end(room: Room) -> None:
    async def test() -> None:
        near, far = a_pair(room, "tcp", Path(), 10)

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await near.recv()

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            near.close()
        near.close()
        for operation in (near.recv, near.readable, lambda: near.send([b"x"])):
            with pytest.raises(trio.ClosedResourceError):
                await operation()
        with pytest.raises(trio.ClosedResourceError):
            near.send_nowait([b"x"])
        with pytest.raises(trio.ClosedResourceError):
            near.recv_nowait()
        await far.send([b"to nobody"])
        far.close()
        await trio.to_thread.run_sync(room.context.term)

    run(test)


def test_wake_ends_readable_and_nothing_else(room: Room) -> None:
    async def test() -> None:
        near, far = a_pair(room, "inproc", Path(), 10)
        received: list[list[bytes]] = []

        async def receive() -> None:
            received.append(await near.recv())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.readable)
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            near.wake()
            await trio.testing.wait_all_tasks_blocked()
            assert received == []
            assert len(nursery.child_tasks) == 1
            await far.send([b"x"])
        assert received == [[b"x"]]

    run(test)


def test_every_wait_lets_other_tasks_run(room: Room) -> None:
    """Also when there is nothing to wait for, so that a flood of messages does not stop the program."""

    async def test() -> None:
        near, far = a_pair(room, "inproc", Path(), 10)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            await far.send([b"x"])
            for _ in range(20):
                await near.readable()
            assert turns > 10
            nursery.cancel_scope.cancel()

    run(test)


def test_a_router_says_what_became_of_a_message(room: Room) -> None:
    async def test() -> None:
        router, dealer = room.socket(zmq.ROUTER), room.socket(zmq.DEALER)
        router.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.raw.setsockopt(zmq.SNDHWM, 5)
        router.raw.bind("inproc://router")
        dealer.raw.setsockopt(zmq.ROUTING_ID, b"slow")
        dealer.raw.setsockopt(zmq.RCVHWM, 5)
        with pytest.raises(UnknownPeer):
            router.send_nowait([b"slow", b"x"])
        dealer.raw.connect("inproc://router")
        await dealer.send([b"hello"])
        await router.recv()
        sent = 0
        while router.send_nowait([b"slow", b"%d" % sent]):
            sent += 1
        assert 5 <= sent <= 10
        assert [int(message[0]) for message in await dealer.recv_many()] == list(range(sent))
        assert router.send_nowait([b"slow", b"again"])  # the room is seen at once
        with pytest.raises(LookupError):
            router.send_nowait([b"stranger", b"x"])
        with pytest.raises(TypeError, match="send_nowait"):
            await router.send([b"slow", b"x"])

    run(test)
