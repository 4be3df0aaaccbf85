"""`.metadata` made without torch is what torch's own DCP writes and reads."""

import io
import itertools
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpoint_io.dcp_metadata import BadSave, encode
from perdure.checkpoint_io.formats import Item, decode_sidecar, digest_of_save
from perdure.checkpoint_io.names import saving_name, sidecar_name
from perdure.checkpoint_io.publish import publish
from perdure.protocol.checkpoints import Publish, SaveId

from .made_saves import chunk, sidecar_of, value, write_shard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch tells of other packages when it is imported
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from perdure.checkpoint_io.dcp_check import TorchDiffers, check_against_torch

SAVE = SaveId(100, 5, 1)

# DCP says that it saves in a single process when there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning", "ignore:.*TypedStorage is deprecated")


def shard_of(folder: Path, state: dict[str, Any], rows: dict[str, tuple[int, ...]], rank: int, world: int) -> bytes:
    """Writes a shard of `state`; rows: shape of those whole tensors of which this is a part, by the first dimension."""
    flat, paths = flatten_state_dict(state)
    tensors, values, items = io.BytesIO(), io.BytesIO(), []
    for fqn, each in flat.items():
        local = each.to_local() if isinstance(each, DTensor) else each
        file = tensors if isinstance(local, torch.Tensor) else values
        file.seek(-(-file.tell() // 4096) * 4096 if file is tensors else file.tell())
        at = file.tell()
        torch.save(local, file)
        where = (at, file.tell() - at, at, 0)
        if isinstance(local, torch.Tensor):
            shape = rows.get(fqn, tuple(local.shape))
            offsets = [0] * len(shape)
            if fqn in rows:
                offsets[0] = rank * local.shape[0]
            dtype = str(local.dtype).removeprefix("torch.")
            items.append(Item(fqn, paths[fqn], shape, tuple(offsets), tuple(local.shape), dtype, None, 0, *where))
        else:
            items.append(Item(fqn, paths[fqn], (), None, (), "", None, 1, *where))
    return write_shard(folder, SAVE, rank, world, items, tensors.getvalue(), values.getvalue())


def described(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return pickle.load(file)


def published(save_dir: Path, *states: dict[str, Any], rows: dict[str, tuple[int, ...]] | None = None) -> Path:
    folder = save_dir / saving_name(SAVE)
    digests = [shard_of(folder, state, rows or {}, rank, len(states)) for rank, state in enumerate(states)]
    publish(save_dir, Publish(SAVE, len(states), digest_of_save(digests)), created=time.time())
    return save_dir / "iter_0000100"


def nested() -> dict[str, Any]:
    return {
        "model": {"w": torch.randn(5, 7), "b": torch.randn(7).bfloat16(), "none": torch.zeros(0, 4)},
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(5, 7), "step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.1, "params": [0, 1]}],
        },
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.complex64),
        "step": 12,
        "näme ☃": "text",
    }


def compare(ours: Any, theirs: Any) -> None:
    """Field by field; not where items lie in files, nor what a save was called."""
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert set(ours.storage_data) == set(theirs.storage_data)
    hints = {index: index.index for index in theirs.storage_data}
    assert {index: index.index for index in ours.storage_data} == hints
    for index, info in ours.storage_data.items():
        other = theirs.storage_data[index]
        assert vars(info).keys() == vars(other).keys()
        assert info.relative_path.startswith("__0_")
        assert type(index.offset) in (torch.Size, type(None))
    for field in fields(theirs.storage_meta):
        assert hasattr(ours.storage_meta, field.name)
    for fqn, each in ours.state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata):
            other = theirs.state_dict_metadata[fqn]
            assert vars(each.properties) == vars(other.properties)
            assert type(each.size) is type(each.chunks[0].offsets) is type(each.chunks[0].sizes) is torch.Size


def test_equals_what_dcp_writes_and_dcp_reads_it(tmp_path: Path) -> None:
    state = nested()
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    folder = published(tmp_path, state)
    compare(described(folder), described(tmp_path / "theirs"))

    into = nested()
    dcp.load(into, checkpoint_id=folder)
    assert_same(into, state)

    dcp_to_torch_save(folder, tmp_path / "ours.pt")
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    whole = torch.load(tmp_path / "ours.pt", weights_only=False)
    assert_same(whole, torch.load(tmp_path / "theirs.pt", weights_only=False))
    assert whole["optimizer"]["groups"] == [{"lr": 0.1, "params": [0, 1]}]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    flat, wanted = flatten_state_dict(one)[0], flatten_state_dict(other)[0]
    assert flat.keys() == wanted.keys()
    for fqn, each in wanted.items():
        if isinstance(each, torch.Tensor):
            assert flat[fqn].dtype == each.dtype
            assert flat[fqn].shape == each.shape
            assert flat[fqn].flatten().tolist() == each.flatten().tolist()
        else:
            assert flat[fqn] == each


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_equals_what_dcp_writes_for_dtensors(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    state = {
        "m": {
            "sharded": distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]),
            "replicated": distribute_tensor(torch.randn(3), mesh, [Replicate()]),
        }
    }
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    folder = published(tmp_path, state)
    compare(described(folder), described(tmp_path / "theirs"))
    into = {"m": {"sharded": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}}
    dcp.load(into, checkpoint_id=folder)
    assert torch.equal(into["m"]["sharded"].full_tensor(), state["m"]["sharded"].full_tensor())


def test_dcp_reads_a_tensor_from_the_shards_of_three_ranks(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    states = [{"w": whole[2 * rank : 2 * rank + 2].clone(), "same": torch.tensor([7]), "n": 3} for rank in range(3)]
    folder = published(tmp_path, *states, rows={"w": (6, 4)})
    into: dict[str, Any] = {"w": torch.zeros(6, 4), "same": torch.zeros(1, dtype=torch.int64), "n": 0}
    dcp.load(into, checkpoint_id=folder)
    assert torch.equal(into["w"], whole)
    assert (into["same"].item(), into["n"]) == (7, 3)
    stored = described(folder).storage_data
    assert stored[MetadataIndex("same", [0])].relative_path == "__0_0.distcp", "the lowest rank's copy is the one"
    assert stored[MetadataIndex("n")].relative_path == "__0_1.distcp"
    assert [index.index for index in stored if index.fqn == "w"] == [0, 1, 2]


def test_the_order_of_the_sidecars_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    states = [{"w": torch.ones(2, 4), "n": 3} for _ in range(3)]
    for rank, state in enumerate(states):
        shard_of(folder, state, {"w": (6, 4)}, rank, 3)
    sidecars = [decode_sidecar((folder / sidecar_name(rank)).read_bytes()) for rank in range(3)]
    assert len({encode(list(order)) for order in itertools.permutations(sidecars)}) == 1


def test_integers_and_text_of_every_size() -> None:
    numbers = [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**62]
    keys = [-1, -(2**31), -(2**31) - 1, 2**70, 3]
    items = [Item(f"n{n}", ("n", *keys), (n,), (0,), (n,), "int8", None, 0, n, n, 0, n) for n in numbers]
    written = pickle.loads(encode([sidecar_of(0, *items, value("x" * 70_000))]))
    for n in numbers:
        assert written.state_dict_metadata[f"n{n}"].size == torch.Size([n])
        info = written.storage_data[MetadataIndex(f"n{n}", [0])]
        assert (info.offset, info.length) == (n, n)
        assert written.planner_data[f"n{n}"] == ("n", *keys)
    assert MetadataIndex("x" * 70_000) in written.storage_data


def grid(rows: int, columns: int) -> list[Item]:
    return [
        chunk("w", (rows * 2, columns * 3), (row * 2, column * 3), (2, 3))
        for row in range(rows)
        for column in range(columns)
    ]


def encoded(*items: Item) -> bytes:
    return encode([sidecar_of(rank, item, world_size=len(items)) for rank, item in enumerate(items)])


def test_chunks_that_cover_the_tensor_are_accepted() -> None:
    encoded(*grid(4, 5))
    encoded(*reversed(grid(4, 5)))
    encoded(chunk("w", (), (), ()))
    encoded(chunk("w", (0, 4), (0, 0), (0, 4)))
    # Rows of different heights in two columns, and four around a middle, which no straight cut separates.
    encoded(
        *[chunk("w", (6, 2), (at, 0), (size, 1)) for at, size in ((0, 1), (1, 5))],
        *[chunk("w", (6, 2), (at, 1), (size, 1)) for at, size in ((0, 4), (4, 2))],
    )
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    encoded(*[chunk("w", (3, 3), at, size) for at, size in pinwheel])
    # 5 rows on 4 ranks: the last one has none.
    encoded(*[chunk("w", (5,), (at,), (size,)) for at, size in ((0, 2), (2, 2), (4, 1), (5, 0))])


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (grid(4, 5)[:-1], "chunks of 'w' have 114 of its 120 elements"),
        ([*grid(2, 2)[:-1], chunk("w", (4, 6), (1, 3), (2, 3))], "chunks of 'w' overlap.*of rank 1.*of rank 3"),
        ([chunk("w", (4,), (0,), (3,)), chunk("w", (4,), (2,), (3,))], "rank 1 wrote a chunk of 'w' that is outside"),
        ([chunk("w", (4,), (0,), (2,)), chunk("w", (4,), (2,), (2,), "int8")], "'w' is not the same on all.*int8"),
        ([chunk("w", (4,), (0,), (4,)), chunk("w", (5,), (0,), (5,))], r"rank 0 has float32 \[4\].*rank 1 has.*\[5\]"),
        ([chunk("w", (4,), (0,), (4,)), value("w")], "rank 1 has a value that is no tensor"),
        ([chunk("w", (4,), (0,), (0,))], "of 'w' there are only empty shards"),
        ([chunk("w", (4,), (0,), (4,), "os\nsystem")], "no name of a torch.dtype"),
    ],
)
def test_chunks_that_do_not_make_the_tensor_are_refused(items: list[Item], says: str) -> None:
    with pytest.raises(BadSave, match=says):
        encoded(*items)


def test_what_nobody_wrote_is_named_with_who_relied_on_it() -> None:
    sidecars = [sidecar_of(0, value("a"), world_size=2), sidecar_of(1, world_size=2, held=("a", "o.state"))]
    with pytest.raises(BadSave, match=r"rank 1 left 'o\.state' to other ranks"):
        encode(sidecars)


def test_is_fast() -> None:
    items = [chunk(f"layer.{n}.weight", (1024, 64), (16, 0), (16, 64)) for n in range(300)]
    sidecars = [
        sidecar_of(rank, *[chunk(i.fqn, i.shape, (16 * rank, 0), i.sizes) for i in items], world_size=64)
        for rank in range(64)
    ]
    best = min(took(lambda: encode(sidecars)) for _ in range(3))
    assert 64 * 300 / best > 50_000


def took(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def test_this_torch_has_the_classes_that_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    check_against_torch()
    monkeypatch.delattr("torch.distributed.checkpoint.filesystem._StorageInfo")
    with pytest.raises(TorchDiffers, match=r"use torch 2\.8 to 2\.13.*_StorageInfo"):
        check_against_torch()


def test_needs_no_torch() -> None:
    modules = ("dcp_metadata", "publish", "catalog", "prune", "verify", "files")
    code = "".join(f"import perdure.checkpoint_io.{module}\n" for module in modules)
    code += "import sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=30)
