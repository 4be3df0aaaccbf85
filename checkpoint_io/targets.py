"""What a state wants from a checkpoint: a box of elements for each local tensor, bytes for each other value.

`survey` compares a sidecar with what is wanted, `ranges` says which bytes of a shard to read and where they go. They go
straight into a tensor's own memory where they lie there in the order of the file; everything else (another device or
dtype, strides, a part of a saved chunk that is no single run) takes a buffer and one copy. What a plan covers counts
only once it is settled, after its bytes are read and verified: so another copy of the shard can be tried in its place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from .formats import CHUNK, Item, digest_of
from .overlap import Box, intersection, span, strides_of, subtract
from .shard_reader import Range, view_of
from .shares import Chunk, chunk_of
from .sources import BadShard, Shard

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLACE = attrgetter("file", "at")


class Need:
    """One tensor to fill: what this rank holds of it. left: what nobody has given yet."""

    __slots__ = ("box", "direct", "dtype", "fqn", "left", "seen", "shape", "target")

    def __init__(self, fqn: str, target: torch.Tensor, shape: tuple[int, ...], box: Box) -> None:
        self.fqn = fqn
        self.shape = shape
        self.dtype = target.dtype
        self.box = box
        self.left = [box] if target.numel() else []
        self.seen = False
        self.direct = type(target) in _PLAIN and target.is_cpu and not target.is_conj() and not target.is_neg()
        self.target = target.detach() if target.requires_grad else target

    def part(self, box: Box) -> torch.Tensor:
        """The elements of `box`, as a view of the target."""
        part = self.target
        if box != self.box:
            for dim, (begin, size, base) in enumerate(zip(*box, self.box.offsets, strict=True)):
                part = part.narrow(dim, begin - base, size)
        return part


class Plan:
    """What is read of one shard. It is made while `Targets.ranges` is gone through, and while values are read."""

    def __init__(self) -> None:
        self.chunks: list[tuple[Need, Box]] = []
        self.values: dict[str, bytes] = {}

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.values


class Targets:
    """All that one rank wants of a save."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], values: Iterable[str]) -> None:
        self.problems: dict[str, str] = {}
        """By name: why it cannot be filled, whatever save is read."""
        self.needs: dict[str, Need] = {}
        self.values: dict[str, tuple[bytes, Shard]] = {}
        """What was read of values."""
        self.unwanted: set[str] = set()
        """Names that are in a sidecar and in no state."""
        self._all_values = frozenset(values)
        self._unseen_values = set(self._all_values)
        self._values_left = set(self._all_values)
        known: dict[Any, Chunk | None] = {}
        for fqn, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                self._want_part(fqn, tensor, known)
            else:
                shape = tuple(tensor.shape)
                self.needs[fqn] = Need(fqn, tensor, shape, Box((0,) * len(shape), shape))
        self._left = sum(bool(need.left) for need in self.needs.values())
        _share_no_memory(self.needs.values())

    def _want_part(self, fqn: str, tensor: DTensor, known: dict[Any, Chunk | None]) -> None:
        """What this rank holds of a DTensor. known: where that is for others of its shape and placements."""
        key = tensor.shape, id(tensor.device_mesh), tuple(tensor.placements)
        try:
            if key not in known:
                known[key] = chunk_of(fqn, tensor)
        except ValueError as error:
            self.problems[fqn] = str(error)
            return
        if (chunk := known[key]) is not None:
            with torch.no_grad():
                local = tensor.to_local()
                self.needs[fqn] = Need(fqn, local, tuple(tensor.shape), Box(chunk.offsets, tuple(local.shape)))

    @property
    def complete(self) -> bool:
        return not self._left and not self._values_left

    def missing(self) -> list[str]:
        """Names of which something was not given yet."""
        return [fqn for fqn, need in self.needs.items() if need.left] + sorted(self._values_left)

    def unseen(self) -> list[str]:
        """Names that no sidecar so far has."""
        return [fqn for fqn, need in self.needs.items() if not need.seen] + sorted(self._unseen_values)

    def survey(self, shard: Shard) -> Shard:
        """The shard with only those items that have wanted bytes, and what does not fit. Raises BadShard."""
        nbytes = 0
        items: list[Item] = []
        misfits: dict[str, str] = {}
        for item in shard.sidecar.items:
            need = self.needs.get(item.fqn)
            if need is None and item.fqn not in self._values_left:
                if item.fqn not in self.values:
                    self.unwanted.add(item.fqn)
                continue
            _check(item, shard)
            if need is None or item.offsets is None:
                self._survey_value(item, need, misfits)
                items.append(item)
                nbytes += item.length
                continue
            need.seen = True
            if item.shape != need.shape:
                misfits[item.fqn] = (
                    f"{item.fqn!r} has shape {list(need.shape)} in the state, and {list(item.shape)} as it was saved"
                )
            elif (common := intersection(need.box, Box(item.offsets, item.sizes))) is not None:
                items.append(item)
                nbytes += common.volume * dtype_of(item.dtype).itemsize
        sidecar = msgspec.structs.replace(shard.sidecar, items=tuple(items))
        return replace(shard, sidecar=sidecar, wanted=nbytes, misfits=misfits)

    def writers(self, shard: Shard) -> list[int] | None:
        """The reader's own shard of a save, which was surveyed: which shards have, by name, all that is wanted, so that
        nothing else need be looked at. None: that cannot be told."""
        sidecar = shard.sidecar
        left_to = dict(zip(sidecar.held, sidecar.writers, strict=False))
        ranks = {shard.rank}
        for fqn in self.unseen():
            writer = left_to.get(fqn, -1)
            if writer < 0:
                return None
            ranks.add(writer)
        self.unwanted.update(fqn for fqn in left_to if fqn not in self.needs and fqn not in self._all_values)
        return sorted(ranks)

    def _survey_value(self, item: Item, need: Need | None, misfits: dict[str, str]) -> None:
        self._unseen_values.discard(item.fqn)
        if need is not None:
            need.seen = True
            misfits[item.fqn] = f"{item.fqn!r} is a tensor in the state, and was saved as another value"
        elif item.offsets is not None:
            misfits[item.fqn] = f"{item.fqn!r} was saved as a tensor, and is none in the state"

    def ranges(self, shard: Shard, plan: Plan) -> Iterator[Range]:
        """What the shard, which was surveyed, has of what is still missing, in the order of its files."""
        taken: set[str] = set()
        for item in sorted(shard.sidecar.items, key=_PLACE):
            need = self.needs.get(item.fqn)
            if need is not None and item.offsets is not None:
                if need.left:
                    yield from _ranges_of_chunk(plan, need, item, Box(item.offsets, item.sizes))
            elif item.fqn in self._values_left and item.fqn not in taken:
                taken.add(item.fqn)
                keep = partial(_keep_value, plan.values, item)
                yield Range(item.file, item.at, item.length, finish=keep)

    def settle(self, plan: Plan, shard: Shard) -> None:
        """All of `plan` is read and verified."""
        for need, box in plan.chunks:
            need.left = subtract(need.left, box)
            self._left -= not need.left
        for fqn, data in plan.values.items():
            self.values[fqn] = data, shard
            self._values_left.discard(fqn)


def _keep_value(values: dict[str, bytes], item: Item, data: torch.Tensor) -> None:
    value = bytes(view_of(data))
    if digest_of(value) != item.digest:
        raise BadShard(f"{item.fqn}, a value of its file {item.file}, is not what was written: its digest differs")
    values[item.fqn] = value


def _ranges_of_chunk(plan: Plan, need: Need, item: Item, chunk: Box) -> Iterator[Range]:
    """Read what `need` lacks of a saved chunk: from the first to the last element of it."""
    if chunk == need.box and len(need.left) == 1:
        # The layout is that of the save: the common case, and not to cost more than it must.
        parts = need.left
    else:
        parts = [part for left in need.left if (part := intersection(left, chunk)) is not None]
        if not parts:
            return
    dtype = dtype_of(item.dtype)
    spans = [span(part, chunk) for part in parts]
    first, end = spans[0] if len(spans) == 1 else (min(spans)[0], max(last for _, last in spans))
    at, nbytes = item.data_at + first * dtype.itemsize, (end - first) * dtype.itemsize
    plan.chunks.append((need, chunk))
    if len(parts) == 1 and parts[0].volume == end - first and (target := need.part(parts[0])).is_contiguous():
        if need.direct and need.dtype == dtype:
            yield Range(item.file, at, nbytes, into=target)
        else:
            yield from _runs(item.file, at, nbytes, dtype, target.view(-1))
        return
    pieces = [(part, begin - first) for part, (begin, _) in zip(parts, spans, strict=True)]
    finish = _copier(need, dtype, strides_of(chunk.sizes), pieces)
    yield Range(item.file, at, nbytes, finish=finish)


def _runs(file: int, at: int, nbytes: int, dtype: torch.dtype, target: torch.Tensor) -> Iterator[Range]:
    """Ranges that fill `target` in order, each within one chunk of the file: buffers stay small, and are used again."""
    size = dtype.itemsize
    end = at + nbytes
    begin = at
    while begin < end:
        # An element that lies across two chunks, in a file that nobody aligned, is not torn apart.
        until = end if at % size else min(end, (begin // CHUNK + 1) * CHUNK)
        copy = partial(_copy_run, target[(begin - at) // size : (until - at) // size], dtype)
        yield Range(file, begin, until - begin, finish=copy, pinned=target.is_cuda)
        begin = until


def _copy_run(target: torch.Tensor, dtype: torch.dtype, data: torch.Tensor) -> None:
    target.copy_(data.view(dtype))


def _copier(
    need: Need, dtype: torch.dtype, strides: tuple[int, ...], pieces: Sequence[tuple[Box, int]]
) -> Callable[[torch.Tensor], None]:
    """Copies each piece, which begins at an element of the range, to its place in the target."""

    def copy(data: torch.Tensor) -> None:
        elements = data.view(dtype)
        try:
            for part, begin in pieces:
                need.part(part).copy_(elements.as_strided(part.sizes, strides, begin))
        except RuntimeError as error:
            error.add_note(f"while {need.fqn} was filled")
            raise

    return copy


@cache
def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadShard(f"its sidecar names a dtype that this torch does not have: {name!r}")
    return dtype


def _check(item: Item, shard: Shard) -> None:
    """An item must lie in its file and in its tensor, and be as long as its elements."""
    files = shard.sidecar.files
    size = files[item.file].size if 0 <= item.file < len(files) else -1
    good = item.at >= 0 and 0 < item.length <= size - item.at
    if good and item.offsets is not None:
        good = (
            _lies_in(item.offsets, item.sizes, item.shape)
            and item.nbytes == prod(item.sizes) * dtype_of(item.dtype).itemsize
            and item.at <= item.data_at <= item.at + item.length - item.nbytes
        )
    if not good:
        raise BadShard(f"its sidecar says of {item.fqn} what cannot be: {item}")


def _lies_in(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    for begin, length, whole in zip(offsets, sizes, shape, strict=True):
        if not 0 <= begin <= begin + length <= whole:
            return False
    return True


def _share_no_memory(needs: Iterable[Need]) -> None:
    """Tied tensors are not read into directly: one would change under the other while it is verified."""
    extents: list[tuple[int, int, Need]] = []
    for need in needs:
        target = need.target
        if target.is_cpu and need.left:
            begin, nbytes = target.data_ptr(), target.nbytes
            if not target.is_contiguous():
                steps = zip(target.shape, target.stride(), strict=True)
                nbytes = (sum((size - 1) * step for size, step in steps) + 1) * target.itemsize
            extents.append((begin, begin + nbytes, need))
    extents.sort(key=lambda extent: extent[0])
    end, owner = 0, None
    for begin, last, need in extents:
        if begin < end and owner is not None:
            need.direct = owner.direct = False
        if last > end:
            end, owner = last, need
