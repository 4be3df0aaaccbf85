"""Folders that `torch.distributed.checkpoint.save` wrote: read by torch itself, and only if the caller trusts them.

Such a folder says what it holds in `.metadata`, a pickle, and whatever it holds is pickled: to look at it is to run
what its writer wanted. It has no digests either: a flipped bit in it is not found.
"""

import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import default_planner, filesystem, state_dict_loader

from .names import DCP_METADATA

# Torch's annotations of these are incomplete. The last two are what its own converters to torch.save use.
_load: Any = vars(state_dict_loader)["load"]
_load_into: Any = vars(state_dict_loader)["_load_state_dict"]
_TakeAll: Any = vars(default_planner)["_EmptyStateDictLoadPlanner"]


class NotTrusted(PermissionError):
    """Reading the folder would run code out of it, and the caller did not say that it may."""


def is_foreign(folder: Path) -> bool:
    """Whether there is what `dcp.save` commits with. Only to be asked of a folder without a manifest."""
    return (folder / DCP_METADATA).is_file()


def _must_trust(folder: Path, trust: bool) -> None:
    if not trust:
        raise NotTrusted(
            f"{folder} was not written by perdure: reading its {DCP_METADATA}, a pickle, runs code that its writer"
            " chose. If you trust whoever that was, pass trust=True"
        )


def load_foreign(folder: Path, state: MutableMapping[str, Any], *, trust: bool) -> None:
    """Fill `state` in place, this rank alone: no collective, whether a process group exists or not."""
    _must_trust(folder, trust)
    # torch sorts the names at the top level, which must be of one type for that.
    names = {key: str(key) for key in state}
    given = {names[key]: value for key, value in state.items()}
    with warnings.catch_warnings():
        # It warns that it reads in this process alone, which is what it was asked to do.
        warnings.simplefilter("ignore", UserWarning)
        _load(given, checkpoint_id=folder, no_dist=True)
    # It replaces values at the top level in the dict that it is given, and fills nested ones in place.
    for key, name in names.items():
        state[key] = given[name]


def read_foreign(folder: Path, *, trust: bool) -> dict[str, Any]:
    """Everything in the folder, as CPU tensors and values, nested as it was saved."""
    _must_trust(folder, trust)
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        reader = filesystem.FileSystemReader(folder)
        _load_into(state, storage_reader=reader, planner=_TakeAll(), no_dist=True)
    return state
