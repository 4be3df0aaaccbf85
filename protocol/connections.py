"""Which peer is behind which connection. No IO: it is told what a ROUTER received and what its monitor said.

The monitor names connections by file descriptor, messages carry both descriptor and peer, and the kernel reuses
descriptors. So a connection is (descriptor, how many have been accepted on it before). libzmq's order makes this exact:
it reports an acceptance before the connection's first message, and a message before the connection's end. Therefore

* what the monitor says is read after the messages were taken, before they are assigned to connections;
* an end is reported only after a later look at the messages found none.

One case is undecidable: a peer whose first message is read after its connection ended *and* its descriptor was reused.
It is taken for the new connection's, and its end is noticed when that connection's own peer speaks or leaves, or when
something is sent to it.
"""

from collections import Counter

import zmq

from .wire import MonitorEvent

_HANDSHAKE_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "key refused",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "invalid handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "left during the handshake",
}
_NOT_ACCEPTED = "could not be accepted"
_SILENT = "ended without a message"

EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED) | sum(_HANDSHAKE_FAILURES)

_Connection = tuple[int, int]


class Connections:
    """The connections of one ROUTER."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._silent = 0
        self._accepted: Counter[int] = Counter()
        self._open: set[int] = set()
        self._peer_of: dict[_Connection, bytes] = {}
        self._connection_of: dict[bytes, _Connection] = {}
        self._ended: dict[_Connection, None] = {}
        self._displaced: list[bytes] = []

    def __len__(self) -> int:
        """Peers that have spoken and are connected."""
        return len(self._connection_of)

    @property
    def refusals(self) -> Counter[str]:
        """Connections that were turned away, by reason. What does not speak ZMTP at all just ends without a message."""
        handshakes = sum(self._failures[reason] for reason in _HANDSHAKE_FAILURES.values())
        return self._failures + Counter({_SILENT: self._silent - handshakes})  # the sum drops what is not positive

    @property
    def ended(self) -> int:
        """How many ends have been heard of and not yet taken."""
        return len(self._ended) + len(self._displaced)

    def hear(self, event: MonitorEvent) -> None:
        """The monitor said this."""
        if event.kind in _HANDSHAKE_FAILURES:
            self._failures[_HANDSHAKE_FAILURES[event.kind]] += 1
        elif event.kind == zmq.EVENT_ACCEPT_FAILED:
            self._failures[_NOT_ACCEPTED] += 1
        elif event.kind == zmq.EVENT_DISCONNECTED:
            self._end(event.value)
        elif event.kind == zmq.EVENT_ACCEPTED:
            self._end(event.value)  # when a newer connection of a peer replaces an older one, libzmq ends that silently
            self._accepted[event.value] += 1
            self._open.add(event.value)

    def spoke(self, peer: bytes, descriptor: int) -> None:
        """A message of `peer` came by `descriptor`."""
        connection = descriptor, self._accepted[descriptor]
        if self._connection_of.get(peer) == connection:
            return
        other = self._peer_of.get(connection)
        if other is not None and self._connection_of.get(other) == connection:
            del self._connection_of[other]
            self._displaced.append(other)
        self._peer_of[connection] = peer
        self._connection_of[peer] = connection
        if descriptor not in self._open:
            self._ended[connection] = None

    def take_ended(self, count: int) -> list[bytes]:
        """The peers behind the first `count` ends that were heard of.

        A peer that is already back by a newer connection is not among them.
        """
        gone = self._displaced[:count]
        del self._displaced[:count]
        for connection in list(self._ended)[: count - len(gone)]:
            del self._ended[connection]
            peer = self._peer_of.pop(connection, None)
            if peer is None:
                self._silent += 1
            elif self._connection_of.get(peer) == connection:
                del self._connection_of[peer]
                gone.append(peer)
        return gone

    def _end(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            self._ended[descriptor, self._accepted[descriptor]] = None
