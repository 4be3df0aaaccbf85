"""Do all ranks hold the same plain tensors and values? Asked once for each new layout, of the round's store.

Only if they do may these be shared out over the ranks. Every rank counts itself twice: among those whose list has the
same digest, then among all. Who completes the second count knows that the first one is complete too, and writes the
answer down for everybody. That makes a handful of store operations for each rank, whatever the size of the world.

The answer is always the same on every rank that gets one. A rank that gets none, because another is late or the store
is gone, takes it as a no: its own plain tensors are then written twice, which is safe. If others had a yes meanwhile,
the rank still writes all that it holds, so nothing is missing.

The store is asked from a thread: torch's client waits in C++, where neither an interrupt of the round nor a deadline
reaches it. It also lets one call at a time through, so the connection should be one that nobody else uses.
"""

import hashlib
import threading
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from .flatten import Flat

_PREFIX = "perdure/layout"


@dataclass(frozen=True, slots=True)
class Answer:
    """why: why not, for the log; empty if `same`."""

    same: bool
    why: str = ""


def digest_of_plain(flat: Flat) -> str:
    """Of the names, sizes, dtypes and shapes of what is neither sharded nor replicated by a mesh."""
    plain = [
        (fqn, tensor.numel() * tensor.itemsize, str(tensor.dtype), tuple(tensor.shape))
        for fqn, tensor in flat.tensors.items()
        if not isinstance(tensor, DTensor)
    ]
    values = [(fqn, 0, "", ()) for fqn in flat.values]
    return hashlib.blake2b(repr(sorted(plain) + sorted(values)).encode(), digest_size=16).hexdigest()


class _Exchange:
    """Runs in its thread; `answer` is set once, `counted` is how many ranks had come when it was last known."""

    def __init__(self, store: Store, digest: str, world_size: int, generation: str, deadline_s: float) -> None:
        self._store: Any = store
        self._digest = digest
        self._world_size = world_size
        self._prefix = f"{_PREFIX}/{generation}"
        self._until = monotonic() + deadline_s
        self.answer: Answer | None = None
        self.counted = 0
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.answer = self._ask(self._store)
        except RuntimeError as error:
            # Every error of a store is one, time-outs included.
            self.answer = Answer(False, f"the round's store: {error}" if not self.counted else self._missing(error))
        finally:
            self.done.set()

    def _ask(self, store: Any) -> Answer:
        same_key, answer_key = f"{self._prefix}/{self._digest}", f"{self._prefix}/answer"
        same = int(store.add(same_key, 1))
        self.counted = int(store.add(f"{self._prefix}/all", 1))
        if self.counted == self._world_size:
            # All have counted themselves by digest before: the count of mine is final.
            same = int(store.add(same_key, 0))
            store.set(answer_key, str(same))
        else:
            try:
                store.wait([answer_key], timedelta(seconds=max(self._until - monotonic(), 0.001)))
            except RuntimeError:
                self.counted = int(store.add(f"{self._prefix}/all", 0))
                raise
            same = int(store.get(answer_key))
        if same == self._world_size:
            return Answer(True)
        return Answer(False, "not all ranks hold the same plain tensors and values: each writes its own")

    def _missing(self, error: object) -> str:
        return f"{self._world_size - self.counted} of {self._world_size} ranks have not come to this save: {error}"


def agree(store: Store | None, flat: Flat, *, world_size: int, generation: str, deadline_s: float) -> Answer:
    """Whether all ranks hold the same plain tensors and values. Never raises.

    generation: of which layout this is said, the same on all ranks and never used twice on one store.
    deadline_s: how long the others may take; a second later this returns, whatever the store does.
    """
    if world_size == 1:
        return Answer(True)
    if store is None:
        return Answer(False, "no store to ask the other ranks through")
    exchange = _Exchange(store, digest_of_plain(flat), world_size, generation, deadline_s)
    threading.Thread(target=exchange.run, name="perdure-agreement", daemon=True).start()
    # A second more: the exchange has the same deadline, and knows better what is missing.
    if not exchange.done.wait(deadline_s + 1.0) or exchange.answer is None:
        return Answer(
            False, f"the round's store has not answered for {deadline_s:g} s ({exchange.counted} ranks counted)"
        )
    return exchange.answer
