"""Each chunk has one writer, found by each of its holders alone; the chunks of all ranks make up the tensor."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.checkpoint_io.shares import Chunk, chunk_of, share_out, writers_of


def on_all_ranks(world_size: int, look: Callable[[int], Any]) -> list[Any]:
    """What `look` sees as each rank in turn. No message is sent: each sees meshes of a world that is not there."""
    seen: list[Any] = []
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            seen.append(look(rank))
        finally:
            dist.destroy_process_group()
    return seen


def chunks(shape: Sequence[int], mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> list[Chunk | None]:
    def look(rank: int) -> Chunk | None:
        mesh = init_device_mesh("cpu", mesh_shape)
        local = torch.empty(shape, device="meta")
        stride = local.stride()
        return chunk_of("w", DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=stride), rank)

    return on_all_ranks(torch.Size(mesh_shape).numel(), look)


CASES: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((8, 6), (4,), [Shard(0)]),
    ((8, 6), (4,), [Shard(1)]),
    ((5, 3), (4,), [Shard(0)]),
    ((2, 3), (4,), [Shard(0)]),
    ((8, 6), (4,), [Replicate()]),
    ((8, 6), (2, 2), [Replicate(), Shard(0)]),
    ((8, 6), (2, 2), [Shard(0), Replicate()]),
    ((7, 5), (2, 3), [Shard(0), Shard(1)]),
    ((7, 5), (2, 3), [Shard(0), Shard(0)]),
    ((8, 6), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3,), (2, 2, 2), [Replicate(), Shard(0), Replicate()]),
    ((), (2, 2), [Replicate(), Replicate()]),
    ((0, 4), (4,), [Shard(0)]),
    ((0, 4), (2, 2), [Replicate(), Shard(1)]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES, ids=str)
def test_chunks_make_up_the_tensor_and_holders_know_each_other(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    seen = chunks(shape, mesh_shape, placements)
    by_chunk: dict[Chunk, list[int]] = {}
    for rank, chunk in enumerate(seen):
        if chunk is not None:
            by_chunk.setdefault(chunk, []).append(rank)
    # Every holder of a chunk has the same idea of who the others are, and it is right.
    assert all(list(chunk.ranks) == ranks for chunk, ranks in by_chunk.items())
    covered = torch.zeros(shape, dtype=torch.int)
    for chunk in by_chunk:
        block = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        covered[block] += 1
    assert (covered == 1).all()
    assert len(by_chunk) >= 1


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    def look(rank: int) -> Chunk | None:
        mesh = dist.device_mesh.DeviceMesh("cpu", [1, 3])
        return chunk_of("w", DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), rank)

    outside, one, outside_too, three = on_all_ranks(4, look)
    assert outside is None
    assert outside_too is None
    assert (one, three) == (Chunk((0,), (2,), (1,)), Chunk((2,), (2,), (3,)))


def test_a_mesh_of_an_earlier_round_does_not_say_who_we_are() -> None:
    """Its ranks are right, its idea of which one this process is may be old: rank 1 of the new round was rank 0."""

    def look(rank: int) -> DTensor:
        return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])

    old = on_all_ranks(2, look)[0]
    assert chunk_of("w", old, 1) == Chunk((2,), (2,), (1,))


def test_partial_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has the placement P.*Redistribute"):
        chunks((4,), (2,), [Partial()])


def test_rows_from_several_places_are_refused() -> None:
    """DCP would save them as a block that they are not."""
    with pytest.raises(ValueError, match=r"'w' of shape.*not one block"):
        chunks((8, 2), (2,), [_StridedShard(0, split_factor=2)])


sizes = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 1000), max_size=40)


@given(sizes, st.integers(1, 7), st.randoms())
def test_shares_are_whole_balanced_and_the_same_in_any_order(
    sizes: dict[str, int], world_size: int, random: Any
) -> None:
    writers = share_out(sizes, world_size)
    assert set(writers) == set(sizes)
    shuffled = list(sizes.items())
    random.shuffle(shuffled)
    assert share_out(dict(shuffled), world_size) == writers
    loads = [sum(size for fqn, size in sizes.items() if writers[fqn] == rank) for rank in range(world_size)]
    # A greedy share exceeds the mean by at most the largest thing in it.
    assert max(loads) <= sum(sizes.values()) / world_size + max(sizes.values(), default=0)


def test_many_equal_ones_go_round() -> None:
    writers = share_out({f"w{number}": 10 for number in range(100)}, 4)
    assert [list(writers.values()).count(rank) for rank in range(4)] == [25] * 4


def test_each_group_of_holders_shares_among_itself() -> None:
    held = {"a": ((0, 2), 5), "b": ((0, 2), 4), "c": ((1, 3), 5), "d": ((0, 2), 1), "e": ((7,), 100)}
    assert writers_of(held) == {"a": 0, "b": 2, "d": 2, "c": 1, "e": 7}


def test_hybrid_shards_are_each_written_once() -> None:
    """2 replicas of 3 shards: each rank sees only what it holds, and together they write everything once."""
    names = [f"w{number}" for number in range(9)]

    def look(rank: int) -> list[tuple[str, Chunk]]:
        mesh = init_device_mesh("cpu", (2, 3))
        held: dict[str, Chunk] = {}
        for number, name in enumerate(names):
            tensor = DTensor.from_local(torch.ones(number + 1, 2), mesh, [Replicate(), Shard(0)])
            chunk = chunk_of(name, tensor, rank)
            assert chunk is not None
            held[name] = chunk
        writers = writers_of({name: (chunk.ranks, 8 * chunk.sizes[0]) for name, chunk in held.items()})
        return [(name, held[name]) for name in names if writers[name] == rank]

    shares = on_all_ranks(6, look)
    written = [(name, chunk.offsets) for name, chunk in itertools.chain(*shares)]
    assert len(written) == len(set(written)) == 9 * 3
    loads = [sum(chunk.sizes[0] for _, chunk in share) for share in shares]
    assert max(loads) - min(loads) <= 1
