"""Messages as bytes (msgpack) and back, bounded and checked.

* Every frame between controller and agent is one `Envelope`; its body is a message that is encoded once, however many
  agents it goes to, and decoded only after the envelope's fencing has been looked at.
* A frame's length is checked before it is decoded, and decoders are typed: a small hostile frame cannot become a large
  object.
* Whatever is wrong with received bytes is one exception, `BadMessage`.
* Encoding does not fail on what a trainer managed to say: lone surrogates (a file name that is not UTF-8, an
  exception's text) are escaped, integers beyond 64 bits are clamped, texts that make a message too long are cut in the
  middle with a mark. NaN and infinities travel as they are. Telemetry must never break what it reports on.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from .faults import clip
from .messages import PROTOCOL_VERSION, FromAgent, FromController
from .rank_messages import RANK_MESSAGE_LIMIT, FromRank, ToRank

MESSAGE_LIMIT = 1 << 20
"""Bytes of the largest frame between controller and agent; sockets refuse longer ones at their header."""

_ENVELOPE_LIMIT = 1024
_BODY_LIMIT = MESSAGE_LIMIT - _ENVELOPE_LIMIT
_TEXT_LIMITS = (1 << 30, 8192, 2048, 512)
"""Characters that a text may have, from the first attempt at encoding to the last."""

_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1

T = TypeVar("T")


class BadMessage(ValueError):
    """Bytes that are no message of this protocol, or a message that cannot be made to fit."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every frame says besides its message.

    job, incarnation: the fence; a frame of another job or of an older controller is not obeyed.
    session: chosen by the agent at every connect, so that no sequence number is taken for one of an earlier connection.
    seq: this message's number in its session and direction, 0 for one that is not acknowledged. ack: the highest number
    received in order.
    """

    version: int
    job: str
    incarnation: int
    session: int
    seq: int
    ack: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(cast(Any, FromAgent))
_from_controller: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(cast(Any, FromController))
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(cast(Any, FromRank))
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(cast(Any, ToRank))


# ---- controller <-> agent -------------------------------------------------------------------------------------


def encode_body(message: FromAgent | FromController) -> bytes:
    return _encode(message, _BODY_LIMIT)


def pack(job: str, incarnation: int, session: int, seq: int, ack: int, body: bytes) -> bytes:
    """One frame around an encoded body."""
    frame = _encoder.encode(Envelope(PROTOCOL_VERSION, job, incarnation, session, seq, ack, msgspec.Raw(body)))
    if len(frame) > MESSAGE_LIMIT:
        raise BadMessage(
            f"the frame has {len(frame)} bytes, at most {MESSAGE_LIMIT} are allowed; "
            f"use a shorter job id (it has {len(job)} characters)"
        )
    return frame


def unpack(frame: bytes) -> Envelope:
    """The envelope of a received frame; its body is not looked at. A version other than ours is refused."""
    envelope = _decode(_envelopes, frame, MESSAGE_LIMIT)
    if envelope.version != PROTOCOL_VERSION:
        raise BadMessage(
            f"the peer speaks protocol version {envelope.version}, this side {PROTOCOL_VERSION}; "
            "install the same perdure on every host"
        )
    return envelope


def decode_from_agent(body: msgspec.Raw | bytes) -> FromAgent:
    return _decode(_from_agent, body, MESSAGE_LIMIT)


def decode_from_controller(body: msgspec.Raw | bytes) -> FromController:
    return _decode(_from_controller, body, MESSAGE_LIMIT)


# ---- agent <-> rank -------------------------------------------------------------------------------------------


def encode_rank(message: FromRank | ToRank) -> bytes:
    return _encode(message, RANK_MESSAGE_LIMIT)


def decode_from_rank(packet: bytes) -> FromRank:
    return _decode(_from_rank, packet, RANK_MESSAGE_LIMIT)


def decode_to_rank(packet: bytes) -> ToRank:
    return _decode(_to_rank, packet, RANK_MESSAGE_LIMIT)


# ---- how ------------------------------------------------------------------------------------------------------


def clean_text(text: str) -> str:
    """`text` as it can be encoded: lone surrogates, which UTF-8 cannot express, become their escapes (`\\udcff`)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encode(message: object, limit: int) -> bytes:
    length = _try_encode(message, limit)
    for text_limit in _TEXT_LIMITS:
        if isinstance(length, bytes):
            return length
        length = _try_encode(_mended(message, text_limit), limit)
    if isinstance(length, bytes):
        return length
    raise BadMessage(
        f"a {type(message).__name__} has {length} bytes, at most {limit} are allowed; "
        "it names too many slots: send it in parts"
    )


def _try_encode(message: object, limit: int) -> bytes | int:
    """The bytes, or the length that is too much, or 0 if some value cannot be encoded as it is."""
    try:
        data = _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return 0
    return data if len(data) <= limit else len(data)


def _mended(value: object, text_limit: int) -> object:
    """A copy in which every text and integer can be encoded, and no text is longer than `text_limit`."""
    if isinstance(value, str):
        return value if _is_enum(value) else clip(clean_text(value), text_limit)
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, _INT_MIN), _INT_MAX)
    if isinstance(value, msgspec.Struct):
        mended = {name: _mended(getattr(value, name), text_limit) for name in value.__struct_fields__}
        return type(value)(**mended)
    return _mended_container(value, text_limit)


def _mended_container(value: object, text_limit: int) -> object:
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        return {_mended(key, text_limit): _mended(item, text_limit) for key, item in items.items()}
    if isinstance(value, tuple | list):
        return tuple(_mended(item, text_limit) for item in cast("tuple[object, ...]", value))
    return value


def _is_enum(value: str) -> bool:
    return type(value) is not str and hasattr(value, "value")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", data: msgspec.Raw | bytes, limit: int) -> T:
    length = memoryview(data).nbytes
    if length > limit:
        raise BadMessage(f"{length} bytes, at most {limit} are allowed")
    decode = cast("Callable[[object], T]", decoder.decode)
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise BadMessage(f"{length} bytes that are no message of this protocol: {error}") from None
