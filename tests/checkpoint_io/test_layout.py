"""A layout is a file that torch reads item by item; shares of all ranks together hold everything once."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.checkpoint_io.flatten import flatten
from perdure.checkpoint_io.formats import CHUNK, Item
from perdure.checkpoint_io.layout import Layout, build_layout

PAGE = 4096


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": {
            "w": torch.randn(50, 30),
            "b": torch.randn(50),
            "scale": torch.tensor(2.5),
            "none": torch.empty(0, 3),
        },
        "moments": [torch.randn(50, 30).bfloat16(), torch.arange(5), torch.tensor([True, False])],
        "step": 7,
        "rng": torch.get_rng_state(),
        "names": ["a", "b"],
    }


def image_of(layout: Layout, sources: list[torch.Tensor]) -> bytes:
    """The file, made slowly."""
    image = bytearray(layout.image_bytes)
    for at, frame in layout.frames:
        image[at : at + len(frame)] = frame
    with_bytes = [item for item in layout.items if item.nbytes]
    for item, source in zip(with_bytes, sources, strict=True):
        data = bytes(source.detach().contiguous().view(-1).view(torch.uint8).numpy())
        image[item.data_at : item.data_at + item.nbytes] = data
    return bytes(image)


def load(image: bytes, item: Item) -> torch.Tensor:
    return torch.load(io.BytesIO(image[item.at : item.at + item.length]), weights_only=True)


def check_places(layout: Layout) -> None:
    end = 0
    for number, item in enumerate(layout.items):
        assert item.at % PAGE == 0
        assert item.at >= end
        assert (item.data_at - item.at) % 64 == 0
        assert item.at < item.data_at <= item.data_at + item.nbytes < item.at + item.length
        assert item.file == 0
        end = item.at + item.length
        if number + 1 == layout.share:
            assert layout.share_bytes == -(-end // PAGE) * PAGE
    assert layout.image_bytes == -(-end // PAGE) * PAGE
    if not layout.share:
        assert layout.share_bytes == 0
    assert CHUNK % PAGE == 0


def test_one_rank_writes_everything_and_torch_reads_it() -> None:
    flat = flatten(state())
    layout = build_layout(flat, 0, 1, shared=True, atomic=False)
    check_places(layout)
    assert [item.fqn for item in layout.items] == list(flat.tensors)
    assert layout.values == ("step", "names")
    assert (layout.share, layout.value_share, layout.held) == (len(layout.items), 2, ())
    assert layout.signature == flat.signature
    image = image_of(layout, layout.sources(flat))
    for item in layout.items:
        tensor = flat.tensors[item.fqn]
        assert torch.equal(load(image, item), tensor)
        assert (item.path, item.shape, item.sizes) == (flat.paths[item.fqn], tuple(tensor.shape), tuple(tensor.shape))
        assert item.offsets == (0,) * tensor.ndim
        assert getattr(torch, item.dtype) is tensor.dtype
        assert item.index == 0


def test_shared_and_atomic_over_four_ranks() -> None:
    flat = flatten(state())
    layouts = [build_layout(flat, rank, 4, shared=True, atomic=True) for rank in range(4)]
    written: list[str] = []
    for layout in layouts:
        check_places(layout)
        share = [item.fqn for item in layout.items[: layout.share]]
        values = list(layout.values[: layout.value_share])
        written += share + values
        assert sorted(item.fqn for item in layout.items) == sorted(flat.tensors)
        assert sorted(layout.values) == sorted(flat.values)
        assert sorted([*share, *values, *layout.held]) == sorted(flat.paths)
        image = image_of(layout, layout.sources(flat))
        assert all(torch.equal(load(image, item), flat.tensors[item.fqn]) for item in layout.items)
    assert sorted(written) == sorted(flat.paths)
    for layout in layouts:
        for fqn, writer in zip(layout.held, layout.writers, strict=True):
            share = [item.fqn for item in layouts[writer].items[: layouts[writer].share]]
            assert fqn in [*share, *layouts[writer].values[: layouts[writer].value_share]]
    # The durable part of an image does not depend on what comes after it.
    for rank, layout in enumerate(layouts):
        alone = build_layout(flat, rank, 4, shared=True, atomic=False)
        assert alone.items == layout.items[: layout.share]
        assert alone.image_bytes == alone.share_bytes == layout.share_bytes
        assert alone.held == layout.held
        assert alone.values == layout.values[: layout.value_share]


def test_not_shared_every_rank_writes_its_own() -> None:
    flat = flatten(state())
    for rank in range(3):
        layout = build_layout(flat, rank, 3, shared=False, atomic=False)
        assert [item.fqn for item in layout.items] == list(flat.tensors)
        assert (layout.share, layout.values, layout.held) == (len(flat.tensors), ("step", "names"), ())


def test_a_rank_may_write_nothing() -> None:
    layouts = [build_layout(flatten({"w": torch.ones(3)}), rank, 2, shared=True, atomic=False) for rank in range(2)]
    assert (layouts[1].items, layouts[1].image_bytes, layouts[1].share_bytes) == ((), 0, 0)
    assert (layouts[1].held, layouts[1].writers) == (("w",), (0,))
    assert build_layout(flatten({}), 0, 1, shared=True, atomic=True).image_bytes == 0


def on_rank(rank: int, world_size: int, look: Callable[[], Any]) -> Any:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return look()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("atomic", [False, True])
def test_dtensors_of_a_hybrid_mesh_come_out_whole(atomic: bool) -> None:
    """2 replicas of 2 shards, uneven; a plain tensor beside it. The chunks in the images make up the tensor."""
    whole = torch.arange(5 * 3.0).view(5, 3)
    rows = {0: slice(0, 3), 1: slice(3, 5)}
    plain = torch.randn(4)

    def look(rank: int) -> tuple[Layout, bytes]:
        mesh = init_device_mesh("cpu", (2, 2))
        placements = [Replicate(), Shard(0)]
        # Not contiguous, as a view of something larger would be.
        local = whole[rows[rank % 2]].t().contiguous().t()
        make: Callable[..., DTensor] = DTensor.from_local
        tensor = make(local, mesh, placements, shape=whole.shape, stride=whole.stride())
        empty = make(torch.ones(1 - rank % 2), mesh, placements, shape=torch.Size([1]), stride=(1,))
        flat = flatten({"w": torch.nn.Parameter(tensor), "e": empty, "plain": plain})
        layout = build_layout(flat, rank, 4, shared=True, atomic=atomic)
        return layout, image_of(layout, layout.sources(flat))

    found = torch.zeros_like(whole)
    times = torch.zeros(5)
    names: list[str] = []
    for rank in range(4):
        layout, image = on_rank(rank, 4, lambda rank=rank: look(rank))
        check_places(layout)
        for item in layout.items[: layout.share]:
            names.append(item.fqn)
            loaded = load(image, item)
            if item.fqn == "w":
                assert item.offsets is not None
                block = slice(item.offsets[0], item.offsets[0] + item.sizes[0])
                found[block] = loaded
                times[block] += 1
                assert (item.shape, item.index) == ((5, 3), None)
        held = {"w", "e", "plain"} - {item.fqn for item in layout.items[: layout.share]}
        assert set(layout.held) == held
        if atomic:
            assert {"w", "plain"} <= {item.fqn for item in layout.items}
            assert all(torch.equal(load(image, item), plain) for item in layout.items if item.fqn == "plain")
    assert torch.equal(found, whole)
    assert (times == 1).all()
    assert sorted(names) == ["e", "plain", "w", "w"]


def test_a_local_shard_that_is_not_what_its_placements_say_is_refused() -> None:
    def look() -> None:
        mesh = init_device_mesh("cpu", (2,))
        make: Callable[..., DTensor] = DTensor.from_local
        tensor = make(torch.ones(4, 2), mesh, [Shard(0)], shape=torch.Size([6, 2]), stride=(2, 1))
        build_layout(flatten({"w": tensor}), 0, 2, shared=True, atomic=False)

    with pytest.raises(ValueError, match=r"'w' of shape \(6, 2\) should have a local shard of \(3, 2\)"):
        on_rank(0, 2, look)


def test_a_name_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="rename the key"):
        build_layout(flatten({"\ud800": 1}), 0, 1, shared=True, atomic=False)
