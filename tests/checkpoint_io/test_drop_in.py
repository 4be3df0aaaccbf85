"""The call that stands in for `torch.distributed.checkpoint.async_save`."""

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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


def test_two_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(RANK), str(tmp_path)],
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
    ends = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
    found = checkpoint_io.read_back(tmp_path / "step_2")
    assert (found["w"] == 2).all()
    assert set(found["mine"]) == {"0", "1"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_1", "step_2"]
