"""Folders of torch.distributed.checkpoint: read alone and in place, never without trust. And DTensors of real ranks."""

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.checkpoint_io.foreign import NotTrusted
from perdure.checkpoint_io.names import DCP_METADATA, published_name
from perdure.checkpoint_io.published import load, read_back
from perdure.checkpoint_io.restore import StateMismatch, Where, restore

from .shards import SAVE, part, resume_of, split, whole, write_shard
from .test_restore import Hostile, Mine

FULL = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)


def local_part(rank: int, placements: list[Any], mesh_shape: tuple[int, ...], full: torch.Tensor) -> torch.Tensor:
    """What this rank should hold, by torch.chunk, as Shard is documented."""
    coordinate = [rank // mesh_shape[1], rank % mesh_shape[1]]
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = full.chunk(size, placement.dim)
            full = chunks[at] if at < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


@pytest.fixture
def seat() -> Iterator[Any]:
    """Takes the place of one rank of a world of four, whose collectives do nothing."""

    def take(rank: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        return init_device_mesh("cpu", (2, 2))

    yield take
    if dist.is_initialized():
        dist.destroy_process_group()


def placed(local: torch.Tensor, mesh: Any, placements: list[Any], full: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


@pytest.mark.parametrize(
    "placements",
    [
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ],
)
@pytest.mark.parametrize("source", ["perdure", "dcp"])
def test_dtensors_of_a_mesh_of_four(tmp_path: Path, seat: Any, placements: list[Any], source: str) -> None:
    small = torch.ones(1, 10)
    if source == "dcp":
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"w": FULL, "small": small, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    else:
        parts = split(FULL, 3, dim=1)
        digests = [
            write_shard(tmp_path / published_name(SAVE.step), rank, 3, {"w": parts[rank]}, {"step": 3})
            for rank in range(2)
        ]
        last = {"w": parts[2], **whole({"small": small})}
        digests.append(write_shard(tmp_path / published_name(SAVE.step), 2, 3, last))
    for rank in range(4):
        mesh = seat(rank)
        expected = {name: local_part(rank, placements, (2, 2), full) for name, full in (("w", FULL), ("small", small))}
        state: dict[str, Any] = {"step": 0}
        for name, full in (("w", FULL), ("small", small)):
            state[name] = placed(torch.zeros_like(expected[name]), mesh, placements, full)
        if source == "dcp":
            load(tmp_path, state, trust=True)
        else:
            restore(state, resume_of(digests, durable=True), Where(save=tmp_path))
        for name, tensor in expected.items():
            assert torch.equal(state[name].to_local(), tensor), (rank, name)
        assert state["step"] == 3


def test_what_cannot_be_filled(tmp_path: Path, seat: Any) -> None:
    digest = write_shard(tmp_path / published_name(SAVE.step), 0, 1, {"w": part(FULL, 0, 0, 7)})
    mesh = seat(0)
    state = {"w": placed(torch.zeros_like(FULL), mesh, [Replicate(), Partial()], FULL)}
    with pytest.raises(StateMismatch, match=r"'w' has the placement"):
        restore(state, resume_of([digest], durable=True), Where(save=tmp_path))


def test_a_folder_of_dcp_needs_trust(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        state = {"m": {"w": FULL}, "list": [torch.ones(2), 5], "mine": Mine(2)}
        dcp.save(state, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    for read in (
        lambda trust: load(tmp_path, {"mine": None}, trust=trust),
        lambda trust: read_back(tmp_path, trust=trust),
    ):
        with pytest.raises(NotTrusted, match="trust=True"):
            read(False)
        read(True)
    target: dict[str, Any] = {"m": {"w": torch.zeros_like(FULL)}, "list": [torch.zeros(2), None], "mine": None}
    inner = target["m"]["w"]
    assert load(tmp_path / "iter_0000007", target, trust=True) == 7
    assert torch.equal(inner, FULL)
    assert (target["list"][1], target["mine"]) == (5, Mine(2))
    whole_state = read_back(tmp_path, step=7, trust=True)
    assert torch.equal(whole_state["m"]["w"], FULL)
    assert torch.equal(whole_state["list"][0], torch.ones(2))
    assert whole_state["mine"] == Mine(2)


def test_names_that_are_numbers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3), 7: torch.ones(2), 8: "value"}, checkpoint_id=tmp_path / "here", no_dist=True)
    state: dict[Any, Any] = {"w": torch.zeros(3), 7: torch.zeros(2), 8: None}
    load(tmp_path / "here", state, trust=True)
    assert state[7].tolist() == [1, 1]
    assert (list(state), state[8]) == (["w", 7, 8], "value")


def test_hostile_metadata_is_not_opened_without_trust(tmp_path: Path) -> None:
    import pickle

    made = tmp_path / "made"
    folder = tmp_path / "iter_0000009"
    folder.mkdir()
    (folder / DCP_METADATA).write_bytes(pickle.dumps(Hostile(made)))
    for path in (folder, tmp_path):
        with pytest.raises(NotTrusted):
            load(path, {"a": torch.zeros(1)})
        with pytest.raises(NotTrusted):
            read_back(path)
    assert not made.exists()


RANK = """
    import os, sys
    from datetime import timedelta
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from perdure.checkpoint_io.published import load
    from perdure.checkpoint_io.restore import Where, restore
    from perdure.protocol.checkpoints import Resume, SaveId

    rank, root = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2,
                            timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(70.0).reshape(7, 10)
    def target(dim):
        local = torch.zeros_like(full.chunk(2, dim)[rank])
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride())
    state = {"w": target(1), "step": None}
    restore(state, Resume(SaveId(100, 0xABC, 3), 2, durable=True), Where(save=root))
    assert torch.equal(state["w"].to_local(), full.chunk(2, 1)[rank])
    assert state["step"] == 3
    # Only one of them reads the other folder: whoever used a collective for it would wait for ever.
    if rank:
        state = {"w": target(0)}
        load(root / "dcp", state, trust=True)
        assert torch.equal(state["w"].to_local(), full.chunk(2, 0)[rank])
    dist.barrier()
    dist.destroy_process_group()
"""


def test_two_ranks_read_what_two_ranks_sharded_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / published_name(SAVE.step)
    for rank, (chunk, values) in enumerate(zip(split(FULL, 2), ({"step": 3}, {}), strict=True)):
        write_shard(folder, rank, 2, {"w": chunk}, values)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": FULL}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "use-vc", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.wait(60) == 0, rank.communicate()[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
