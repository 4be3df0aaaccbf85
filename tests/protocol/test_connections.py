"""Which peer is gone, when the kernel reuses descriptors and libzmq's news are read late."""

import zmq
from hypothesis import given
from hypothesis import strategies as st

from perdure.protocol.connections import Connections
from perdure.protocol.wire import MonitorEvent


def accepted(descriptor: int) -> MonitorEvent:
    return MonitorEvent(int(zmq.EVENT_ACCEPTED), descriptor)


def disconnected(descriptor: int) -> MonitorEvent:
    return MonitorEvent(int(zmq.EVENT_DISCONNECTED), descriptor)


def test_an_end_is_told_once_and_names_the_peer() -> None:
    connections = Connections()
    connections.hear(accepted(7))
    connections.spoke(b"a", 7)
    connections.spoke(b"a", 7)
    connections.hear(disconnected(7))
    assert len(connections) == 1
    assert connections.take_ended(connections.ended) == [b"a"]
    assert (connections.take_ended(1), len(connections), connections.ended) == ([], 0, 0)


def test_a_late_end_of_an_earlier_connection_spares_the_descriptors_new_owner() -> None:
    connections = Connections()
    connections.hear(accepted(7))
    connections.hear(disconnected(7))
    connections.hear(accepted(7))
    connections.spoke(b"new", 7)
    assert connections.take_ended(connections.ended) == []
    assert connections.refusals == {"ended without a message": 1}
    connections.hear(disconnected(7))
    assert connections.take_ended(1) == [b"new"]


def test_a_peer_that_is_back_is_not_gone() -> None:
    connections = Connections()
    connections.hear(accepted(7))
    connections.spoke(b"a", 7)
    connections.hear(accepted(8))
    connections.spoke(b"a", 8)
    connections.hear(disconnected(7))
    assert connections.take_ended(1) == []
    connections.hear(disconnected(8))
    assert connections.take_ended(1) == [b"a"]


def test_a_replaced_connection_ends_without_a_word() -> None:
    connections = Connections()
    connections.hear(accepted(7))
    connections.spoke(b"a", 7)
    connections.hear(accepted(7))
    connections.spoke(b"b", 7)
    assert connections.take_ended(connections.ended) == [b"a"]
    assert len(connections) == 1


def test_a_first_message_read_after_the_end_still_gets_its_end() -> None:
    connections = Connections()
    connections.hear(accepted(7))
    connections.hear(disconnected(7))
    assert connections.take_ended(1) == []
    connections.spoke(b"a", 7)
    assert connections.take_ended(connections.ended) == [b"a"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=60))
def test_everybody_who_spoke_and_left_is_told_exactly_once(steps: list[tuple[int, bool, bool]]) -> None:
    """Peers come and go on four descriptors; the reader looks now and then."""
    connections = Connections()
    occupant: dict[int, bytes] = {}
    ended: list[bytes] = []
    told: list[bytes] = []
    for number, (descriptor, speaks, reader_takes) in enumerate(steps):
        if descriptor in occupant:
            connections.hear(disconnected(descriptor))
            peer = occupant.pop(descriptor)
            if peer:
                ended.append(peer)
        else:
            connections.hear(accepted(descriptor))
            occupant[descriptor] = b"%d" % number if speaks else b""
            if speaks:
                connections.spoke(occupant[descriptor], descriptor)
        if reader_takes:
            told += connections.take_ended(connections.ended)
    told += connections.take_ended(connections.ended)
    assert told == ended
    assert len(connections) == sum(1 for peer in occupant.values() if peer)
