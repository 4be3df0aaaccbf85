"""What the controller's and the agents' sockets have in common: events, options, addresses, errors.

* Either side learns of a dead peer process from its closed connection, within milliseconds; of a dead or unreachable
  machine from ZMTP heartbeats, `heartbeat_timeout` plus one interval after the last sign. These heartbeats are answered
  by libzmq's own thread: they prove a machine and a process, not that anything in it makes progress.
* Nothing lingers: closing never waits for a peer.
* A frame longer than MESSAGE_LIMIT (and what CURVE adds to it) is refused at its header, and its connection with it.
"""

import ipaddress
import socket
import struct
from typing import Any, NamedTuple

import trio
import zmq

from .codec import MESSAGE_LIMIT

QUEUE_LIMIT = 1000
"""Frames per peer and direction in libzmq's queues."""

RESOLVE_TIMEOUT_S = 4.0
TERM_TIMEOUT_S = 2.0


class WireError(Exception):
    """A socket cannot be set up; the text names the value, the rule and the fix."""


class Received(NamedTuple):
    """A frame. peer: the connection's routing id, random per agent process."""

    peer: bytes
    frame: bytes


class Connected(NamedTuple):
    """The peer is connected and has accepted our key."""


class Disconnected(NamedTuple):
    """The connection is gone: the peer closed it, died, or stayed silent.

    Every frame that came by it was delivered before.
    """

    peer: bytes


class HandshakeFailed(NamedTuple):
    """The peer was reached and did not accept us, or is no controller; the socket goes on trying."""

    reason: str


class MonitorEvent(NamedTuple):
    kind: int
    value: int


def parse_monitor_event(message: list[bytes]) -> MonitorEvent:
    return MonitorEvent(*struct.unpack("=Hi", message[0]))


def new_context() -> "zmq.Context[zmq.Socket[bytes]]":
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 16_384)  # the default, 1,023, is too few for hundreds of agents in one process
    return context


async def end_context(context: "zmq.Context[Any]") -> None:
    """Ends libzmq's threads.

    All sockets must be closed; a defect there must not hang the program's end, hence the deadline.
    """
    with trio.move_on_after(TERM_TIMEOUT_S, shield=True):
        await trio.to_thread.run_sync(context.term, abandon_on_cancel=True)


def set_common_options(raw: "zmq.Socket[bytes]", heartbeat_timeout_s: float) -> None:
    interval_s = min(heartbeat_timeout_s / 4, 5.0)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT + 256)  # CURVE counts its own bytes
    raw.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
    raw.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    raw.setsockopt(zmq.IPV6, 1)
    raw.setsockopt(zmq.HANDSHAKE_IVL, 30_000)  # a mass join of 10,000 agents takes seconds
    raw.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(interval_s * 1000)))
    raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(heartbeat_timeout_s * 1000)))


# ---- addresses ------------------------------------------------------------------------------------------------


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise WireError(f"address {address!r}: it must look like tcp://host:port, with a port from 1 to 65535")
    return host, int(port)


async def resolve(host: str) -> str:
    """The numeric address of `host`; a name server that does not answer is an error after RESOLVE_TIMEOUT_S."""
    if is_numeric(host):
        return host
    found: list[Any] = []
    with trio.move_on_after(RESOLVE_TIMEOUT_S) as scope:
        try:
            found = await trio.to_thread.run_sync(_look_up, host, abandon_on_cancel=True)
        except (OSError, UnicodeError) as error:
            raise WireError(
                f"host {host!r} cannot be resolved: {error}; give a name that this host knows, or a numeric address"
            ) from error
    if scope.cancelled_caught:
        raise WireError(
            f"host {host!r}: no answer from the name server in {RESOLVE_TIMEOUT_S:g} s; give a numeric address"
        )
    return found[0][4][0]


def _look_up(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def local_address(address: str) -> str:
    """The address of this host from which it reaches `address` (`tcp://host:port`). Nothing is sent."""
    host, port = split_address(address)
    return _source_towards(await resolve(host), port, address)


def host_address() -> str:
    """The address of this host that others most likely reach: the source of its default route, else loopback."""
    for beyond in ("192.0.2.1", "2001:db8::1"):  # documentation addresses: routed as any other, used by nobody
        try:
            return _source_towards(beyond, 9, beyond)
        except WireError:
            continue
    return "127.0.0.1"


def _source_towards(host: str, port: int, shown: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WireError(
            f"{shown} cannot be reached from this host: {error.strerror}; check the network and the address"
        ) from error
