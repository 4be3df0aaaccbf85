"""Who writes what: each chunk of a state is written by one rank, known to all that hold it without a word exchanged.

- A chunk of a DTensor is held by the ranks that differ only in mesh dimensions over which the tensor is replicated.
  They know each other from mesh and placements, and all see the same list of chunks that they hold together.
- Plain tensors and Python values are held by all ranks, if all have the same ones (`agreement` asks).

Shared out greedily: the largest first, each to the rank that has least so far; ties go by name and by rank. Nothing
depends on the order in which a rank meets its tensors.
"""

import functools
import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

# The rule that DCP itself places chunks by; there is no public name for it.
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the ranks that hold it (global ranks, in order)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


def chunk_of(fqn: str, tensor: DTensor, rank: int | None = None) -> Chunk | None:
    """The part of a DTensor that this process holds. None: it has none, by its place in the mesh or outside of it.

    rank: of this process; by default what torch.distributed says. The place is looked up by it. A mesh says where its
    process is, too, but meshes are equal if their ranks are, and torch's caches may give a tensor the mesh of an
    earlier round, in which this process was another rank.

    A tensor without elements is one chunk that all ranks of its mesh hold, so that one of them writes it.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"{fqn!r} has the placement {placement}: its values are sums not yet made. Redistribute it to Replicate"
                " or Shard before it is saved"
            )
    shape = tuple(tensor.shape)
    everyone = mesh.mesh
    if rank is None:
        rank = torch.distributed.get_rank()
    places = cast("list[list[int]]", (everyone == rank).nonzero().tolist())  # pyright: ignore[reportUnknownMemberType]
    if not places:
        return None
    coordinate = places[0]
    if not tensor.numel():
        return Chunk((0,) * len(shape), shape, _in_order(everyone))
    _refuse_scattered(fqn, shape, tuple(everyone.shape), placements)
    sizes, offsets = _compute_local_shape_and_global_offset(shape, everyone.shape, coordinate, placements)
    if 0 in sizes:
        return None
    place = tuple(slice(None) if each.is_replicate() else at for at, each in zip(coordinate, placements, strict=True))
    return Chunk(tuple(offsets), tuple(sizes), _in_order(everyone[place]))


def _in_order(ranks: Tensor) -> tuple[int, ...]:
    return tuple(sorted(cast("list[int]", ranks.flatten().tolist())))  # pyright: ignore[reportUnknownMemberType]


def _refuse_scattered(
    fqn: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    """A strided shard may be rows from several places. It can be saved as a chunk only where they make one block."""
    for dim in {cast("int", getattr(each, "dim", -1)) for each in placements if hasattr(each, "split_factor")}:
        on_dim = [number for number, each in enumerate(placements) if getattr(each, "dim", None) == dim]
        sizes = tuple(mesh_shape[number] for number in on_dim)
        if not _in_blocks(shape[dim], sizes, tuple(_on_one_dimension(placements[number]) for number in on_dim)):
            raise ValueError(
                f"{fqn!r} of shape {shape} is placed as {placements}: a rank's rows are not one block of the tensor."
                " Redistribute it to Shard before it is saved"
            )


def _on_one_dimension(placement: Placement) -> Placement:
    factor = getattr(placement, "split_factor", None)
    return type(placement)(0) if factor is None else type(placement)(0, split_factor=factor)  # pyright: ignore[reportCallIssue]


@functools.lru_cache(maxsize=4096)
def _in_blocks(length: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> bool:
    """Whether the parts of one dimension, taken as blocks from where each begins, cover it once."""
    blocks: list[tuple[int, int]] = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        sizes, offsets = _compute_local_shape_and_global_offset((length,), mesh_shape, list(coordinate), placements)
        if sizes[0]:
            blocks.append((offsets[0], offsets[0] + sizes[0]))
    blocks.sort()
    ends = [0, *(end for _, end in blocks)]
    return all(begin == end for (begin, _), end in zip(blocks, ends, strict=False)) and ends[-1] == length


def _greedy(sizes: Mapping[str, int], ranks: Iterable[int]) -> dict[str, int]:
    loads = [(0, rank) for rank in ranks]
    heapq.heapify(loads)
    writers: dict[str, int] = {}
    for fqn in sorted(sizes, key=lambda fqn: (-sizes[fqn], fqn)):
        load, rank = loads[0]
        writers[fqn] = rank
        heapq.heapreplace(loads, (load + sizes[fqn], rank))
    return writers


def writers_of(held: Mapping[str, tuple[tuple[int, ...], int]]) -> dict[str, int]:
    """Who writes each chunk that a rank holds. held: name -> (the ranks that hold the chunk, its bytes)."""
    groups: dict[tuple[int, ...], dict[str, int]] = {}
    for fqn, (ranks, nbytes) in held.items():
        groups.setdefault(ranks, {})[fqn] = nbytes
    writers: dict[str, int] = {}
    for ranks, sizes in groups.items():
        writers.update(_greedy(sizes, ranks))
    return writers


def share_out(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Who writes each thing that all ranks of the world hold. sizes: name -> bytes."""
    return _greedy(sizes, range(world_size))
