"""Saves without a controller: rank 0 publishes a save when every rank's shard is written.

For scripts that perdure does not run, and for `torch.distributed.checkpoint`'s way of saving (`drop_in`). Ranks tell
each other through a store, from threads: no collective here either. What a job under `perdure run` has beyond this is
the memory of a controller: fencing by rounds, retention, the choice of a save to resume from.

The thread is a daemon, and no pool's: a pool takes nothing more once the interpreter begins to exit, and what is
written by then would never be published.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..protocol.checkpoints import Fact, Publish, SaveId, Tier, What
from .formats import Manifest, digest_of_save

FAILED = "failed: "
HEARD_S = 5.0
"""For all ranks to have read that a save is published: the store may go with rank 0."""


class Committer:
    """One rank's part in publishing what it and the others have written.

    connect: opens a connection to the store that all ranks share; None for a world of one. publish: called on rank 0.
    limit_s: from the first rank that is done to the last. Nothing here blocks but its own thread.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Store] | None,
        publish: Callable[[Publish], Manifest],
        limit_s: float,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._connect = connect
        self._store: Any = None
        self._publisher = publish
        self._limit_s = limit_s
        self._facts: SimpleQueue[Fact | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._futures: dict[SaveId, Future[Manifest | None]] = {}
        """From `expect` until nothing more is to be done for the save."""

    def expect(self, save: SaveId) -> "Future[Manifest | None]":
        """Before the save is given to the writer. The future is done when it is published, by whichever rank."""
        future: Future[Manifest | None] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._futures[save] = future
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="perdure-commit", daemon=True)
            self._thread.start()
        return future

    def tell(self, fact: Fact) -> None:
        """What a `Saver` tells: from its writer's thread."""
        if fact.tier is Tier.DURABLE and fact.what in (What.WRITTEN, What.FAILED) and fact.save in self._futures:
            self._facts.put(fact)

    def give_up(self, save: SaveId, why: str) -> None:
        """This rank cannot even begin to write `save`: the others must not wait for it."""
        self.tell(Fact(save, What.FAILED, Tier.DURABLE, self._rank, "", self._world_size, why=why))

    def wait(self, timeout: float) -> list[SaveId]:
        """Until nothing is left to do; what still is after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._futures, timeout)
            return list(self._futures)

    def close(self) -> None:
        """What was told is seen to; whatever else is expected has failed."""
        if self._thread is not None:
            self._facts.put(None)
            # It may be waiting for a rank that is gone: then it is left behind.
            self._thread.join(HEARD_S)
        with self._changed:
            left = list(self._futures.values())
            self._futures.clear()
        for future in left:
            _settle(future, OSError("not every rank had written it by the end"))

    def _work(self) -> None:
        while (fact := self._facts.get()) is not None:
            future = self._futures.get(fact.save)
            if future is not None:
                self._commit(fact, future)

    def _commit(self, fact: Fact, future: "Future[Manifest | None]") -> None:
        try:
            _settle(future, self._agree(fact))
        except Exception as error:
            _settle(future, error)
        with suppress(RuntimeError, TimeoutError):  # whoever has not heard it in time will not
            self._see_heard(fact.save)
        with self._changed:
            self._futures.pop(fact.save, None)
            self._changed.notify_all()

    def _see_heard(self, save: SaveId) -> None:
        """Rank 0 may be about to leave, and the store with it: see to it that the others have the answer."""
        if self._store is None:
            return
        heard = f"{_key(save)}/heard"
        if self._rank != 0:
            self._store.set(f"{heard}/{self._rank}", "")
            return
        everyone = [f"{heard}/{rank}" for rank in range(1, self._world_size)]
        self._store.wait(everyone, timedelta(seconds=HEARD_S))

    def _agree(self, fact: Fact) -> Manifest | None:
        mine = FAILED + fact.why if fact.what is What.FAILED else fact.digest.hex()
        if self._world_size == 1 or self._connect is None:
            return self._publish(fact.save, [mine])
        store = self._store = self._store or self._connect()
        key = _key(fact.save)
        store.set(f"{key}/{self._rank}", mine)
        deadline = monotonic() + self._limit_s
        if self._rank != 0:
            self._wait(store, [f"{key}/published"], deadline, "rank 0 to publish")
            answer = store.get(f"{key}/published").decode()
            if answer:
                raise OSError(answer)
            return None
        try:
            said = self._collect(store, key, deadline)
            manifest = self._publish(fact.save, said)
        except Exception as error:
            store.set(f"{key}/published", f"{type(error).__name__}: {error}")
            raise
        store.set(f"{key}/published", "")
        return manifest

    def _collect(self, store: Any, key: str, deadline: float) -> list[str]:
        said: list[str] = []
        for rank in range(self._world_size):
            self._wait(store, [f"{key}/{rank}"], deadline, f"rank {rank} to write its shard")
            said.append(store.get(f"{key}/{rank}").decode())
        return said

    def _wait(self, store: Any, keys: list[str], deadline: float, whom: str) -> None:
        try:
            store.wait(keys, timedelta(seconds=max(deadline - monotonic(), 0.001)))
        except RuntimeError as error:  # every error of a store is one
            raise TimeoutError(f"waited {self._limit_s:g} s for {whom}: {error}") from error

    def _publish(self, save: SaveId, said: list[str]) -> Manifest:
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text.startswith(FAILED)]
        if failed:
            raise OSError(f"{save} is not published: {'; '.join(failed[:8])}")
        digest = digest_of_save(bytes.fromhex(text) for text in said)
        return self._publisher(Publish(save, self._world_size, digest))


def _settle(future: "Future[Manifest | None]", outcome: Manifest | Exception | None) -> None:
    with suppress(InvalidStateError):  # closed meanwhile
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _key(save: SaveId) -> str:
    return f"perdure/save/{save.step}-{save.epoch:x}-{save.round}"
