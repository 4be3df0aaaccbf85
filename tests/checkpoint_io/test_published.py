"""Reading a published folder without a job."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.checkpoint_io.formats import BadFormat
from perdure.checkpoint_io.names import MANIFEST, data_name, published_name, sidecar_name
from perdure.checkpoint_io.published import load, read_back
from perdure.checkpoint_io.restore import RestoreError, StateMismatch
from perdure.protocol.checkpoints import SaveId

from .shards import flip, publish, split, whole, write_shard
from .test_restore import Hostile, Mine

FULL = torch.arange(63, dtype=torch.float32).reshape(9, 7)


def make(root: Path, step: int, add: float = 0.0, values: dict[str, Any] | None = None) -> Path:
    save = SaveId(step, 5, 1)
    folder = root / published_name(step)
    parts = split(FULL + add, 2)
    given = {"step": step, "groups.0.lr": 0.5, **(values or {})}
    digests = [
        write_shard(folder, 0, 2, {"m.w": parts[0], **whole({"opt.state.0.m": torch.ones(2)})}, given, save=save,
                    paths={"opt.state.0.m": ("opt", "state", "0", "m")}),
        write_shard(folder, 1, 2, {"m.w": parts[1], **whole({"groups.1.t": torch.zeros(0, 2)})}, save=save),
    ]  # fmt: skip
    return publish(root, digests, save)


def test_the_newest_or_the_step_or_the_folder(tmp_path: Path) -> None:
    for step, add in ((100, 0.0), (200, 1.0)):
        make(tmp_path, step, add)
    (tmp_path / published_name(300)).mkdir()
    for arguments, step, add in (
        ((tmp_path, None), 200, 1.0),
        ((tmp_path, 100), 100, 0.0),
        ((tmp_path / published_name(100), None), 100, 0.0),
        ((str(tmp_path / published_name(200)), 200), 200, 1.0),
    ):
        state: dict[str, Any] = {"m": {"w": torch.zeros(9, 7)}, "step": 0}
        assert load(arguments[0], state, step=arguments[1]) == step
        assert torch.equal(state["m"]["w"], FULL + add)
        assert state["step"] == step
    copied = tmp_path / published_name(100)
    copied.rename(tmp_path / "best")
    assert load(tmp_path / "best", {"step": 0}) == 100
    for path, step in (
        (tmp_path, 100),
        (tmp_path, 300),
        (tmp_path / "none", None),
        (tmp_path / published_name(200), 5),
    ):
        with pytest.raises(FileNotFoundError):
            load(path, {"step": 0}, step=step)


def test_read_back_is_the_whole_nested_state(tmp_path: Path) -> None:
    make(tmp_path, 100)
    state = read_back(tmp_path)
    assert torch.equal(state["m"]["w"], FULL)
    assert torch.equal(state["opt"]["state"]["0"]["m"], torch.ones(2))
    assert state["groups"][0] == {"lr": 0.5}
    assert state["groups"][1]["t"].shape == (0, 2)
    assert state["step"] == 100


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = make(tmp_path, 100)
    names = [MANIFEST, *(sidecar_name(rank) for rank in range(2)), data_name(0, 0), data_name(1, 0), data_name(0, 1)]
    for name in names:
        path = folder / name
        good = path.read_bytes()
        for at in (3, len(good) // 2, len(good) - 5):
            flip(path, at)
            with pytest.raises((RestoreError, BadFormat)) as caught:
                load(folder, {"m": {"w": torch.zeros(9, 7)}, "step": 0})
            assert not isinstance(caught.value, StateMismatch), (name, at)
            with pytest.raises((RestoreError, BadFormat)):
                read_back(folder)
            path.write_bytes(good)
    read_back(folder)


def test_classes_need_trust_since_the_digest_lies_with_them(tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = make(tmp_path, 100, values={"mine": Mine(1)})
    with pytest.raises(RestoreError, match=r"'mine'.*Mine.*trust=True"):
        load(folder, {"mine": None})
    load(folder, state := {"mine": None}, trust=True)
    assert state["mine"] == Mine(1)
    assert read_back(folder, trust=True)["mine"] == Mine(1)
    hostile = make(tmp_path / "other", 100, values={"mine": Hostile(made)})
    for read in (lambda: load(hostile, {"mine": None}), lambda: read_back(hostile)):
        with pytest.raises(RestoreError, match="mkdir"):
            read()
    load(hostile, {"step": 0})
    assert not made.exists()


@pytest.mark.parametrize("name", [MANIFEST, sidecar_name(0), sidecar_name(1)])
def test_a_pickle_in_the_place_of_our_own_files_is_not_run(tmp_path: Path, name: str) -> None:
    import pickle

    made = tmp_path / "made"
    folder = make(tmp_path, 100)
    (folder / name).write_bytes(pickle.dumps(Hostile(made)))
    with pytest.raises((RestoreError, BadFormat)):
        load(folder, {"step": 0, "m": {"w": torch.zeros(9, 7)}}, trust=True)
    assert not made.exists()
