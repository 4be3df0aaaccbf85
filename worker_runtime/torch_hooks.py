"""The two places of torch.distributed that are watched while the decorated function is in use.

- `_new_process_group_helper`: what it opens is what an abort has to shut down (see `gloo`). And gloo may lose the wait
  for a send whose connection breaks while it is being written: nothing ends that wait but gloo's own timeout, half an
  hour by default. So gloo's timeout is at most `limit_s`, which lies between the soft and the hard one.
- `_create_c10d_store`: torch's client retries its connection in C++ until its timeout, 5 to 30 minutes, and no signal
  reaches it there. It is asked for short attempts, one after the other, so that an interrupt finds Python in between.

Both are put in place when torch.distributed is there, or when the trainer imports it, and taken back afterwards.
torch is never imported from here.
"""

import functools
import importlib.abc
import importlib.machinery
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, cast

from ..protocol.settings import Settings
from ..protocol.settings_rules import ConfigurationError
from .environment_rules import judge_process_group
from .gloo import Connections

HELPER = ("torch.distributed.distributed_c10d", "_new_process_group_helper")
STORE = ("torch.distributed.rendezvous", "_create_c10d_store")

ATTEMPT_S = 1.0
FIRST_RETRY_S = 0.001
LAST_RETRY_S = 0.2


class TorchHooks(importlib.abc.MetaPathFinder):
    """In place between `install` and `remove`. `connections` are those of the round that runs, if one does."""

    def __init__(self, limit_s: float = math.inf, hard_s: float = math.inf) -> None:
        self.connections: Connections | None = None
        self._limit_s = limit_s
        self._hard_s = hard_s
        self.store_port = 0
        self._makers = {HELPER: self._around_helper, STORE: self._around_store}
        self._originals: dict[tuple[str, str], Callable[..., Any]] = {}

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        for module, _ in self._makers:
            if module in sys.modules:
                self._wrap(sys.modules[module])

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for (module, name), original in self._originals.items():
            setattr(sys.modules[module], name, original)
        self._originals.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the others find the module, and wrap it once it has been executed."""
        if not any(fullname == module for module, _ in self._makers):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._wrap(module)

            spec.loader.exec_module = exec_module
        return spec

    def _wrap(self, module: ModuleType) -> None:
        for key, maker in self._makers.items():
            # An absent name is another version of torch: rounds still work, an abort knows fewer sockets.
            original = getattr(module, key[1], None) if key[0] == module.__name__ else None
            if original is not None and key not in self._originals and self in sys.meta_path:
                self._originals[key] = original
                setattr(module, key[1], maker(original))

    def _around_helper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def helper(*args: Any, **kwargs: Any) -> Any:
            connections = self.connections
            if connections is None:
                return original(*args, **kwargs)
            with connections.opening():
                made = original(*args, **kwargs)
            self._limit(made)
            check_nccl_timeout(made, self._hard_s)
            return made

        return helper

    def _limit(self, made: Any) -> None:
        """Shorten gloo's timeout in a group that was just made: (group, store), or something else in other versions."""
        group: Any = cast(Any, made)[0] if isinstance(made, tuple) else made
        if math.isinf(self._limit_s) or not hasattr(group, "_get_backend"):
            return
        torch: Any = sys.modules["torch"]
        try:
            backend: Any = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            return  # no backend for the CPU: NCCL alone
        limit = timedelta(seconds=self._limit_s)
        if type(backend).__name__ == "ProcessGroupGloo" and backend.options._timeout > limit:
            backend._set_default_timeout(limit)

    def _around_store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(
            hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **kwargs: Any
        ) -> Any:
            if port != self.store_port or rank == 0:
                return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
            deadline = time.monotonic() + timeout.total_seconds()
            while True:
                _wait_until_served(hostname, port, deadline)
                left = max(deadline - time.monotonic(), 0.001)
                attempt = timedelta(seconds=min(ATTEMPT_S, left))
                try:
                    store = original(hostname, port, rank, world_size, attempt, *args, **kwargs)
                except RuntimeError:
                    if time.monotonic() >= deadline:
                        raise
                    continue
                store.set_timeout(timeout)
                return store

        return create


def check_nccl_timeout(made: Any, hard_s: float) -> None:
    """Refuse an NCCL group whose own timeout comes first: torch would end its processes before perdure had acted."""
    group: Any = cast(Any, made)[0] if isinstance(made, tuple) else made
    if math.isinf(hard_s) or not hasattr(group, "_get_backend"):
        return
    torch: Any = sys.modules["torch"]
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return  # no backend for devices
    if type(backend).__name__ == "ProcessGroupNCCL":
        timeout_s = backend.options._timeout.total_seconds()
        if wrong := judge_process_group(timeout_s, Settings(hard_timeout=hard_s)):
            raise ConfigurationError(wrong)


def _wait_until_served(host: str, port: int, deadline: float) -> None:
    """Return when `host:port` accepts a connection, or at the deadline: then torch's own error tells of it."""
    pause = FIRST_RETRY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.001)).close()
            return
        except OSError:
            time.sleep(pause)
            pause = min(pause * 2, LAST_RETRY_S)
