"""A nested state dict as flat names: which tensors there are, which other values, and a signature of the whole.

Names and paths are those of `torch.distributed.checkpoint`'s own flattening, so that `dcp.load` finds what we saved:
- mappings are entered, an empty one leaves nothing behind; keys become strings, joined by dots;
- a list is entered if a tensor or a mapping is in it, or in a list inside it; otherwise it is one value;
- everything else, tuples included, is one value.

It runs on the training thread at every save, so it looks at each tensor once and at values only as far as needed to
refuse what could not be read back. The signature holds no tensor, mesh or process group: it may outlive a round.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Path = tuple[str | int, ...]

_AS_THEY_ARE = frozenset({Tensor, torch.nn.Parameter})
_LEAVES = frozenset({int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


@dataclass(frozen=True, slots=True)
class Flat:
    """One state, flattened. paths: of tensors and of values.

    signature: equal for two states exactly if one layout serves both: names, dtypes, shapes, meshes, placements.
    """

    tensors: dict[str, Tensor]
    values: dict[str, object]
    paths: dict[str, Path]
    signature: Hashable


class _Walk:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, object] = {}
        self.paths: dict[str, Path] = {}

    def mapping(self, prefix: str, path: Path, value: Mapping[Any, object]) -> None:
        for key, each in value.items():
            name = str(key)
            self.visit(prefix + name, (*path, name), each)

    def visit(self, fqn: str, path: Path, value: object) -> None:
        if isinstance(value, Tensor):
            if fqn in self.paths:
                raise _twice(fqn, self.paths[fqn], path)
            _refuse_tensor(fqn, value)
            self.tensors[fqn] = value
            self.paths[fqn] = path
        elif isinstance(value, Mapping):
            self.mapping(f"{fqn}.", path, cast("Mapping[Any, object]", value))
        elif isinstance(value, list) and not _is_whole(cast("list[object]", value)):
            for number, each in enumerate(cast("list[object]", value)):
                self.visit(f"{fqn}.{number}", (*path, number), each)
        else:
            if fqn in self.paths:
                raise _twice(fqn, self.paths[fqn], path)
            _refuse_hidden(fqn, cast("object", value))
            self.values[fqn] = value
            self.paths[fqn] = path


def _twice(fqn: str, one: Path, other: Path) -> ValueError:
    return ValueError(
        f"two entries of the state have the flattened name {fqn!r}: {one} and {other}; a checkpoint could hold only one"
        " of them, so rename a key"
    )


def _is_whole(values: list[object]) -> bool:
    """Whether a list is one value: no tensor and no mapping in it or in its lists."""
    # By type first: long lists of numbers are common (samplers, generators), and have one type.
    for kind in set(map(type, values)):
        if issubclass(kind, Tensor | Mapping):
            return False
        if issubclass(kind, list) and not all(
            _is_whole(cast("list[object]", each)) for each in values if isinstance(each, list)
        ):
            return False
    return True


def _refuse_tensor(fqn: str, tensor: Tensor) -> None:
    """Only what lies in memory as plain numbers can be copied as bytes."""
    kind = type(tensor)
    if kind not in _AS_THEY_ARE and not issubclass(kind, DTensor):
        _refuse_kind(fqn, kind)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{fqn!r} is a tensor of layout {tensor.layout}; only dense ones can be saved: use to_dense()")
    if tensor.is_meta:
        raise TypeError(f"{fqn!r} is on the meta device and has no data to save; materialize it first")


def _refuse_kind(fqn: str, kind: type[Tensor]) -> None:
    if any(base.__name__ == "ShardedTensorBase" for base in kind.__mro__):
        raise TypeError(
            f"{fqn!r} is a ShardedTensor, which perdure does not save; use DTensor (with FSDP: fully_shard, or"
            " a state dict of torch.distributed.checkpoint.state_dict.get_state_dict)"
        )
    # Functions compared through their classes: whoever overrides it decides by itself what its bytes are.
    if getattr(kind, "__torch_dispatch__", None) is not getattr(Tensor, "__torch_dispatch__", None):
        raise TypeError(
            f"{fqn!r} is a {kind.__name__}, which wraps its data in a way of its own; save plain tensors or DTensors"
        )


def _refuse_hidden(fqn: str, value: object) -> None:
    """A value is pickled whole. Tensors that would be wrong or unreadable then are refused."""
    if type(value) in _LEAVES:
        return
    holder = type(value).__name__
    inside: Iterable[object]
    if isinstance(value, Mapping):
        inside = cast("Mapping[object, object]", value).values()
    elif isinstance(value, tuple | list | set | frozenset):
        inside = cast("Iterable[object]", value)
    else:
        return
    in_set = isinstance(value, set | frozenset)
    kinds = set(map(type, inside))
    if kinds <= _LEAVES:
        return
    for kind in kinds:
        if not issubclass(kind, Tensor):
            continue
        if in_set:
            raise TypeError(f"{fqn!r} has tensors in a set, which has no order to load them by; use a list or a dict")
        if kind not in _AS_THEY_ARE:
            raise TypeError(f"{fqn!r} has a {kind.__name__} in a {holder}; put it in a list or a dict")
    for each in inside:
        _refuse_hidden(fqn, each)


def _signature(walk: _Walk) -> Hashable:
    meshes: dict[int, Hashable] = {}
    paths = walk.paths
    entries: list[Hashable] = []
    for fqn, tensor in walk.tensors.items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            placed = meshes.get(id(mesh))
            if placed is None:
                placed = meshes[id(mesh)] = _plain(mesh)
            local = tensor.to_local()
            entries.append((paths[fqn], tensor.dtype, tensor.shape, local.shape, placed, tensor.placements))
        else:
            entries.append((paths[fqn], tensor.dtype, tensor.shape))
    return (tuple(entries), tuple(paths[fqn] for fqn in walk.values))


def _plain(mesh: DeviceMesh) -> Hashable:
    ranks = mesh.mesh
    return (tuple(ranks.shape), tuple(cast("list[int]", ranks.flatten().tolist())))  # pyright: ignore[reportUnknownMemberType]


def flatten(state: Mapping[Any, object]) -> Flat:
    """Raises TypeError for what cannot be saved, ValueError for two entries of one name or a state without an end."""
    # Any object may arrive here: users call it through `save`.
    if not isinstance(cast("object", state), Mapping):
        raise TypeError(f"a state to save is a mapping (a dict) of names to values, not a {type(state).__name__}")
    walk = _Walk()
    try:
        # Without gradients the local part of a DTensor is had as it is, and a hundred times faster.
        with torch.no_grad():
            walk.mapping("", (), state)
            signature = _signature(walk)
    except RecursionError as error:
        raise ValueError("the state is nested too deeply, or contains itself") from error
    return Flat(walk.tensors, walk.values, walk.paths, signature)
