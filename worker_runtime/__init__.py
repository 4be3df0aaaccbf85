"""What a trainer embeds: `resilient` around its training function, and the `Round` that the function is given.

Nothing here imports torch; it is used where the trainer has imported it. `agent/`, the parent of the ranks, is apart:
it shares only `beats`.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["NotSupervised", "Round", "RoundInterrupted", "require", "resilient"]

_HOMES = {
    "NotSupervised": "supervision",
    "Round": "round",
    "RoundInterrupted": "interrupt",
    "require": "supervision",
    "resilient": "entry",
}

if TYPE_CHECKING:
    from .entry import resilient
    from .interrupt import RoundInterrupted
    from .round import Round
    from .supervision import NotSupervised, require


def __getattr__(name: str) -> Any:
    # The agent imports `perdure.worker_runtime.beats` and must not pay for the rest.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
