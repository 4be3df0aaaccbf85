"""Both tiers with saves in every state."""

from pathlib import Path

import pytest

from perdure.checkpoint_io.names import saving_name

from ..checkpoint_io.made_saves import local_save_of, small_shard
from .checkpoint_folders import published, save_of


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """The durable tier with steps 10, 20 and 30, and an unfinished 40."""
    folder = tmp_path / "save"
    for step in (10, 20, 30):
        published(folder, step)
    small_shard(folder / saving_name(save_of(40)), save_of(40), 0, 2)
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The local tier of two nodes: 25 with copies, 35 without, 45 with a shard only."""
    folder = tmp_path / "local"
    for node in ("n0", "n1"):
        local_save_of(folder, node, save_of(25), [0, 1])
    local_save_of(folder, "n0", save_of(35), [0])
    local_save_of(folder, "n1", save_of(35), [1])
    local_save_of(folder, "n1", save_of(45), [1])
    return folder
