"""Fills a state from a save, each rank alone: no collective, no pickle but for values, every byte verified.

Any rank of any world can be filled from any save: sidecars say which elements each shard has, `targets` which ones
are wanted. The rank's own shard is looked at first, and those that its sidecar names; if that is not all, every shard,
and those that have the most of it are read first. A shard that turns out bad is read from its next place (`sources`);
only if none is left, and no other shard has the same elements, the restore fails. It fails before anything is changed
if the state and the save do not fit.

A value that is no tensor was pickled. What torch's restricted unpickler refuses (a class of the user's) is unpickled
freely only if this job wrote it, which its committed digest proves, or if the caller trusts the folder.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, cast

import torch

from ..protocol.checkpoints import Resume, SaveId, Tier
from .flatten import Path, flatten
from .shard_reader import ShardReader
from .sources import BadShard, RestoreError, Shard, Sources, Where
from .targets import Plan, Targets

__all__ = ["RestoreError", "Restored", "StateMismatch", "Where", "restore"]


class StateMismatch(RestoreError):
    """The save is whole and does not fit the state; an older one would most likely not either."""


@dataclass(frozen=True)
class Restored:
    """nbytes: read and verified. shards: which were read, and where: rank, tier, node (of a local one)."""

    save: SaveId
    nbytes: int
    seconds: float
    shards: tuple[tuple[int, Tier, str], ...]
    unwanted: frozenset[str] = frozenset()
    """Names that the save has and the state has not, as far as shards were looked at."""
    left_out: tuple[str, ...] = ()
    """For the log: what was most likely meant to be restored, and was not."""


def restore(state: MutableMapping[str, Any], resume: Resume, where: Where, *, trust: bool = False) -> Restored:
    """Fill `state` from the save that `resume` names, in place, as `torch.distributed.checkpoint.load` does.

    Tensors and DTensors keep their memory, device and dtype; other values are replaced where they are in the state.
    Names that only the save has are ignored; `left_out` tells of those below a mapping that is empty in the state, as
    that of an optimizer without moments is. trust: unpickle classes even if it is not known who wrote them.

    Raises StateMismatch, with everything that does not fit; nothing is changed then, if all sidecars were at hand.
    Raises RestoreError, with every shard that could not be read and why; the state may then be partly filled, and is
    worth nothing.
    """
    return fill(state, Sources(resume, where), trust=trust, known=True)


def fill(state: MutableMapping[str, Any], sources: Sources, *, trust: bool, known: bool) -> Restored:
    """`restore` from these sources. known: the digest they are checked against came from the job, not with them."""
    flat = flatten(state)
    restored, values = read(flat.tensors, flat.values, sources, trust=trust, known=known)
    empty = list(_empty_in(state, ""))
    for fqn, value in values.items():
        _put(state, flat.paths[fqn], value)
    return replace(restored, left_out=tuple(_left_out(empty, restored.unwanted)))


def read(
    tensors: Mapping[str, torch.Tensor], values: Iterable[str], sources: Sources, *, trust: bool, known: bool
) -> tuple[Restored, dict[str, object]]:
    """Fill the tensors, and return the values of these names."""
    began = monotonic()
    targets = Targets(tensors, values)
    sources.survey = targets.survey
    reader = ShardReader()
    reading = _Reading(sources, targets, reader)
    try:
        reading.run()
    finally:
        reader.close()
        # What looks for further places refers to them in a circle: no tensor must wait in it for the collector.
        sources.survey = None
    found = _unpickled(sources, targets.values, trust=trust, known=known)
    used = tuple((shard.rank, shard.tier, shard.node) for shard in reading.used)
    unwanted = frozenset(targets.unwanted)
    return Restored(sources.resume.save, reader.nbytes, monotonic() - began, used, unwanted), found


class _Reading:
    """One rank's way through the shards of a save."""

    def __init__(self, sources: Sources, targets: Targets, reader: ShardReader) -> None:
        self._sources = sources
        self._targets = targets
        self._reader = reader
        self._world = range(sources.resume.world_size)
        self.used: list[Shard] = []

    def run(self) -> None:
        """Everything wanted is read, or an error says what is not."""
        self._refuse(self._targets.problems)
        self._read_own()
        if not self._targets.complete:
            self._read_all()

    def _read_own(self) -> None:
        """What this rank, or its predecessor of that number, saved in a world of the same size; and what it held and
        left others to write: its sidecar says to whom. With the same layout that is all, and no other shard, of maybe
        ten thousand, has to be looked at."""
        own = self._sources.own
        shard = self._sources.present(own) if own is not None else None
        if shard is None:
            return
        ranks = self._targets.writers(shard)
        if ranks is None:
            return
        near = [rank for rank in ranks if self._sources.near(rank)]
        self._sources.look(near)
        self._refuse_misfits(near)
        if len(near) == len(ranks) and self._targets.unseen():
            return  # one of those shards is unusable
        for rank in sorted(ranks, key=lambda rank: (rank != own, rank)):
            self._read(rank)

    def _read_all(self) -> None:
        near = [rank for rank in self._world if self._sources.near(rank)]
        self._sources.look(near)
        if len(near) == len(self._world):
            self._sources.committed()
        self._refuse_misfits(near)
        if len(near) == len(self._world):
            self._refuse_unseen()
        shards = [shard for rank in near if (shard := self._sources.present(rank)) is not None]
        for shard in sorted(shards, key=lambda shard: (-shard.wanted, shard.rank)):
            self._read(shard.rank)
        for rank in sorted(set(self._world).difference(near)):
            self._read(rank)
        if not self._targets.complete:
            self._refuse_unseen()
            self._refuse_missing()

    def _refuse_misfits(self, ranks: Iterable[int]) -> None:
        shards = [shard for rank in ranks if (shard := self._sources.present(rank)) is not None]
        self._refuse({fqn: why for shard in shards for fqn, why in shard.misfits.items()})

    def _read(self, rank: int) -> None:
        """Read what is still missing and this shard has, from the first place where it is whole."""
        while not self._targets.complete:
            shard = self._sources.present(rank)
            if shard is None:
                return
            self._refuse(shard.misfits)
            if not shard.wanted:
                return
            plan = Plan()
            try:
                self._reader.read(shard, self._targets.ranges(shard, plan))
            except BadShard as error:
                self._sources.reject(shard, error)
                continue
            self._targets.settle(plan, shard)
            if not plan.empty:
                self.used.append(shard)
            return

    def _refuse(self, problems: Mapping[str, str]) -> None:
        if problems:
            raise StateMismatch(self._sources.resume.save, list(problems.values()))

    def _refuse_unseen(self) -> None:
        """Names that are in the state and in no shard; not certain while a shard could not be looked at."""
        unseen = self._targets.unseen()
        if unseen and not self._sources.lost():
            reasons = [f"{fqn!r} is in the state, and was not saved" for fqn in unseen]
            raise StateMismatch(self._sources.resume.save, reasons)

    def _refuse_missing(self) -> None:
        missing = self._targets.missing()
        names = ", ".join(map(repr, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        lost = self._sources.lost()
        save = self._sources.resume.save
        if not lost:
            raise StateMismatch(save, [f"nobody saved all elements of {names}"])
        raise RestoreError(save, [*lost, f"what is missing without them: {names}"])


def _unpickled(
    sources: Sources, values: Mapping[str, tuple[bytes, Shard]], *, trust: bool, known: bool
) -> dict[str, object]:
    """All values; what is wrong with any of them in one error."""
    found: dict[str, object] = {}
    reasons: list[str] = []
    for fqn, (data, shard) in values.items():

        def may_run(shard: Shard = shard) -> bool:
            return trust or (known and sources.is_committed(shard))

        try:
            found[fqn] = _value(data, may_run)
        except _NoValue as error:
            reasons.append(f"{fqn!r} ({shard}): {error}")
    if reasons:
        raise RestoreError(sources.resume.save, reasons)
    return found


class _NoValue(Exception):
    pass


def _value(data: bytes, may_run: Callable[[], bool]) -> object:
    """A value out of what torch.save made of it. may_run: whether its pickle may call what it likes."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = error
    except Exception as error:
        raise _NoValue(f"cannot be read: {type(error).__name__}: {error}") from error
    if not may_run():
        names = ", ".join(_classes_of(data)) or f"something unknown ({refused})"
        raise _NoValue(
            f"it holds {names}, and unpickling that runs code; it is not known that this job wrote it."
            " If you trust whoever did, pass trust=True"
        )
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise _NoValue(f"cannot be unpickled: {type(error).__name__}: {error}") from error


def _classes_of(data: bytes) -> list[str]:
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:
        # It only makes the message better.
        return []


def _put(state: MutableMapping[str, Any], path: Path, value: object) -> None:
    """Replace what is at `path`, whose keys of mappings are strings whatever they are in the state."""
    *outer, last = path
    inside: Any = state
    for key in outer:
        inside = inside[_key(inside, key)]
    inside[_key(inside, last)] = value


def _key(inside: Any, key: str | int) -> Any:
    if isinstance(inside, Mapping) and key not in inside:
        return next(_same(cast("Mapping[Any, object]", inside), str(key)))
    return key


def _same(inside: Mapping[Any, object], key: str) -> Iterator[Any]:
    return (own for own in inside if str(own) == key)


def _empty_in(inside: Any, prefix: str) -> Iterator[str]:
    """The flattened names of mappings that have nothing in them."""
    if isinstance(inside, Mapping):
        for key, each in cast("Mapping[Any, Any]", inside).items():
            if isinstance(each, Mapping) and not each:
                yield f"{prefix}{key}"
            else:
                yield from _empty_in(each, f"{prefix}{key}.")


def _left_out(empty: Iterable[str], unwanted: frozenset[str]) -> Iterator[str]:
    for name in empty:
        if count := sum(fqn.startswith(f"{name}.") for fqn in unwanted):
            yield (
                f"{name!r} is empty in the state and has {count} entries in the checkpoint, which are not restored; an"
                " optimizer makes its moments at its first step, and get_state_dict makes them before"
            )
