"""What an agent and its depot say to each other, and what a depot's clients say to it.

* Agent and depot share a pair of connected stream sockets that nobody else has (`depot_stream.py`). The agent's orders
  are states, so only the newest one that is not yet sent matters.
* A client asks by a save's id, a rank and the number of a file, never by a path: no request can name another file.

Everything that comes from outside is typed, and its length is checked before it is decoded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

from ..protocol.checkpoints import DepotOrders, Fact, Prune, Publish, Replicate, SaveId, Tier, What
from ..protocol.codec import clean_text
from ..protocol.keys import JobKeys

FRAME_LIMIT = 4 << 20
"""Bytes of the longest frame between agent and depot; the orders of one agent come in a directive of at most 1 MiB."""

FACTS_AT_ONCE = 2000
"""Facts in one message: they go on to the controller as they are, and its messages are bounded."""

READ_LIMIT = 1 << 20
"""Bytes that one request may ask for."""

REPLY_LIMIT = READ_LIMIT + 1024
"""Bytes of the longest reply."""

WINDOW = 8
"""Requests that one client may have unanswered; those beyond are refused."""

SIDECAR = -1
"""The number of the sidecar, among a shard's files."""

RANK_LIMIT = 1 << 24
FILE_LIMIT = 16

# ---- agent -> depot -------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message. save, local: the folders of the tiers; None: there is none.

    limit_s: how long one order may take. host: where others reach this node.
    keys: None if the job runs in plain text. durable: this depot is one of those that look through the durable tier.
    """

    node: str
    host: str
    save: str | None
    local: str | None
    limit_s: float
    keys: JobKeys | None
    durable: bool


class Order(msgspec.Struct, frozen=True, tag="order"):
    """All that should be done. session: with each new one, whoever gives the orders knows nothing of this depot: it
    takes stock again, and does again what still stands."""

    session: int
    orders: DepotOrders


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The job is over: publish what is ordered, for so long at most, and end."""

    within_s: float


# ---- depot -> agent -------------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag="found"):
    """What the depot found when it looked. See `protocol.messages.Stock`."""

    address: str
    facts: tuple[Fact, ...]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What became of orders."""

    facts: tuple[Fact, ...]


class Line(msgspec.Struct, frozen=True, tag="line"):
    """A line for the log."""

    level: str
    text: str


AnOrder = Publish | Prune | Replicate
ToDepot = Begin | Order | Finish
FromDepot = Found | Done | Line

# ---- client -> depot, and back --------------------------------------------------------------------------------


class Read(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Give me `length` bytes from `offset` of file `number` of a shard. id: the reply has it too."""

    id: int
    save: SaveId
    rank: int
    number: int
    offset: int
    length: int


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """size: of the whole file. data: as much as there is, at most what was asked for."""

    id: int
    size: int
    data: bytes


class No(msgspec.Struct, frozen=True, array_like=True, tag=3):
    id: int
    why: str


# ---- what is told of orders -----------------------------------------------------------------------------------


def describe(order: AnOrder) -> str:
    match order:
        case Publish():
            return f"publish {order.save}"
        case Prune():
            return f"delete {order.save} from the {order.tier.value} tier"
        case Replicate():
            return f"fetch shard {order.place.rank} of {order.save} from {order.place.node}"


def failures(orders: Iterable[AnOrder], node: str, why: str) -> tuple[Fact, ...]:
    """What is told of orders that failed. Of a save that could not be deleted there is nothing to tell: it is there."""
    facts: list[Fact] = []
    for order in orders:
        if isinstance(order, Publish):
            facts.append(Fact(order.save, What.UNPUBLISHED, Tier.DURABLE, world_size=order.world_size, why=why))
        elif isinstance(order, Replicate):
            facts.append(Fact(order.save, What.FAILED, Tier.LOCAL, order.place.rank, node, why=why))
    return tuple(facts)


# ---- bytes ----------------------------------------------------------------------------------------------------


class BadFrame(ValueError):
    """Bytes that are no message of these."""


_encoder = msgspec.msgpack.Encoder()
_to_depot: msgspec.msgpack.Decoder[ToDepot] = msgspec.msgpack.Decoder(cast(Any, ToDepot))
_from_depot: msgspec.msgpack.Decoder[FromDepot] = msgspec.msgpack.Decoder(cast(Any, FromDepot))
_reads = msgspec.msgpack.Decoder(Read)
_replies: msgspec.msgpack.Decoder[Piece | No] = msgspec.msgpack.Decoder(cast(Any, Piece | No))


def encode(message: ToDepot | FromDepot | Read | Piece | No) -> bytes:
    """Does not fail on names of files that are not UTF-8, of which reasons may speak."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_cleaned(message))


def _cleaned(message: Any) -> Any:
    if isinstance(message, Found | Done):
        facts = tuple(msgspec.structs.replace(fact, why=clean_text(fact.why)) for fact in message.facts)
        return msgspec.structs.replace(message, facts=facts)
    texts = {name: getattr(message, name) for name in ("why", "text") if hasattr(message, name)}
    return msgspec.structs.replace(message, **{name: clean_text(text) for name, text in texts.items()})


def decode_to_depot(data: bytes) -> ToDepot:
    return _decoded(_to_depot, data)


def decode_from_depot(data: bytes) -> FromDepot:
    return _decoded(_from_depot, data)


def decode_read(data: bytes) -> Read:
    """A request whose numbers are such as files of checkpoints have."""
    read = _decoded(_reads, data)
    sane = (
        0 <= read.rank < RANK_LIMIT
        and SIDECAR <= read.number < FILE_LIMIT
        and read.offset >= 0
        and 0 < read.length <= READ_LIMIT
    )
    if not sane:
        raise BadFrame(f"a request for what no shard has: {read}")
    return read


def decode_reply(data: bytes) -> Piece | No:
    return _decoded(_replies, data)


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(f"{len(data)} bytes that are no message of a depot: {error}") from None


def in_parts(facts: Sequence[Fact]) -> Iterator[tuple[Fact, ...]]:
    """All of them, in messages that are not too long; nothing if there are none."""
    for start in range(0, len(facts), FACTS_AT_ONCE):
        yield tuple(facts[start : start + FACTS_AT_ONCE])
