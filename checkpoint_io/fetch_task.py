"""What a restoring rank and its fetching process (`python -m perdure.checkpoint_io.fetch`) say to each other.

One message is one packet of a SOCK_SEQPACKET socket, which is the process's standard input. By itself, since ranks do
not load ZeroMQ.
"""

import msgspec

from ..protocol.checkpoints import SaveId

PACKET_LIMIT = 1 << 16
"""Bytes; the paths in a task are what may be long."""
ERROR_LIMIT = 1 << 13
"""Characters."""


class BadPacket(Exception):
    """A message that is too long, or that is none. The text says which."""


class Task(msgspec.Struct, frozen=True):
    """Bring this shard here. keys: where the job's keys.json is, or would be; empty if the job runs in plain text.
    into: this node's folder of the local tier. digest: of the sidecar, if it is known."""

    address: str
    save: SaveId
    rank: int
    into: str
    deadline_s: float
    keys: str
    digest: bytes = b""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a task. error: empty if the shard is there, with `nbytes`."""

    nbytes: int = 0
    error: str = ""


def encode(message: Task | Answer) -> bytes:
    """Raises BadPacket."""
    data = msgspec.msgpack.encode(message)
    if len(data) > PACKET_LIMIT:
        raise BadPacket(f"a {type(message).__name__} of {len(data)} bytes, at most {PACKET_LIMIT} are allowed")
    return data


def decode_task(packet: bytes) -> Task:
    """Raises BadPacket."""
    try:
        return msgspec.msgpack.decode(packet, type=Task)
    except msgspec.DecodeError as error:
        raise BadPacket(f"{len(packet)} bytes that are no task: {error}") from None


def decode_answer(packet: bytes) -> Answer:
    """Raises BadPacket."""
    try:
        return msgspec.msgpack.decode(packet, type=Answer)
    except msgspec.DecodeError as error:
        raise BadPacket(f"{len(packet)} bytes that are no answer: {error}") from None
