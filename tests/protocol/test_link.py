"""Delivery under loss, duplication and reordering, in simulated time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.protocol.link import BACKOFF, LatestQueue, LinkFull, ReceiveWindow, ReliableQueue

Frame = tuple[int, bytes]


class Network:
    """Carries frames and acknowledgements; until `calm` it loses, doubles and reorders them."""

    def __init__(self, seed: int, loss: float) -> None:
        self._random = random.Random(seed)
        self._loss = loss
        self.calm = False

    def carry(self, frames: list[Frame]) -> list[Frame]:
        if self.calm:
            return frames
        arrived: list[Frame] = []
        for frame in frames:
            copies = 0 if self._random.random() < self._loss else self._random.choice((1, 1, 2))
            arrived.extend([frame] * copies)
        if self._random.random() < 0.5:
            self._random.shuffle(arrived)
        return arrived


def deliver(queue: ReliableQueue | LatestQueue, window: ReceiveWindow, network: Network, now: float) -> list[bytes]:
    """One exchange: what is due goes out, what is new is taken, the acknowledgement travels back."""
    taken = [body for seq, body in network.carry(queue.due(now)) if window.accept(seq)]
    for seq, _ in network.carry([(window.acked, b"")]):
        queue.acknowledge(seq)
    return taken


@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from((0.0, 0.2, 0.6, 0.95)),
    pushes=st.lists(st.integers(0, 4), max_size=40),
)
def test_every_body_arrives_once_and_in_order(seed: int, loss: float, pushes: list[int]) -> None:
    queue, window, network = ReliableQueue(resend_after_s=1.0), ReceiveWindow(ordered=True), Network(seed, loss)
    sent: list[bytes] = []
    taken: list[bytes] = []
    now = 100.0
    for count in pushes:
        for _ in range(count):
            sent.append(b"%d" % len(sent))
            queue.push(sent[-1], now)
        taken += deliver(queue, window, network, now)
        now += 0.4
    network.calm = True
    while (deadline := queue.deadline()) is not None:
        assert deadline <= now + BACKOFF
        now = max(now, deadline)
        taken += deliver(queue, window, network, now)
    assert taken == sent
    assert len(queue) == 0


@given(seed=st.integers(0, 2**32), loss=st.sampled_from((0.2, 0.6, 0.95)), pushes=st.lists(st.booleans(), max_size=40))
def test_the_newest_body_arrives_and_none_goes_back(seed: int, loss: float, pushes: list[bool]) -> None:
    queue, window, network = LatestQueue(resend_after_s=1.0), ReceiveWindow(ordered=False), Network(seed, loss)
    pushed = 0
    taken: list[bytes] = []
    now = 0.0
    for push in pushes:
        if push:
            pushed += 1
            queue.push(b"%d" % pushed, now)
        taken += deliver(queue, window, network, now)
        now += 0.4
    network.calm = True
    while (deadline := queue.deadline()) is not None:
        now = max(now, deadline)
        taken += deliver(queue, window, network, now)
    numbers = [int(body) for body in taken]
    assert numbers == sorted(set(numbers))
    assert pushed == (numbers[-1] if numbers else 0)


def test_nothing_is_resent_early_and_the_wait_grows_until_there_is_progress() -> None:
    queue = ReliableQueue(resend_after_s=1.0)
    assert queue.deadline() is None
    queue.push(b"a", 10.0)
    assert queue.deadline() == 10.0
    assert queue.due(10.0) == [(1, b"a")]
    queue.push(b"b", 10.5)
    assert queue.due(10.5) == [(2, b"b")]
    assert queue.due(10.9) == []
    waits: list[float] = []
    now = 10.0
    for _ in range(6):
        deadline = queue.deadline()
        assert deadline is not None
        waits.append(deadline - now)
        now = deadline
        assert queue.due(now) == [(1, b"a"), (2, b"b")]
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    queue.acknowledge(1)
    queue.due(now + 8.0)
    assert queue.deadline() == now + 10.0


@pytest.mark.parametrize("seq", [0, -1, 3, 10**9])
def test_an_acknowledgement_of_what_was_not_sent_changes_nothing(seq: int) -> None:
    queue = ReliableQueue(resend_after_s=1.0)
    queue.push(b"a", 0.0)
    queue.push(b"b", 0.0)
    queue.due(0.0)
    queue.push(b"never sent", 0.0)
    queue.acknowledge(seq)
    assert len(queue) == 3


def test_a_new_session_hands_back_what_is_unacknowledged() -> None:
    queue = ReliableQueue(resend_after_s=1.0)
    for body in (b"a", b"b", b"c"):
        queue.push(body, 0.0)
    queue.due(0.0)
    queue.acknowledge(1)
    queue.push(b"d", 0.0)
    assert queue.reset() == [b"b", b"c", b"d"]
    assert (len(queue), queue.deadline(), queue.reset()) == (0, None, [])
    assert queue.push(b"e", 1.0) == 1

    latest = LatestQueue(resend_after_s=1.0)
    latest.push(b"old", 0.0)
    latest.push(b"new", 0.0)
    assert latest.reset() == [b"new"]
    assert (latest.deadline(), latest.reset(), latest.push(b"x", 0.0)) == (None, [], 1)


def test_an_acknowledgement_of_an_older_state_does_not_settle_the_newest() -> None:
    queue = LatestQueue(resend_after_s=1.0)
    queue.push(b"old", 0.0)
    queue.due(0.0)
    queue.push(b"new", 0.1)
    queue.acknowledge(1)
    queue.acknowledge(2)  # not sent yet: a lie
    assert queue.due(0.2) == [(2, b"new")]
    queue.acknowledge(2)
    assert queue.deadline() is None


def test_the_limit_is_an_error_and_keeps_what_is_there() -> None:
    queue = ReliableQueue(resend_after_s=1.0, limit=2)
    queue.push(b"a", 0.0)
    queue.push(b"b", 0.0)
    with pytest.raises(LinkFull, match="2 messages"):
        queue.push(b"c", 0.0)
    assert queue.due(0.0) == [(1, b"a"), (2, b"b")]


def test_windows() -> None:
    ordered, latest = ReceiveWindow(ordered=True), ReceiveWindow(ordered=False)
    assert [ordered.accept(seq) for seq in (1, 3, 2, 2, 3, 0)] == [True, False, True, False, True, False]
    assert [latest.accept(seq) for seq in (1, 5, 3, 5, 6, 0)] == [True, True, False, False, True, False]
    assert (ordered.acked, ordered.refused, latest.acked) == (3, 3, 6)
    ordered.reset()
    assert ordered.accept(1)
