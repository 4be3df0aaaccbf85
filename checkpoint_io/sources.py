"""Where a restoring rank finds the shards of one save, in which order, and what it says of those that are no good.

For each shard: this node's local tier, then another node's through its depot (which brings it into this node's
folder), then the durable tier. A shard that is not what it should be is told to the controller (`on_bad`) and the next
place is tried. The parts of a save may come from any mix of places, since each is checked against the digests in its
own sidecar, and each sidecar names the save that it belongs to.

Two things are known of a save: that its shards are whole (each sidecar ends with its own digest), and that they are the
ones that this job wrote (`Resume.digest`, which covers all sidecars). Only the second one allows to unpickle from it.
On the durable tier the bundle of all sidecars says the second of each single one; else all have to be looked at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..protocol.checkpoints import Fact, Place, Resume, SaveId, Tier, What
from .bundle import Bundle, NoBundle
from .catalog import mark_bad, read_manifest
from .formats import BadFormat, Sidecar, decode_sidecar, digest_of, digest_of_save
from .names import local_name, published_name, sidecar_name

THREADS = 8

Fetch = Callable[[SaveId, Place], None]


def _ignore(fact: Fact) -> None:
    """Nobody to be told."""


@dataclass(frozen=True)
class Where:
    """What one rank can read.

    save: the durable tier's folder. local: this node's folder of the local tier. fetch: brings the shard of another
    node into `local`, over whatever is there of it, and raises if it cannot. on_bad: is told of each shard found
    unusable. rank, world_size: the reader's own; what it saved itself in a world of that size is looked at first.
    """

    save: Path | None = None
    local: Path | None = None
    node: str = ""
    fetch: Fetch | None = None
    on_bad: Callable[[Fact], None] = _ignore
    rank: int = -1
    world_size: int = 0


class BadShard(Exception):
    """A shard cannot be used as it lies there. The text says why."""


class Unreadable(BadShard):
    """The file system failed: another time it may be good."""


class RestoreError(RuntimeError):
    """The state could not be restored from this save: what was tried, shard by shard, is in the text."""

    def __init__(self, save: SaveId, reasons: list[str]) -> None:
        self.step = save.step
        self.reasons = reasons
        # The first line is what logs show of an exception.
        super().__init__(f"{save} cannot be restored: " + "\n  ".join(reasons))


@dataclass(frozen=True)
class Shard:
    """One shard where it was found. digest: of its sidecar. node: whose copy it is, on the local tier.

    wanted: bytes of it that the reader wants. misfits: what of it does not fit the reader's state, by name. Where
    `Sources.survey` is set, `sidecar` has only items with such bytes: all items of all ranks may be more than fits in
    memory.
    """

    rank: int
    tier: Tier
    node: str
    folder: Path
    sidecar: Sidecar
    digest: bytes
    wanted: int = 0
    misfits: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return f"shard {self.rank}, {place_text(self.tier, self.node)}"


def place_text(tier: Tier, node: str) -> str:
    return f"local tier of {node}" if tier is Tier.LOCAL else "durable tier"


def open_shard(folder: Path, rank: int, save: SaveId, world_size: int, tier: Tier, node: str) -> Shard:
    """Read and check a shard's sidecar. Raises FileNotFoundError, or BadShard."""
    path = folder / sidecar_name(rank)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path}: {error}") from error
    return _shard_of(data, path, rank, save, world_size, tier, node)


def _shard_of(data: bytes, path: Path, rank: int, save: SaveId, world_size: int, tier: Tier, node: str) -> Shard:
    """path: of the sidecar that this is."""
    try:
        sidecar = decode_sidecar(data)
    except BadFormat as error:
        raise BadShard(f"{path}: {error}") from error
    if (sidecar.save, sidecar.rank, sidecar.world_size) != (save, rank, world_size):
        raise BadShard(
            f"{path} is of {sidecar.save}, rank {sidecar.rank} of {sidecar.world_size},"
            f" not of {save}, rank {rank} of {world_size}"
        )
    return Shard(rank, tier, node, path.parent, sidecar, digest_of(data))


class Sources:
    """The places of each shard of one save; the present one of each until it is said to be bad.

    survey: looks at each sidecar that is read, and may raise BadShard. It is called in several threads.
    durable: the folder of the save on the durable tier, if it is not where that tier keeps published saves.
    """

    def __init__(self, resume: Resume, where: Where, durable: Path | None = None) -> None:
        self.resume = resume
        self.survey: Callable[[Shard], Shard] | None = None
        self._where = where
        self._local = where.local / local_name(resume.save) if where.local and resume.local else None
        self._durable = durable
        self._marks = durable is None
        if durable is None and where.save and resume.durable:
            self._durable = where.save / published_name(resume.step)
        self._places: dict[int, list[Place]] = {}
        self._own: set[int] = set()
        for place in resume.places if self._local else ():
            if place.node == where.node:
                self._own.add(place.rank)
            else:
                self._places.setdefault(place.rank, []).append(place)
        self._next: dict[int, Iterator[Shard]] = {}
        self._present: dict[int, Shard | None] = {}
        self._refused: set[Tier] = set()
        self._untold: list[Fact] = []
        self.reasons: dict[int, list[str]] = {}
        """By rank: why its shard could not be read where it was looked for."""

    @cached_property
    def _bundle(self) -> Bundle | None:
        """By the digest that the job committed. If that is not known, since another job did, by the one that lies with
        the bundle: it is an index as good, and proves nothing. Opened when it is wanted: a durable tier that hangs must
        not hold up who reads the local one."""
        if self._durable is None:
            return None
        try:
            digest = self.resume.digest or bytes.fromhex(read_manifest(self._durable).digest)
            return Bundle(self._durable, self.resume.world_size, digest)
        except (NoBundle, BadFormat, OSError, ValueError):
            return None

    @property
    def own(self) -> int | None:
        """The rank whose shard is most likely the one that the reader wants. None: it saved in another world, or only
        a look at all shards tells whether they are those that were committed."""
        where = self._where
        if self._local is None and self._bundle is None:
            return None
        return where.rank if where.rank >= 0 and where.world_size == self.resume.world_size else None

    def near(self, rank: int) -> bool:
        """Whether looking at the shard costs no transfer between nodes."""
        if self._local is None or not self._places.get(rank):
            return True
        return self._present.get(rank) is not None or (self._local / sidecar_name(rank)).exists()

    def present(self, rank: int) -> Shard | None:
        """The shard from the best place not known to be bad; None if no place is left."""
        if rank not in self._present:
            self._start(rank)
            self._tell()
        return self._present[rank]

    def _start(self, rank: int) -> None:
        if rank not in self._present:
            self._next[rank] = self._candidates(rank)
            self._present[rank] = next(self._next[rank], None)

    def look(self, ranks: Sequence[int]) -> None:
        """Have `present` answered for all of them: many small files, which one after the other would take long."""
        if len(ranks) < 2:
            return
        threads = ThreadPoolExecutor(min(THREADS, len(ranks)), "perdure-look")
        try:
            for _ in threads.map(self._start, ranks):
                pass
        finally:
            # The end of a round may be raised here, while a thread waits for a file system or another node.
            threads.shutdown(wait=False, cancel_futures=True)
        self._tell()

    def reject(self, shard: Shard, why: BadShard) -> Shard | None:
        """This one is bad; the same shard from the next place."""
        self._bad(shard.rank, shard.tier, shard.node, why)
        self._present[shard.rank] = next(self._next[shard.rank], None)
        self._tell()
        return self._present[shard.rank]

    def lost(self) -> list[str]:
        """A line for each shard that was looked for and could be read nowhere."""
        return [
            f"shard {rank}: " + "; ".join(self.reasons.get(rank, ["nobody is known to hold it"]))
            for rank, shard in sorted(self._present.items())
            if shard is None
        ]

    def is_committed(self, shard: Shard) -> bool:
        """Whether this is the shard that the job committed. Without a bundle it takes a look at all of them."""
        if self.resume.digest and self._bundle is not None:
            return shard.digest == self._bundle.digests[shard.rank]
        return self.committed() and self.present(shard.rank) is shard

    def committed(self) -> bool:
        """Whether all shards are those that the job committed. Looks at every sidecar; rejects a tier that is not."""
        ranks = range(self.resume.world_size)
        if not self.resume.digest:
            return False
        while None not in (shards := [self.present(rank) for rank in ranks]):
            found = [shard for shard in shards if shard is not None]
            digest = digest_of_save(shard.digest for shard in found)
            if digest == self.resume.digest:
                return True
            if not self._must_match(found):
                return False
            self._reject_all(found, f"its sidecars' digest is {digest.hex()}, committed is {self.resume.digest.hex()}")
        return False

    def _must_match(self, shards: list[Shard]) -> bool:
        """Whether these are the very sidecars that the digest is of.

        It is of the local ones if the save is resumed from there, else of the durable ones. Those differ if the local
        shards hold more than their share, and then a save that is on both tiers may have been named by either.
        """
        tiers = {shard.tier for shard in shards}
        if tiers == {Tier.DURABLE}:
            return not self.resume.local
        more = any(shard.sidecar.extra for shard in shards)
        return tiers == {Tier.LOCAL} and not (more and self.resume.durable)

    def _reject_all(self, shards: list[Shard], why: str) -> None:
        tier, node = shards[0].tier, self._where.node if shards[0].tier is Tier.LOCAL else ""
        self._refused.add(tier)
        self._untold.append(Fact(self.resume.save, What.BAD, tier, node=node, why=why))
        for shard in shards:
            self.reasons.setdefault(shard.rank, []).append(f"{place_text(shard.tier, shard.node)}: {why}")
            self._present[shard.rank] = next(self._next[shard.rank], None)
        self._tell()

    def _tell(self) -> None:
        """In the reader's own thread, whichever one found it."""
        while self._untold:
            self._where.on_bad(self._untold.pop(0))

    def _bad(self, rank: int, tier: Tier, node: str, why: str | BadShard) -> None:
        if tier is Tier.DURABLE and isinstance(why, BadShard) and not isinstance(why, Unreadable):
            self._mark(rank, str(why))
        why = str(why)
        self.reasons.setdefault(rank, []).append(f"{place_text(tier, node)}: {why}")
        self._untold.append(Fact(self.resume.save, What.BAD, tier, rank, node, self.resume.world_size, why=why))

    def _mark(self, rank: int, why: str) -> None:
        """Say it to later jobs too. A node's own copy may be replaced by a good one, and is not marked."""
        if self._durable is not None and self._marks:
            with suppress(OSError):
                mark_bad(self._durable, why, rank)

    def _candidates(self, rank: int) -> Iterator[Shard]:
        places = self._places.get(rank, [])
        may_lack = rank not in self._own and (self.resume.partial or bool(places))
        if self._local is not None and Tier.LOCAL not in self._refused:
            yield from self._attempt(self._local, rank, Tier.LOCAL, self._where.node, may_lack=may_lack)
            for place in places:
                if Tier.LOCAL not in self._refused and self._fetched(place):
                    yield from self._attempt(self._local, rank, Tier.LOCAL, place.node)
        if self._durable is not None and Tier.DURABLE not in self._refused:
            yield from self._attempt(self._durable, rank, Tier.DURABLE, "")

    def _fetched(self, place: Place) -> bool:
        if self._where.fetch is None:
            return False
        try:
            self._where.fetch(self.resume.save, place)
        except Exception as error:
            self._bad(place.rank, Tier.LOCAL, place.node, f"could not be fetched: {type(error).__name__}: {error}")
            return False
        return True

    def _attempt(self, folder: Path, rank: int, tier: Tier, node: str, *, may_lack: bool = False) -> Iterator[Shard]:
        try:
            shard = self._open(folder, rank, tier, node)
            yield shard if self.survey is None else self.survey(shard)
        except FileNotFoundError:
            if not may_lack:
                self._bad(rank, tier, node, f"{folder / sidecar_name(rank)} is missing")
        except BadShard as error:
            self._bad(rank, tier, node, error)

    def _open(self, folder: Path, rank: int, tier: Tier, node: str) -> Shard:
        save, world_size = self.resume.save, self.resume.world_size
        bundle = self._bundle if tier is Tier.DURABLE else None
        if bundle is None:
            return open_shard(folder, rank, save, world_size, tier, node)
        data = bundle.sidecar(rank)
        if data is not None:
            return _shard_of(data, folder / sidecar_name(rank), rank, save, world_size, tier, node)
        shard = open_shard(folder, rank, save, world_size, tier, node)
        if shard.digest != bundle.digests[rank]:
            raise BadShard(f"{folder / sidecar_name(rank)} is not the one that was published: its digest differs")
        return shard
