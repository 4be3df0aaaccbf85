"""What is said of checkpoints: which save, where its parts are, what became of them, what is to be done with them.

A *save* is one attempt to save one step: (step, epoch, round). Its *shards* are one for each rank of the round's world.
A shard is *written* when its bytes are durable where it was written; a save whose shards are all written on a tier is
*complete* there; a complete save on the durable tier is *published* by its rename to `iter_NNNNNNN`.
"""

import hashlib
from collections.abc import Iterable
from enum import Enum

import msgspec


class Tier(str, Enum):
    """Where a shard lies."""

    LOCAL = "local"
    """A folder of the node's own: fast, gone with the node."""
    DURABLE = "durable"
    """A folder that all nodes see."""


GIVEN_UP = "given up: another rank did not save it"
"""Why a rank has not written its shard of a save that could not be complete any more. Says nothing new to anybody."""


def due_tiers(step: int, local_every: int | None, durable_every: int | None) -> list[Tier]:
    """The tiers whose interval, non_persistent_save_interval or save_interval, has a save at `step`."""
    intervals = ((Tier.LOCAL, local_every), (Tier.DURABLE, durable_every))
    return [tier for tier, every in intervals if every is not None and step > 0 and step % every == 0]


class SaveId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """One attempt to save a step.

    epoch: which journal `round` belongs to: rounds start at 0 again when a job starts with a new journal.
    """

    step: int
    epoch: int
    round: int

    def __str__(self) -> str:
        return f"step {self.step} (round {self.round})"


class What(str, Enum):
    """What became of a shard (`rank` >= 0) or of a whole save (`rank` -1)."""

    WRITTEN = "written"
    """A shard: its bytes are durable."""
    FAILED = "failed"
    """A shard: it could not be written. `why`."""
    BAD = "bad"
    """A shard, or a whole save: it was found unusable when it was read. `why`."""
    PUBLISHED = "published"
    """A save on the durable tier: it has its final name."""
    UNPUBLISHED = "unpublished"
    """A save on the durable tier: publishing it failed. `why`."""
    PRUNED = "pruned"
    """A save on a tier (of `node`, where that is local): it is deleted."""
    RESTORED = "restored"
    """A rank has read all that it needs of it."""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Something that happened to a save. True for ever; telling it twice changes nothing.

    rank: of the save's own world, whose size is `world_size`. node: where, for the local tier; empty for the durable.
    nbytes: the shard's size. digest: of the shard's sidecar, which holds those of its files (`checkpoint_io.formats`);
    of a published save: of all sidecars, see `digest_of_save`. seconds: how long it took, from the call of `save`.
    """

    save: SaveId
    what: What
    tier: Tier
    rank: int = -1
    node: str = ""
    world_size: int = 0
    nbytes: int = 0
    digest: bytes = b""
    seconds: float = 0.0
    why: str = ""


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one shard of a save can be read on the local tier: `node`, and the address of its depot."""

    rank: int
    node: str
    address: str


class Holder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which shards of a save are on one node. spans: runs of ranks: the first one, and how many."""

    node: str
    address: str
    spans: tuple[tuple[int, int], ...]


class Resume(msgspec.Struct, frozen=True, omit_defaults=True):
    """From which save all ranks of a round resume.

    world_size: of the world that saved it. digest: of the save (`digest_of_save`), empty if this job did not see it
    written. durable: it is published on the durable tier. local: it is complete on the local tier; `holders` then says
    where the shards are, but for those that are on the reader's own node alone. partial: it says so only of shards
    that the reader saved itself, by their numbers; others are read from the durable tier.
    """

    save: SaveId
    world_size: int
    digest: bytes = b""
    durable: bool = False
    local: bool = False
    holders: tuple[Holder, ...] = ()
    partial: bool = False

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def places(self) -> tuple[Place, ...]:
        """What `holders` says, shard by shard. Of a shard the preferred place comes first."""
        return tuple(
            Place(rank, holder.node, holder.address)
            for holder in self.holders
            for first, count in holder.spans
            for rank in range(first, first + count)
        )


def holders_of(places: Iterable[Place]) -> tuple[Holder, ...]:
    """The same in few words: ranks of one node mostly follow each other. Of a shard the first place stays the first."""
    seen: dict[int, int] = {}
    by_node: dict[tuple[int, str, str], list[int]] = {}
    for place in places:
        choice = seen[place.rank] = seen.get(place.rank, -1) + 1
        by_node.setdefault((choice, place.node, place.address), []).append(place.rank)
    # Sorted by choice only: all first places come before all second ones.
    return tuple(
        Holder(node, address, _spans(sorted(ranks)))
        for (_, node, address), ranks in sorted(by_node.items(), key=lambda each: each[0][0])
    )


def _spans(ranks: list[int]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and rank == sum(spans[-1]):
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((rank, 1))
    return tuple(spans)


# ---- what an agent's depot is to do ---------------------------------------------------------------------------


class Publish(msgspec.Struct, frozen=True, array_like=True):
    """Give a complete save on the durable tier its final name. `digest`: see `digest_of_save`.

    over: the save that has this name now and must make room, whatever it looks like: it was found unusable, or is of
    an earlier job.
    """

    save: SaveId
    world_size: int
    digest: bytes
    over: SaveId | None = None


class Prune(msgspec.Struct, frozen=True, array_like=True):
    """Delete a save from a tier: this node's part of it, where that is local; published or not, where it is durable."""

    save: SaveId
    tier: Tier


class Replicate(msgspec.Struct, frozen=True, array_like=True):
    """Fetch a shard of another node's local tier to this node's."""

    save: SaveId
    place: Place


class DepotOrders(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that one agent's depot should have done; an order stands until a fact says that it is done."""

    publish: tuple[Publish, ...] = ()
    prune: tuple[Prune, ...] = ()
    replicate: tuple[Replicate, ...] = ()


NO_ORDERS = DepotOrders()


def digest_of_save(sidecars: Iterable[bytes]) -> bytes:
    """One digest for a whole save, from the digests of its sidecars in order of rank."""
    return hashlib.blake2b(b"".join(sidecars), digest_size=16).digest()
