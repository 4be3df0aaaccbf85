"""What a trainer and its writer process say to each other, and how it is put on their socket.

The socket is of SOCK_SEQPACKET: one packet is one message, whole or not at all, and each side learns at once when the
other is gone. A packet is small. A message that is not (a layout of thousands of tensors, large Python values) goes in
a memfd that is passed with a packet, as the images are: so sending never waits for a reader, who may hang on a frozen
disk.

Times are of CLOCK_MONOTONIC, which both processes share.
"""

import os
import socket
from typing import Any, TypeVar, cast

import msgspec

from ..protocol.checkpoints import SaveId, Tier
from .formats import Item

PACKET_LIMIT = 32 << 10
"""Bytes of the largest packet; longer messages go in a memfd."""
MESSAGE_LIMIT = 1 << 30
"""Bytes of the largest message."""
WHY_LIMIT = 4_000
"""Characters of a text that says why."""

T = TypeVar("T")

Value = tuple[str, tuple[str | int, ...], bytes]
"""A value that is no tensor: its flattened name, the keys that lead to it, and torch.save's bytes of it."""


class BadPacket(ValueError):
    """A message that cannot be sent, or bytes that are none."""


# ---- to the writer --------------------------------------------------------------------------------------------


class UseLayout(msgspec.Struct, frozen=True, tag="layout"):
    """What an image holds. Sent before the first save that names `layout`; the newest LAYOUTS are remembered.

    items: of file 0, the rank's share first. share: how many of them are its share. share_bytes: the image's part that
    holds these. size: of the image's part that holds all. held, writers: see `Sidecar`.
    """

    layout: int
    items: tuple[Item, ...]
    share: int
    share_bytes: int
    size: int
    held: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()


class UseImage(msgspec.Struct, frozen=True, tag="image"):
    """From now on `image` is the memory behind the descriptor that comes with this."""

    image: int
    size: int


class Write(msgspec.Struct, frozen=True, tag="write", omit_defaults=True):
    """Write what `image` and `values` hold now. The image is not touched until it is released.

    began: when `save` was called. deadline_s: from then on, for all tiers. values: the rank's share first, so many as
    value_share says. local_dir, durable_dir: the folders that hold the saves of each tier; at least one is given.
    """

    save: SaveId
    rank: int
    world_size: int
    layout: int
    image: int
    began: float
    deadline_s: float
    values: tuple[Value, ...] = ()
    value_share: int = 0
    local_dir: str | None = None
    durable_dir: str | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """In the order in which they are written."""
        given = ((Tier.LOCAL, self.local_dir), (Tier.DURABLE, self.durable_dir))
        return tuple(tier for tier, folder in given if folder is not None)


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """Drop every save that is not of this epoch and round: what is unfinished of it is removed."""

    epoch: int
    round: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Drop this save, if it is not done: what is unfinished of it is removed, and its image is released."""

    save: SaveId


class Large(msgspec.Struct, frozen=True, tag="large"):
    """The message is in the memfd that comes with this."""

    size: int


# ---- from the writer ------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process runs."""


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The shard is durable on `tier`. nbytes: of its data. digest: of its sidecar. seconds: since `Write.began`."""

    save: SaveId
    tier: Tier
    nbytes: int
    digest: bytes
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The shard is not on `tier` and nothing of it is left there, unless `why` says so."""

    save: SaveId
    tier: Tier
    why: str


class Damaged(msgspec.Struct, frozen=True, tag="damaged"):
    """The shard was written on `tier` and cannot be read back."""

    save: SaveId
    tier: Tier
    why: str


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Nobody reads the image of `save` for it any more."""

    save: SaveId
    image: int


class Remark(msgspec.Struct, frozen=True, tag="remark"):
    """A line for the log."""

    level: str
    text: str


ToWriter = UseLayout | UseImage | Write | Abandon | Drop | Large
FromWriter = Ready | Written | Failed | Damaged | Released | Remark

LAYOUTS = 4
"""Layouts that each side remembers."""

_encoder = msgspec.msgpack.Encoder()
_to_writer: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(cast(Any, ToWriter))
_from_writer: msgspec.msgpack.Decoder[FromWriter] = msgspec.msgpack.Decoder(cast(Any, FromWriter))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def clip(why: str) -> str:
    return why if len(why) <= WHY_LIMIT else f"{why[: WHY_LIMIT // 2]} [...] {why[-WHY_LIMIT // 2 :]}"


def encode(message: ToWriter | FromWriter) -> bytes:
    data = _encoder.encode(message)
    if len(data) > MESSAGE_LIMIT:
        raise BadPacket(
            f"a {type(message).__name__} of {len(data)} bytes, at most {MESSAGE_LIMIT} are allowed: "
            "keep large arrays in the state as tensors, not as Python values"
        )
    return data


def send(end: socket.socket, data: bytes, descriptor: int = -1) -> None:
    """Send an encoded message. Raises BlockingIOError on a non-blocking socket whose peer does not read."""
    if len(data) <= PACKET_LIMIT:
        _send_packet(end, data, descriptor)
        return
    memory = os.memfd_create("perdure-message", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
        _send_packet(end, _encoder.encode(Large(len(data))), memory)
    finally:
        os.close(memory)


def _send_packet(end: socket.socket, packet: bytes, descriptor: int) -> None:
    if descriptor < 0:
        end.send(packet)
    else:
        socket.send_fds(end, [packet], [descriptor])


def receive_order(end: socket.socket) -> tuple[ToWriter, int] | None:
    """The next message to the writer, with its descriptor or -1; None at the end. The caller closes the descriptor."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(end, PACKET_LIMIT, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:  # it died with something of ours unread
        return None
    if not packet:
        return None
    descriptor = descriptors[0] if descriptors else -1
    order = _decode(_to_writer, packet)
    if not isinstance(order, Large):
        return order, descriptor
    try:
        return _decode(_to_writer, _read(descriptor, order.size)), -1
    finally:
        os.close(descriptor)


def receive_reply(end: socket.socket) -> FromWriter | None:
    """The next message from the writer; None at the end. Raises BlockingIOError where there is none yet."""
    packet = end.recv(PACKET_LIMIT)
    return _decode(_from_writer, packet) if packet else None


def _read(descriptor: int, size: int) -> bytes:
    if not 0 < size <= MESSAGE_LIMIT:
        raise BadPacket(f"a message of {size} bytes is announced, from 1 to {MESSAGE_LIMIT} are allowed")
    parts: list[bytes] = []
    at = 0
    while at < size:
        part = os.pread(descriptor, size - at, at)
        if not part:
            raise BadPacket(f"a message of {size} bytes is announced, {at} came")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise BadPacket(f"{len(data)} bytes that are no message: {error}") from error
