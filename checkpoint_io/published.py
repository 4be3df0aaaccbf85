"""Reading a published checkpoint without a job: in a script, a test, a tool.

A folder of perdure is read by its manifest and sidecars, none of which is pickle, and every byte is verified. That they
fit each other says that the folder is whole, not who wrote it: so a value of the user's own class needs `trust=True`
here. A folder of `torch.distributed.checkpoint` needs it for anything, see `foreign`.
"""

import os
from collections.abc import MutableMapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from ..protocol.checkpoints import Resume, SaveId
from .catalog import newest_usable, read_manifest
from .foreign import is_foreign, load_foreign, read_foreign
from .formats import BadFormat
from .names import MANIFEST, published_name, published_step
from .restore import fill, read
from .sources import BadShard, RestoreError, Sources, Where
from .targets import dtype_of

__all__ = ["load", "read_back"]


def load(
    path: str | os.PathLike[str], state: MutableMapping[str, Any], *, trust: bool = False, step: int | None = None
) -> int | None:
    """Fill `state` in place from a checkpoint; its step, or None if nothing says which that is.

    path: one checkpoint (`iter_0000100`), or the folder that they are in: then `step`, or the newest good one. Each
    rank calls this by itself; the world need not be that which saved. trust: unpickle whatever is in it.

    Raises FileNotFoundError, BadFormat, StateMismatch, RestoreError, NotTrusted.
    """
    folder = _folder(Path(path), step)
    if not (folder / MANIFEST).exists() and is_foreign(folder):
        load_foreign(folder, state, trust=trust)
        return published_step(folder.name)
    sources = _sources(folder)
    fill(state, sources, trust=trust, known=False)
    return sources.resume.step


def read_back(path: str | os.PathLike[str], *, trust: bool = False, step: int | None = None) -> dict[str, Any]:
    """Everything in a checkpoint, as whole CPU tensors and values, nested as it was saved; keys are strings.

    Arguments and errors are those of `load`.
    """
    folder = _folder(Path(path), step)
    if not (folder / MANIFEST).exists() and is_foreign(folder):
        return read_foreign(folder, trust=trust)
    paths, tensors = _allocated(_sources(folder))
    sources = _sources(folder)
    _, values = read(tensors, paths.keys() - tensors.keys(), sources, trust=trust, known=False)
    state: dict[str, Any] = {}
    for fqn, place in paths.items():
        _nest(state, place, tensors[fqn] if fqn in tensors else values[fqn])
    return state


def _allocated(sources: Sources) -> tuple[dict[str, tuple[str | int, ...]], dict[str, torch.Tensor]]:
    """By name, all that a save has: where it is in the nested state, and memory for it if it is a tensor."""
    paths: dict[str, tuple[str | int, ...]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for rank in range(sources.resume.world_size):
        shard = sources.present(rank)
        for item in shard.sidecar.items if shard is not None else ():
            paths.setdefault(item.fqn, item.path)
            if item.offsets is not None and item.fqn not in tensors:
                try:
                    tensors[item.fqn] = torch.empty(item.shape, dtype=dtype_of(item.dtype))
                except BadShard as error:
                    raise RestoreError(sources.resume.save, [f"{shard}: {error}"]) from error
    if lost := sources.lost():
        raise RestoreError(sources.resume.save, lost)
    return paths, tensors


def _folder(path: Path, step: int | None) -> Path:
    """Which folder is meant by a path and a step."""
    if (path / MANIFEST).exists() or is_foreign(path):
        if step is not None and path.name != published_name(step):
            raise FileNotFoundError(f"{path} is one checkpoint, and not {published_name(step)}")
        return path
    if step is None:
        step = newest_usable(path)
    if step is None:
        raise FileNotFoundError(f"{path} is no checkpoint, and no complete one is in it")
    folder = path / published_name(step)
    if not (folder / MANIFEST).exists() and not is_foreign(folder):
        raise FileNotFoundError(f"{folder} is no complete checkpoint: it has neither {MANIFEST} nor DCP's .metadata")
    return folder


def _sources(folder: Path) -> Sources:
    try:
        manifest = read_manifest(folder)
        digest = bytes.fromhex(manifest.digest)
    except (BadFormat, ValueError) as error:
        raise BadFormat(f"{folder / MANIFEST}: {error}") from error
    save = SaveId(manifest.step, manifest.epoch, manifest.round)
    resume = Resume(save, manifest.world_size, digest, durable=True)
    return Sources(resume, Where(), durable=folder)


def _nest(state: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    """Put `value` at `path`; a number counts in a list."""
    inside: Any = state
    for key, following in pairwise(path):
        inside = _enter(inside, key, [] if isinstance(following, int) else {})
    _set(inside, path[-1], value)


def _enter(inside: Any, key: str | int, new: Any) -> Any:
    if isinstance(key, int):
        known = cast("list[Any]", inside)
        found = known[key] if key < len(known) else None
    else:
        found = cast("dict[str, Any]", inside).get(key)
    if found is None:
        found = new
        _set(inside, key, found)
    return found


def _set(inside: Any, key: str | int, value: object) -> None:
    if isinstance(key, int):
        inside.extend([None] * (key + 1 - len(inside)))
    inside[key] = value
