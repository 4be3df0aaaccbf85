"""Filling a state from shards: any layout to any other, every kind of tensor, and clear words for what does not fit."""

import gc
import os
import random
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.checkpoint_io.formats import CHUNK, decode_sidecar, digest_of, encode_sidecar
from perdure.checkpoint_io.names import data_name, local_name, published_name, sidecar_name
from perdure.checkpoint_io.restore import RestoreError, StateMismatch, Where, restore
from perdure.protocol.checkpoints import Resume, Tier, holders_of

from .shards import SAVE, digested, part, resume_of, saved, split, whole, write_shard


class Mine:
    """A class of the user's, in a value."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and other.number == self.number

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def durable(root: Path) -> Path:
    return root / published_name(SAVE.step)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251).to(dtype).reshape(shape)


def test_every_kind_of_tensor_and_value_in_place(tmp_path: Path) -> None:
    tensors = {
        "model.w": numbers(3, 4),
        "model.half": torch.randn(5, 7).bfloat16(),
        "model.scalar": torch.tensor(7.5),
        "model.empty": torch.empty(0, 3),
        "model.bits": torch.tensor([True, False, True]),
        "model.complex": torch.randn(2, 2, dtype=torch.complex64),
        "optimizer.state.0.exp": torch.randn(6, dtype=torch.float64),
    }
    values = {"step": 12, "optimizer.groups.0.betas": (0.9, 0.95), "name": "run", "history": [1, 2, 3], "none": None}
    digest = write_shard(durable(tmp_path), 0, 1, whole(tensors), values)
    state: dict[str, Any] = {
        "model": {name.split(".")[1]: torch.zeros_like(each) for name, each in tensors.items() if "model" in name},
        "optimizer": {
            "state": {0: {"exp": torch.zeros(6, dtype=torch.float64)}},
            "groups": [{"betas": None}],
        },
        **dict.fromkeys(("step", "name", "history"), 0),
        "none": 1,
    }
    before = dict(state["model"])
    done = restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    for name, tensor in before.items():
        assert state["model"][name] is tensor
        assert torch.equal(tensor, tensors[f"model.{name}"])
    assert torch.equal(state["optimizer"]["state"][0]["exp"], tensors["optimizer.state.0.exp"])
    assert state["optimizer"]["groups"][0]["betas"] == (0.9, 0.95)
    assert (state["step"], state["name"], state["history"], state["none"]) == (12, "run", [1, 2, 3], None)
    assert done.shards == ((0, Tier.DURABLE, ""),)


def test_targets_that_are_strided_converted_tied_or_parameters(tmp_path: Path) -> None:
    tensors = {
        "t": numbers(4, 6),
        "f": numbers(8),
        "a": numbers(3),
        "b": numbers(3),
        "p": numbers(2, 2),
        "c": numbers(2),
    }
    digest = write_shard(durable(tmp_path), 0, 1, whole(tensors))
    tied = torch.zeros(3)
    state = {
        "t": torch.zeros(6, 4).t(),
        "f": torch.zeros(16, dtype=torch.float64)[::2],
        "a": tied,
        "b": tied[:],
        "p": torch.nn.Parameter(torch.zeros(2, 2)),
        "c": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    for name, tensor in tensors.items():
        assert torch.equal(state[name].detach().to(torch.complex64), tensor.to(torch.complex64)), name
    assert not state["p"].grad_fn


@pytest.mark.parametrize(("saved_by", "dim"), [(2, 0), (3, 1), (5, 0), (1, 0), (8, 1)])
def test_shards_of_any_world_make_the_whole(tmp_path: Path, saved_by: int, dim: int) -> None:
    full, bias = numbers(7, 9), numbers(5)
    parts = split(full, saved_by, dim)
    digests = [
        write_shard(
            durable(tmp_path), rank, saved_by, {"w": parts[rank], **(whole({"bias": bias}) if rank == 0 else {})}
        )
        for rank in range(saved_by)
    ]
    state = {"w": torch.zeros(7, 9), "bias": torch.zeros(5)}
    restore(state, resume_of(digests, durable=True), Where(save=tmp_path))
    assert torch.equal(state["w"], full)
    assert torch.equal(state["bias"], bias)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_overlapping_chunks_in_any_order(tmp_path: Path, data: st.DataObject) -> None:
    """As on a local tier where every rank keeps all that it holds."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    full = numbers(*shape)
    world = data.draw(st.integers(1, 3))
    folder = tmp_path / f"{random.getrandbits(60):x}"
    seen = torch.zeros(shape, dtype=torch.bool)
    digests: list[bytes] = []
    for rank in range(world):
        dim = data.draw(st.integers(0, len(shape) - 1))
        begin = data.draw(st.integers(0, shape[dim] - 1))
        count = data.draw(st.integers(1, shape[dim] - begin))
        seen.narrow(dim, begin, count).fill_(True)
        digests.append(write_shard(durable(folder), rank, world, {"w": part(full, dim, begin, count)}))
    state = {"w": torch.full(shape, -1.0)}
    if seen.all():
        restore(state, resume_of(digests, durable=True), Where(save=folder))
        assert torch.equal(state["w"], full)
    else:
        with pytest.raises(StateMismatch, match="nobody saved all elements of 'w'"):
            restore(state, resume_of(digests, durable=True), Where(save=folder))


def test_an_item_over_several_chunks_of_a_file(tmp_path: Path) -> None:
    """Each chunk is verified by another thread; the strided target waits for all of them."""
    big = torch.randint(0, 250, (CHUNK * 5 // 2 // 1000, 1000), dtype=torch.uint8)
    digest = write_shard(durable(tmp_path), 0, 1, whole({"first": numbers(9), "big": big, "other": big}))
    state = {"big": torch.zeros_like(big), "other": torch.zeros_like(big.t()).t(), "first": torch.zeros(9).double()}
    done = restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    assert torch.equal(state["big"], big)
    assert torch.equal(state["other"], big)
    assert torch.equal(state["first"], numbers(9).double())
    state = {"big": torch.zeros(big.shape, dtype=torch.int32)}
    restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    assert torch.equal(state["big"], big.int())
    assert done.nbytes == (durable(tmp_path) / "__0_0.distcp").stat().st_size


def test_all_that_does_not_fit_in_one_error_and_nothing_changed(tmp_path: Path) -> None:
    digest = write_shard(
        durable(tmp_path), 0, 1, whole({"a": numbers(3), "b": numbers(2, 2), "t": numbers(2)}), {"v": 1}
    )
    state = {
        "a": torch.zeros(3),
        "b": torch.zeros(2, 3),
        "v": torch.zeros(1),
        "t": 5,
        "new": torch.zeros(1),
        "also": "new",
    }
    with pytest.raises(StateMismatch) as caught:
        restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    text = str(caught.value)
    for words in (r"'b' has shape [2, 3] in the state, and [2, 2] as", "'v' is a tensor", "'t' was saved as a tensor"):
        assert words in text
    assert torch.equal(state["a"], torch.zeros(3))
    fitting = {name: each for name, each in state.items() if name not in "bvt"}
    with pytest.raises(StateMismatch, match=r"(?s)'new' is in the state, and was not saved.*'also' is"):
        restore(fitting, resume_of([digest], durable=True), Where(save=tmp_path))
    assert torch.equal(state["a"], torch.zeros(3))
    assert caught.value.step == SAVE.step


def test_names_that_only_the_save_has_are_ignored(tmp_path: Path) -> None:
    digest = write_shard(durable(tmp_path), 0, 1, whole({"a": numbers(3), "more": numbers(2)}), {"v": 1})
    state = {"a": torch.zeros(3)}
    restored = restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    assert state.keys() == {"a"}
    assert restored.left_out == ()


def test_an_optimizer_without_moments_is_told_of(tmp_path: Path) -> None:
    tensors = {"optimizer.state.0.exp": numbers(3), "optimizer.state.1.exp": numbers(2), "rng-1": numbers(2)}
    digest = write_shard(durable(tmp_path), 0, 1, whole(tensors), {"optimizer.lr": 1, "stateless": 2})
    state: dict[str, Any] = {"optimizer": {"state": {}, "lr": 0}, "other": {}, "stateless": 0}
    restored = restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    assert state["optimizer"]["lr"] == 1
    [text] = restored.left_out
    assert "'optimizer.state' is empty in the state and has 2 entries in the checkpoint" in text


def test_a_class_of_the_users_needs_the_committed_digest_or_trust(tmp_path: Path) -> None:
    digest = write_shard(durable(tmp_path), 0, 1, {}, {"x": Mine(4)})
    resume = resume_of([digest], durable=True)
    state: dict[str, Any] = {"x": None}
    restore(state, resume, Where(save=tmp_path))
    assert state["x"] == Mine(4)
    unknown = Resume(SAVE, 1, durable=True)
    with pytest.raises(RestoreError, match=r"'x' .*Mine.*trust=True"):
        restore({"x": None}, unknown, Where(save=tmp_path))
    restore(state := {"x": None}, unknown, Where(save=tmp_path), trust=True)
    assert state["x"] == Mine(4)


def test_a_hostile_pickle_is_never_run_unless_this_job_wrote_it(tmp_path: Path) -> None:
    made = tmp_path / "made"
    digest = write_shard(durable(tmp_path), 0, 1, {}, {"x": Hostile(made)})
    other = write_shard(durable(tmp_path / "other"), 0, 1, {}, {"x": 5})
    for resume in (Resume(SAVE, 1, durable=True), resume_of([other], durable=True)):
        with pytest.raises(RestoreError):
            restore({"x": None}, resume, Where(save=tmp_path))
        assert not made.exists()
    restore({"x": None}, resume_of([digest], durable=True), Where(save=tmp_path))
    assert made.exists()


def test_a_value_that_was_forged_under_the_digests_of_its_chunks_is_not_unpickled(tmp_path: Path) -> None:
    """They find a flipped bit and no more: whoever wants to can make other bytes that have the same."""
    made, folder = tmp_path / "made", durable(tmp_path)
    write_shard(folder, 0, 1, {}, {"x": 5})
    forged = saved(Hostile(made))
    sidecar = decode_sidecar((folder / sidecar_name(0)).read_bytes())
    item = msgspec.structs.replace(sidecar.items[0], length=len(forged))
    there = msgspec.structs.replace(sidecar, items=(item,), files=(sidecar.files[0], digested(forged)))
    (folder / data_name(0, 1)).write_bytes(forged)
    (folder / sidecar_name(0)).write_bytes(data := encode_sidecar(there))
    for trust in (False, True):
        with pytest.raises(RestoreError, match="x, a value of its file 1, is not what was written"):
            restore({"x": None}, resume_of([digest_of(data)], durable=True), Where(save=tmp_path), trust=trust)
    assert not made.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_state_is_kept(tmp_path: Path, fails: bool) -> None:
    """Else the memory of a model that a trainer lets go would be there until the garbage collector comes by."""
    tensors = {"a": numbers(300, 7), "b": torch.randn(50).double(), "c": numbers(4, 4)}
    digests = [write_shard(durable(tmp_path), rank, 2, whole(tensors), {"x": 5}) for rank in range(2)]
    if fails:
        (durable(tmp_path) / data_name(0, 0)).write_bytes(b"")
        (durable(tmp_path) / data_name(1, 0)).write_bytes(b"")
    gc.collect()
    gc.disable()
    try:
        state: dict[str, Any] = {"a": torch.zeros(300, 7), "b": torch.zeros(50), "c": torch.zeros(4, 4).t(), "x": 0}
        kept = [weakref.ref(each) for each in state.values() if isinstance(each, torch.Tensor)]
        try:
            restore(state, resume_of(digests, durable=True), Where(save=tmp_path))
        except RestoreError:
            assert fails
        del state
        assert [each() for each in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_value_of_a_class_that_is_gone(tmp_path: Path) -> None:
    pickled = b"cno_such_module\nThing\n."
    digest = write_shard(durable(tmp_path), 0, 1, {}, {"x": pickled, "y": b"nonsense"})
    with pytest.raises(RestoreError, match=r"(?s)'x' .*no_such_module|'y' .*cannot be"):
        restore({"x": None, "y": None}, resume_of([digest], durable=True), Where(save=tmp_path))


def test_own_local_shards_are_enough_when_each_rank_keeps_all_it_holds(tmp_path: Path) -> None:
    """Algorithm `atomic`: the local shard has a digest of its own, and nothing else is looked at."""
    state = {"w": torch.zeros(4, 4), "v": 0}
    local = tmp_path / "n1"
    mine = {**whole({"w": numbers(4, 4)})}
    digests = [write_shard(tmp_path / "elsewhere", 0, 2, mine, {"v": 3}, extra=1)]
    digests.append(write_shard(local / local_name(SAVE), 1, 2, mine, {"v": 3}, extra=2))

    resume = resume_of(digests, local=True, durable=True, holders=holders_of((place(0, "n0"),)))
    done = restore(state, resume, Where(save=tmp_path / "gone", local=local, node="n1", fetch=refuse))
    assert torch.equal(state["w"], numbers(4, 4))
    assert state["v"] == 3
    assert done.shards == ((1, Tier.LOCAL, "n1"),)


def place(rank: int, node: str) -> Any:
    from perdure.protocol.checkpoints import Place

    return Place(rank, node, f"tcp://{node}:1")


def refuse(save: object, place: object) -> None:
    raise AssertionError(f"{place} was fetched")
