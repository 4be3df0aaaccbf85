"""Flat names are DCP's; what could not be read back is refused by name; the signature tells layouts apart."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.checkpoint_io.flatten import Flat, flatten


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def assert_as_dcp(state: dict[Any, Any]) -> None:
    theirs, paths = flatten_state_dict(state)
    ours = flatten(state)
    assert ours.paths == paths
    # The order of paths is the order in which DCP meets them.
    assert list(ours.paths) == list(paths)
    merged = {**ours.tensors, **ours.values}
    assert set(merged) == set(theirs)
    assert all(merged[fqn] is theirs[fqn] for fqn in theirs)
    assert all(isinstance(theirs[fqn], torch.Tensor) == (fqn in ours.tensors) for fqn in theirs)


TENSOR = torch.ones(2)
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just(TENSOR), st.tuples(st.integers()))
keys = st.one_of(st.text("ab", min_size=1, max_size=3), st.integers(0, 9))
states = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
        max_leaves=8,
    ),
    max_size=4,
)


@given(states)
def test_names_and_paths_are_those_of_dcp(state: dict[Any, Any]) -> None:
    try:
        flatten_state_dict(state)
    except ValueError:
        with pytest.raises(ValueError, match="rename a key"):
            flatten(state)
        return
    assert_as_dcp(state)


def test_a_model_and_its_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state: dict[Any, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, 7: "seven"}
    state |= {"rng": torch.get_rng_state(), "empty": {}, "none": None, "lists": [[1, [2]], [[TENSOR]], (1, TENSOR), []]}
    state["others"] = OrderedDict(a=defaultdict(list, b=[{"c": 1}]))
    assert_as_dcp(state)
    flat = flatten(state)
    assert flat.paths["lists.1.0.0"] == ("lists", 1, 0, 0)
    assert flat.paths["7"] == ("7",)
    assert "optimizer.state.0.exp_avg" in flat.tensors


def refused(error: type[Exception], match: str, state: Any) -> None:
    with pytest.raises(error, match=match):
        flatten(state)


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    refused(TypeError, "not a list", [TENSOR])
    refused(TypeError, "not a Linear", torch.nn.Linear(1, 1))
    refused(TypeError, r"'a\.b' has tensors in a set", {"a": {"b": {TENSOR}}})
    refused(TypeError, "'a' has tensors in a set", {"a": (1, [frozenset({TENSOR})])})
    refused(TypeError, r"'a\.s' is a tensor of layout torch.sparse_coo", {"a": {"s": TENSOR.to_sparse()}})
    refused(TypeError, "'m' is on the meta device", {"m": torch.empty(3, device="meta")})
    refused(TypeError, "'w' is a Wrapped", {"w": TENSOR.as_subclass(Wrapped)})
    refused(ValueError, r"'a\.b'.*rename a key", {"a": {"b": 1}, "a.b": TENSOR})
    endless: dict[str, Any] = {}
    endless["me"] = endless
    refused(ValueError, "contains itself", endless)


def test_a_sharded_tensor_is_refused_with_the_way_out(four_ranks: None) -> None:
    sharded = sharded_tensor.empty(ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]), 4)
    refused(TypeError, "'x' is a ShardedTensor.*DTensor", {"x": sharded})


def test_a_dtensor_in_a_tuple_is_refused(four_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    refused(TypeError, "'x' has a DTensor in a tuple", {"x": (tensor,)})


def test_a_tuple_of_tensors_is_a_value_as_with_dcp() -> None:
    assert flatten({"pair": (TENSOR, 1)}).values == {"pair": (TENSOR, 1)}


def signature(**state: Any) -> object:
    made = flatten(state).signature
    hash(made)
    return made


def test_the_signature_is_of_the_layout_and_not_of_the_contents() -> None:
    assert signature(a=torch.ones(2), b=1) == signature(a=torch.zeros(2), b="other")
    assert signature(a=torch.nn.Parameter(torch.ones(2))) == signature(a=torch.ones(2))
    assert signature(a=torch.ones(4).view(2, 2).t()) == signature(a=torch.ones(2, 2))
    different = [
        signature(a=torch.ones(2), b=1),
        signature(a=torch.ones(3), b=1),
        signature(a=torch.ones(2).half(), b=1),
        signature(a=torch.ones(2)),
        signature(a=torch.ones(2), c=1),
        signature(a=1, b=torch.ones(2)),
        signature(a=[torch.ones(2)]),
        signature(a={"0": torch.ones(2)}),
    ]
    assert len(set(different)) == len(different)


def test_the_signature_has_mesh_and_placements_but_keeps_neither(four_ranks: None) -> None:
    mesh, flat_mesh = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    make: Callable[..., DTensor] = DTensor.from_local
    different = [
        signature(a=make(torch.ones(2, 2), mesh, [Replicate(), Shard(0)])),
        signature(a=make(torch.ones(2, 2), mesh, [Shard(0), Replicate()])),
        signature(a=make(torch.ones(2, 2), flat_mesh, [Shard(0)])),
        signature(a=make(torch.ones(4, 2), mesh, [Replicate(), Replicate()])),
        signature(a=torch.ones(4, 2)),
    ]
    assert len(set(different)) == len(different)
    again = signature(a=make(torch.zeros(2, 2), init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]))
    assert again == different[0]
    # A signature outlives the round; a mesh in it would keep a dead process group alive.
    assert "DeviceMesh" not in repr(different)


def test_it_is_fast() -> None:
    """Every save pays for it on the training thread. The limit is many times what it takes, for a busy machine."""
    state = {"model": {f"layers.{number}.weight": torch.empty(2, 3) for number in range(3000)}}
    best = float("inf")
    for _ in range(5):
        began = perf_counter()
        flat: Flat = flatten(state)
        best = min(best, perf_counter() - began)
    assert len(flat.tensors) == 3000
    assert best < 0.1
