"""Between two rounds: take the process groups down, run the finalize hooks, and decide whether this process is fit for
more.

What fails here makes the process unfit (`Unfit`): it says so and leaves, because a half-cleaned rank would fail the
next round for everybody.
"""

import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from time import monotonic
from typing import Any

from .abort import Hook, bounded, name_of
from .gloo_waits import LostWaits

GROUP_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""Where torch.distributed keeps its groups; destroy_process_group empties the same ones."""

DESTROY_LIMIT_S = 30.0
CHECK_LIMIT_S = 60.0
RELEASE_LIMIT_S = 5.0
RELEASE_LOOK_S = 0.1


class Unfit(Exception):
    """This process must not take part in another round."""


def destroy_groups() -> None:
    """Destroy every process group. They have been aborted, so this does not wait for anybody."""
    distributed: Any = sys.modules.get("torch.distributed")
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or c10d is None:
        return
    _restore_excepthook()
    if not distributed.is_initialized():
        # An initialisation that failed half-way has used up a group name. Ranks that did not get that far would start
        # the next round with another name, and wait for each other under different keys.
        c10d._world.group_count = 0
        # And if it was interrupted between making the group and making it the default one, the name is still taken.
        _release([*c10d._world.pg_map.items()])
        for table in GROUP_TABLES:
            getattr(c10d._world, table, {}).clear()
        return
    # gloo's threads look every 10 ms whether they are to end, and a destructor waits for them. That the next round need
    # not: whoever holds the last reference waits, and that is a thread of its own.
    last = [*c10d._world.pg_map.items()]
    try:
        # It waits for gloo's threads, and one of them may be in a wait that gloo has lost.
        bounded(distributed.destroy_process_group, DESTROY_LIMIT_S, "destroy_process_group", LostWaits().end)
    except Exception as error:
        raise Unfit(f"process groups cannot be destroyed: {type(error).__name__}: {error}") from error
    finally:
        _release(last)


_releasing: list[threading.Thread] = []


def _release(last: list[object]) -> None:
    _releasing[:] = [thread for thread in _releasing if thread.is_alive()]
    thread = threading.Thread(target=last.clear, name="perdure-release", daemon=True)
    thread.start()
    _releasing.append(thread)


def await_released() -> None:
    """Before the process may end: an interpreter that ends under a destructor of gloo aborts."""
    deadline = monotonic() + RELEASE_LIMIT_S
    waits = LostWaits()
    for thread in _releasing:
        while thread.is_alive() and monotonic() < deadline:
            thread.join(RELEASE_LOOK_S)
            waits.end()
    _releasing.clear()


def _restore_excepthook() -> None:
    # Every init_process_group puts its hook around the one that it finds, and nothing ever takes it off again.
    hook = sys.excepthook
    while getattr(hook, "__name__", "") == "_distributed_excepthook":
        inner = inspect.getclosurevars(hook).nonlocals.get("old_hook")
        if inner is None:
            break
        hook = inner
    sys.excepthook = hook


def run_finalize(hooks: Sequence[Hook]) -> None:
    """The user's hooks, in order, in the main thread; then give cached device memory back if that is wanted.

    They are not bounded here: the agent's `barrier_timeout` is what a rank has to come back to the gate.
    """
    for hook in hooks:
        try:
            hook()
        except Exception as error:
            raise Unfit(f"finalize hook {name_of(hook)} failed: {type(error).__name__}: {error}") from error
    torch = sys.modules.get("torch")
    if torch is not None and os.environ.get("PERDURE_EMPTY_CUDA_CACHE") == "1" and torch.cuda.is_initialized():
        import gc

        gc.collect()
        torch.cuda.empty_cache()


class HealthChecks:
    """The user's checks first, then those of nvidia-resiliency-ext where they apply. A check fails by raising or by
    False."""

    def __init__(self, users: Sequence[Callable[[], object]]) -> None:
        self._users = users
        self._built_in: list[tuple[str, Callable[[], object]]] | None = None

    def run(self) -> None:
        for hook in self._users:
            _check(name_of(hook), hook)
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        if self._built_in is None:
            self._built_in = _device_checks(torch)
        for name, check in self._built_in:
            _check(name, check)


def _check(name: str, check: Callable[[], object]) -> None:
    try:
        healthy = bounded(check, CHECK_LIMIT_S, f"health check {name}")
    except Exception as error:
        raise Unfit(f"health check {name} failed: {type(error).__name__}: {error}") from error
    if healthy is False:
        raise Unfit(f"health check {name} failed")


def _device_checks(torch: Any) -> list[tuple[str, Callable[[], object]]]:
    device = torch.cuda.current_device()
    checks: list[tuple[str, Callable[[], object]]] = [("cuda", lambda: torch.cuda.synchronize(device))]
    try:
        theirs: Any = import_module("nvidia_resiliency_ext.shared_utils.health_check")
    except ImportError:
        return checks
    # The classes differ between versions. A NIC's link counter is compared with its first reading, which is taken now.
    for name in ("GPUHealthCheck", "NVLHealthCheck"):
        kind: Any = getattr(theirs, name, None)
        if kind is not None:
            checks.append((name, kind()))
    nic_kind: Any = getattr(theirs, "NicHealthCheck", None)
    if nic_kind is not None:
        nic = nic_kind()
        nic.set_nic_device(int(os.environ["LOCAL_RANK"]))
        nic()
        checks.append(("NicHealthCheck", nic))
    return checks
