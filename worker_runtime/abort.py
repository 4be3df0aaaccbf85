"""Aborting the communicators of one round: an ordered list of steps, each bounded in time, no error of theirs hidden.

User steps come first, then NCCL, then gloo and the store. The steps run once, in whichever thread comes first: the
abort thread when the round is interrupted, the main thread when its own function failed.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from time import monotonic
from typing import Any

from .gloo import Connections
from .gloo_waits import LostWaits

MEANWHILE_S = 0.1
STEP_LIMIT_S = 10.0
"""A step that takes longer is left behind in its thread, and the next one runs."""

Hook = Callable[[], object]
Note = Callable[[str, str], None]


def name_of(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def bounded(hook: Hook, limit_s: float, what: str, meanwhile: Hook | None = None) -> object:
    """Call `hook` in a thread of its own for at most `limit_s`; its result, its exception, or TimeoutError.

    If it takes a while, `meanwhile` is called now and then.
    """
    result: list[object] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(hook())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name=f"perdure-{what}", daemon=True)
    thread.start()
    deadline = monotonic() + limit_s
    while thread.is_alive() and monotonic() < deadline:
        thread.join(min(MEANWHILE_S, limit_s) if meanwhile else limit_s)
        if meanwhile and thread.is_alive():
            meanwhile()
    if error:
        raise error[0]
    if not result:
        raise TimeoutError(f"{what} did not finish within {limit_s:g} s")
    return result[0]


class RoundAbort:
    """The abort of one round."""

    def __init__(self, steps: Sequence[Hook], connections: Connections, note: Note) -> None:
        self._steps = steps
        self._connections = connections
        self._waits = LostWaits()
        self._note = note
        self._lock = threading.Lock()
        self._done = False
        self.seconds = 0.0

    @property
    def quick(self) -> bool:
        """Only sockets to shut down: not worth a thread, which a busy main thread would keep waiting for the GIL."""
        return not self._steps and not _nccl_steps()

    def run(self) -> None:
        """Run the steps, once; whoever comes later waits for them."""
        with self._lock:
            if self._done:
                return
            began = monotonic()
            for step in (*self._steps, *_nccl_steps()):
                self._attempt(step)
            self.again()
            self.seconds = monotonic() - began
            self._done = True

    def again(self) -> None:
        """Repeat what never blocks: a connection may have been opened since the last time, or a wait been lost."""
        try:
            self._connections.shut_down()
            self._waits.end()
        except Exception as error:
            self._note("error", f"abort of gloo failed: {type(error).__name__}: {error}")

    def _attempt(self, step: Hook) -> None:
        name = f"abort step {name_of(step)}"
        try:
            bounded(step, STEP_LIMIT_S, name)
        except BaseException as error:
            self._note("error", f"{name} failed: {type(error).__name__}: {error}")


def _nccl_steps() -> list[Hook]:
    """NCCL's abort, through nvidia-resiliency-ext, where CUDA is in use and process groups exist."""
    # A module that is still being imported is in sys.modules already, without most of its contents.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    distributed: Any = sys.modules.get("torch.distributed")
    if not hasattr(cuda, "is_initialized") or not hasattr(distributed, "is_initialized"):
        return []
    assert cuda is not None
    if not cuda.is_initialized():
        return []
    if not distributed.is_available() or not distributed.is_initialized():
        return []
    return [abort_nccl]


def abort_nccl() -> None:
    """Abort every NCCL communicator, each group in a thread of its own. The main thread destroys the groups later."""
    try:
        theirs: Any = import_module("nvidia_resiliency_ext.inprocess.abort")
    except ImportError as error:
        raise RuntimeError(f"NCCL cannot be aborted without nvidia-resiliency-ext: {error}") from error
    theirs.AbortTorchDistributed.shutdown_all_process_group_backends()
