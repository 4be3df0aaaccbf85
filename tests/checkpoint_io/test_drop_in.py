"""The call that stands in for `torch.distributed.checkpoint.async_save`."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from perdure import checkpoint_io
from perdure.checkpoint_io import drop_in

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    drop_in.close()


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000, 7), value), "nested": {"b": torch.full((3,), value), "step": int(value)}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process(tmp_path: Path) -> None:
    futures = []
    for step in range(1, 6):
        state = state_of(step)
        futures.append(checkpoint_io.async_save(state, checkpoint_id=tmp_path / f"step_{step}"))
        state["w"].fill_(-1)
    for future in futures:
        assert future.result(DEADLINE_S) is None
    found = state_of(0)
    dcp.load(found, checkpoint_id=str(tmp_path / "step_3"), no_dist=True)
    assert (found["w"] == 3).all()
    found = state_of(0)
    assert checkpoint_io.load(tmp_path / "step_5", found) is not None
    assert found["nested"]["step"] == 5
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"step_{n}" for n in range(1, 6)]


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="never written over"):
        checkpoint_io.async_save(state_of(1), checkpoint_id=tmp_path)


def test_an_error_comes_out_of_the_future(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    future = checkpoint_io.async_save(state_of(1), checkpoint_id=tmp_path / "file" / "step_1")
    with pytest.raises(OSError, match="file"):
        future.result(DEADLINE_S)


def test_another_process_group_ends_what_the_last_one_left(tmp_path: Path) -> None:
    done = checkpoint_io.async_save(state_of(1), checkpoint_id=tmp_path / "step_1")
    done.result(DEADLINE_S)
    late = checkpoint_io.async_save({"w": torch.ones(3_000_000)}, checkpoint_id=tmp_path / "step_2")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoint_io.async_save(state_of(3), checkpoint_id=tmp_path / "step_3").result(DEADLINE_S)
        assert late.exception(DEADLINE_S) is None or "not every rank had written it" in str(late.exception())
        assert [each.name for each in threading.enumerate()].count("perdure-commit") == 1
    finally:
        drop_in.close()
        dist.destroy_process_group()
    assert "perdure-commit" not in [each.name for each in threading.enumerate()]


RANK = """
    import os, sys, torch, torch.distributed as dist
    import perdure.checkpoint_io as checkpoint_io
    from perdure.checkpoint_io import drop_in
    dist.init_process_group("gloo")
    for step in (1, 2):
        state = {"w": torch.full((1000, 7), float(step)), "mine": {str(dist.get_rank()): torch.ones(5)}}
        future = checkpoint_io.async_save(state, checkpoint_id=f"{sys.argv[1]}/step_{step}")
        state["w"].fill_(-1)
        future.result(30)
        assert os.path.exists(f"{sys.argv[1]}/step_{step}/.metadata")
    drop_in.close()
    dist.destroy_process_group()
"""


def two(script: str, *arguments: str, limit_s: float = 60.0) -> list[tuple[str, int]]:
    """What two ranks say on stderr, and their exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(script), *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RES_OPTIONS": "use-vc",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [(rank.communicate(timeout=limit_s)[1], rank.returncode) for rank in ranks]


def test_two_ranks(tmp_path: Path) -> None:
    ends = two(RANK, str(tmp_path))
    assert [code for _, code in ends] == [0, 0], ends
    found = checkpoint_io.read_back(tmp_path / "step_2")
    assert (found["w"] == 2).all()
    assert set(found["mine"]) == {"0", "1"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_1", "step_2"]


LEAVES = """
    import os, sys, torch, torch.distributed as dist
    from perdure.checkpoint_io import async_save
    folder, how = sys.argv[1:]
    dist.init_process_group("gloo")
    mine = dist.get_rank()
    for step in (1, 2, 3):
        state = {"w": torch.full((1000, 700), float(step))}
        if how == "one cannot" and mine == 1 and step == 3:
            state["hook"] = lambda: 1
        async_save(state, checkpoint_id=f"{folder}/step_{step}")
    dist.destroy_process_group()
"""


def test_who_exits_waits_for_what_is_being_written(tmp_path: Path) -> None:
    ends = two(LEAVES, str(tmp_path), "all well")
    assert [code for _, code in ends] == [0, 0], ends
    assert not any("lost" in said for said, _ in ends), ends
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_1", "step_2", "step_3"]
    assert (checkpoint_io.read_back(tmp_path / "step_3")["w"] == 3).all()


def test_who_exits_says_what_is_lost_and_waits_for_nobody_who_cannot_come(tmp_path: Path) -> None:
    ends = two(LEAVES, str(tmp_path), "one cannot")
    assert [code for _, code in ends] == [0, 1], ends
    assert f"perdure: {tmp_path / 'step_3'} is lost" in ends[0][0]
    assert "rank 1: failed: TypeError: hook, a function" in ends[0][0]
    assert (checkpoint_io.read_back(tmp_path / "step_2")["w"] == 2).all()
    assert not (tmp_path / "step_3").exists()
