"""Which plain tensors and values do all ranks hold? Asked once for each new layout, of the round's store.

Only those may be shared out over the ranks. Every rank counts itself twice: among those whose list has the same digest,
then among all. Who completes the second count knows that the first one is complete too, and writes the answer down for
everybody. If all lists are the same, which is the rule, that makes a handful of store operations for each rank,
whatever the size of the world. If they are not, since a rank has something of its own (the state of its generator),
one rank lays down its list, as short digests, each adds what of it it lacks, and who comes last says that all have.

The answer is always the same on every rank that gets one. A rank that gets none, because another is late or the store
is gone, takes it that nothing is shared: its own plain tensors are then written twice, which is safe. If others had an
answer meanwhile, the rank still writes all that it holds, so nothing is missing.

The store is asked from a thread: torch's client waits in C++, where neither an interrupt of the round nor a deadline
reaches it. It also lets one call at a time through, so the connection should be one that nobody else uses.
"""

import hashlib
import threading
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.distributed import DistNetworkError, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from .flatten import Flat

_PREFIX = "perdure/layout"
_BYTES = 12
"""Of the digest of one entry: enough for no two of a million entries to be taken for each other."""


@dataclass(frozen=True, slots=True)
class Answer:
    """shared: the names of what all ranks hold. why: for the log, why that is not known; then it is empty."""

    shared: frozenset[str]
    why: str = ""


def digests_of_plain(flat: Flat) -> dict[bytes, str]:
    """Names by a digest of name, size, dtype and shape, of what is neither sharded nor replicated by a mesh."""
    plain = [
        (fqn, tensor.numel() * tensor.itemsize, str(tensor.dtype), tuple(tensor.shape))
        for fqn, tensor in flat.tensors.items()
        if not isinstance(tensor, DTensor)
    ]
    values = [(fqn, 0, "", ()) for fqn in flat.values]
    return {hashlib.blake2b(repr(entry).encode(), digest_size=_BYTES).digest(): entry[0] for entry in plain + values}


class _Exchange:
    """Runs in its thread; `answer` is set once, `counted` is how many ranks had come when it was last known."""

    def __init__(self, store: Store, names: dict[bytes, str], world_size: int, prefix: str, deadline_s: float) -> None:
        self._store: Any = store
        self._names = names
        self._world_size = world_size
        self._prefix = prefix
        self._until = monotonic() + deadline_s
        self.answer: Answer | None = None
        self.counted = 0
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.answer = self._ask(self._store)
        except RuntimeError as error:
            # Every error of a store is one, time-outs included.
            self.answer = Answer(
                frozenset(), f"the round's store: {error}" if not self.counted else self._missing(error)
            )
        finally:
            self.done.set()

    def _ask(self, store: Any) -> Answer:
        digest = hashlib.blake2b(b"".join(sorted(self._names)), digest_size=16).hexdigest()
        same_key = f"{self._prefix}/{digest}"
        same = int(store.add(same_key, 1))
        if self._count(store, "all"):
            # All have counted themselves by digest before: the count of mine is final.
            same = int(store.add(same_key, 0))
            store.set(f"{self._prefix}/same", str(same))
        else:
            same = int(self._read(store, "same", "all"))
        if same == self._world_size:
            return Answer(frozenset(self._names.values()))
        return self._compare(store)

    def _compare(self, store: Any) -> Answer:
        """All have come, and not all hold the same."""
        # Whoever is the first: one list is as good as another.
        if int(store.add(f"{self._prefix}/lists", 1)) == 1:
            store.set(f"{self._prefix}/list", b"".join(sorted(self._names)))
        listed = _split(self._read(store, "list", "all"))
        if lacking := [each for each in listed if each not in self._names]:
            store.append(f"{self._prefix}/lacking", b"".join(lacking))
        if self._count(store, "compared"):
            store.append(f"{self._prefix}/lacking", b"")
            store.set(f"{self._prefix}/done", b"")
        else:
            self._read(store, "done", "compared")
        lacked = set(_split(store.get(f"{self._prefix}/lacking")))
        return Answer(frozenset(self._names[each] for each in listed if each not in lacked))

    def _count(self, store: Any, key: str) -> bool:
        """Count this rank among those that have come so far; whether it is the last one."""
        self.counted = int(store.add(f"{self._prefix}/{key}", 1))
        return self.counted == self._world_size

    def _read(self, store: Any, key: str, counter: str) -> bytes:
        """What another rank writes down. counter: of those who have come so far."""
        try:
            store.wait([f"{self._prefix}/{key}"], timedelta(seconds=max(self._until - monotonic(), 0.001)))
        except DistNetworkError:
            # The store is gone, mostly since the round is over. Asked again, it would print a page for each rank.
            raise
        except RuntimeError:
            self.counted = int(store.add(f"{self._prefix}/{counter}", 0))
            raise
        return store.get(f"{self._prefix}/{key}")

    def _missing(self, error: object) -> str:
        return f"{self._world_size - self.counted} of {self._world_size} ranks have not come to this save: {error}"


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + _BYTES] for at in range(0, len(digests), _BYTES)]


def agree(store: Store | None, flat: Flat, *, world_size: int, generation: str, deadline_s: float) -> Answer:
    """Which plain tensors and values all ranks hold. Never raises.

    generation: of which layout this is said, the same on all ranks and never used twice on one store.
    deadline_s: how long the others may take; a second later this returns, whatever the store does.
    """
    names = digests_of_plain(flat)
    if world_size == 1:
        return Answer(frozenset(names.values()))
    if store is None:
        return Answer(frozenset(), "no store to ask the other ranks through")
    exchange = _Exchange(store, names, world_size, f"{_PREFIX}/{generation}", deadline_s)
    threading.Thread(target=exchange.run, name="perdure-agreement", daemon=True).start()
    # A second more: the exchange has the same deadline, and knows better what is missing.
    if not exchange.done.wait(deadline_s + 1.0) or exchange.answer is None:
        return Answer(
            frozenset(), f"the round's store has not answered for {deadline_s:g} s ({exchange.counted} ranks counted)"
        )
    return exchange.answer
