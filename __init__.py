"""perdure keeps a distributed PyTorch job alive.

This module is the public face and imports nothing heavy: the trainer's names are looked up on first use,
so that the agent and the commands never import torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["NotSupervised", "Round", "RoundInterrupted", "__version__", "require", "resilient"]

if TYPE_CHECKING:
    from perdure.worker_runtime import NotSupervised, Round, RoundInterrupted, require, resilient


def __getattr__(name: str) -> Any:
    if name in __all__:
        import perdure.worker_runtime as runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
