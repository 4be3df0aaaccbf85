"""What one rank writes and where it lies in the image, which is `__<rank>_0.distcp` byte for byte.

Made when a state is saved for the first time and again when its signature changes; a save then only copies.
- Items of the rank's share come first. With `atomic`, what it holds beyond that follows: the local tier writes the
  whole image, the durable one only the first `share_bytes` of it.
- Each item begins at a multiple of 4 KiB and is a complete archive of torch.save (see `framing`). Both lengths end at
  one too, so that either may be written without the page cache. What is between items is zero.
- Python values go into another file, since their size changes: here are only their names, share first.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .flatten import Flat
from .formats import Item
from .framing import frame
from .shares import Chunk, chunk_of, share_out, writers_of

PAGE = 4096
VALUE_BYTES = PAGE
"""What a Python value counts for when it is shared out: its size is not known, and is not the same at each save."""


@dataclass(frozen=True, slots=True)
class Layout:
    """share, value_share: how many of `items` and of `values` are this rank's share; the rest are the extra ones.

    held: what the rank's state has and others are left to write; writers: who, see `Sidecar`.
    frames: (offset, bytes), to be put into an image once.
    device: the GPU that some of its tensors are on, if any are. signature: of the states that this layout is for.
    """

    rank: int
    world_size: int
    items: tuple[Item, ...]
    share: int
    share_bytes: int
    image_bytes: int
    values: tuple[str, ...]
    value_share: int
    held: tuple[str, ...]
    writers: tuple[int, ...]
    frames: tuple[tuple[int, bytes], ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device | None
    signature: Hashable

    def sources(self, flat: Flat) -> list[Tensor]:
        """What to copy into the image, in the order of `items`, without those that have no bytes."""
        tensors = flat.tensors
        found: list[Tensor] = []
        # As in `flatten`: the local part as it is.
        with torch.no_grad():
            for item in self.items:
                if item.nbytes:
                    tensor = tensors[item.fqn]
                    found.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return found


class _Image:
    """Places items one after the other."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.items: list[Item] = []
        self.frames: list[tuple[int, bytes]] = []
        self.dtypes: list[torch.dtype] = []
        self.end = 0

    def add(self, fqn: str, chunk: Chunk) -> None:
        tensor = self._flat.tensors[fqn]
        framed = frame(tensor.dtype, chunk.sizes)
        at = self.end
        data_at = at + len(framed.head)
        self.frames += [(at, framed.head), (data_at + framed.nbytes, framed.tail)]
        self.dtypes.append(tensor.dtype)
        self.items.append(
            Item(
                fqn=fqn,
                path=self._flat.paths[fqn],
                shape=tuple(tensor.shape),
                offsets=chunk.offsets,
                sizes=chunk.sizes,
                dtype=str(tensor.dtype).removeprefix("torch."),
                # DCP's planner gives no index; its global step numbers a tensor's chunks over all ranks. A plain
                # tensor is one chunk; for a DTensor whoever publishes knows the number, not this rank.
                index=None if isinstance(tensor, DTensor) else 0,
                file=0,
                at=at,
                length=framed.length,
                data_at=data_at,
                nbytes=framed.nbytes,
            )
        )
        self.end = -(-(at + framed.length) // PAGE) * PAGE


def _chunks_of(flat: Flat, rank: int) -> dict[str, Chunk]:
    """What this rank holds of each tensor; those it holds nothing of are missing. Of a plain tensor: all of it."""
    chunks: dict[str, Chunk] = {}
    for fqn, tensor in flat.tensors.items():
        if not isinstance(tensor, DTensor):
            shape = tuple(tensor.shape)
            chunks[fqn] = Chunk((0,) * len(shape), shape, (rank,))
            continue
        chunk = chunk_of(fqn, tensor, rank)
        if chunk is None:
            continue
        local = tuple(tensor.to_local().shape)
        if tensor.numel() and local != chunk.sizes:
            raise ValueError(
                f"{fqn!r} of shape {tuple(tensor.shape)} should have a local shard of {chunk.sizes} here, by its"
                f" placements {tensor.placements}, but has {local}; give from_local its shape and stride"
            )
        chunks[fqn] = chunk
    return chunks


def _writers(
    flat: Flat, chunks: dict[str, Chunk], rank: int, world_size: int, shared: frozenset[str] | bool
) -> dict[str, int]:
    """Who writes what this rank holds, by name."""
    sizes = dict.fromkeys(flat.values, VALUE_BYTES)
    meshed: dict[str, tuple[tuple[int, ...], int]] = {}
    for fqn, chunk in chunks.items():
        tensor = flat.tensors[fqn]
        # The archive around the data counts as well: it makes many small tensors about as heavy as they are.
        nbytes = frame(tensor.dtype, chunk.sizes).length
        if isinstance(tensor, DTensor):
            meshed[fqn] = (chunk.ranks, nbytes)
        else:
            sizes[fqn] = nbytes
    names = shared if isinstance(shared, frozenset) else frozenset(sizes if shared else ())
    plain = share_out({fqn: nbytes for fqn, nbytes in sizes.items() if fqn in names}, world_size)
    return dict.fromkeys(sizes, rank) | plain | writers_of(meshed)


def _refuse_names(flat: Flat) -> None:
    for fqn in flat.paths:
        try:
            fqn.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the name {fqn!r} is not text that can be written (UTF-8): rename the key") from error


def build_layout(flat: Flat, rank: int, world_size: int, *, shared: frozenset[str] | bool, atomic: bool) -> Layout:
    """shared: the plain tensors and values that all ranks hold (see `agreement`), so each is written by one of them;
    True: all of them, False: none.

    Raises TypeError or ValueError for a tensor that cannot be saved.
    """
    _refuse_names(flat)
    with torch.no_grad():
        chunks = _chunks_of(flat, rank)
    writers = _writers(flat, chunks, rank, world_size, shared)
    image = _Image(flat)
    others: list[str] = []
    for fqn, chunk in chunks.items():
        if writers[fqn] == rank:
            image.add(fqn, chunk)
        else:
            others.append(fqn)
    share, share_bytes = len(image.items), image.end
    values = [fqn for fqn in flat.values if writers[fqn] == rank]
    value_share = len(values)
    written = {item.fqn for item in image.items}.union(values)
    held = tuple(fqn for fqn in flat.paths if fqn not in written)
    if atomic:
        for fqn in others:
            image.add(fqn, chunks[fqn])
        values += [fqn for fqn in flat.values if writers[fqn] != rank]
    return Layout(
        rank=rank,
        world_size=world_size,
        items=tuple(image.items),
        share=share,
        share_bytes=share_bytes,
        image_bytes=image.end,
        values=tuple(values),
        value_share=value_share,
        held=held,
        writers=tuple(writers.get(fqn, -1) for fqn in held),
        frames=tuple(image.frames),
        dtypes=tuple(image.dtypes),
        device=next((flat.tensors[fqn].device for fqn in chunks if flat.tensors[fqn].is_cuda), None),
        signature=flat.signature,
    )
