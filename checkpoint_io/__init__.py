"""Checkpoints: staged in the training thread, written by another process, committed by the controller.

A training function under `perdure run` has it all in `round.checkpointer`. What is here works without a controller too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["async_save", "load", "read_back"]

if TYPE_CHECKING:
    from .drop_in import async_save
    from .published import load, read_back

_HOMES = {"async_save": "drop_in", "load": "published", "read_back": "published"}
"""Looked up on first use: these need torch, and most of what imports this package must not load it."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
