"""Saves without a controller: rank 0 publishes a save when every rank's shard is written.

For scripts that perdure does not run, and for `torch.distributed.checkpoint`'s way of saving (`drop_in`). Ranks tell
each other through a store, from threads: no collective here either. What a job under `perdure run` has beyond this is
the memory of a controller: fencing by rounds, retention, the choice of a save to resume from.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..protocol.checkpoints import Fact, Publish, SaveId, Tier, What
from .formats import Manifest, digest_of_save

FAILED = "failed: "


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
        self._thread = ThreadPoolExecutor(1, "perdure-commit")
        self._futures: dict[SaveId, Future[Manifest | None]] = {}

    def expect(self, save: SaveId) -> "Future[Manifest | None]":
        """Before the save is given to the writer. The future is done when it is published, by whichever rank."""
        future: Future[Manifest | None] = Future()
        future.set_running_or_notify_cancel()
        self._futures[save] = future
        return future

    def tell(self, fact: Fact) -> None:
        """What a `Saver` tells: from its writer's thread."""
        if fact.tier is Tier.DURABLE and fact.what in (What.WRITTEN, What.FAILED) and fact.save in self._futures:
            self._thread.submit(self._commit, fact, self._futures[fact.save])

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _commit(self, fact: Fact, future: "Future[Manifest | None]") -> None:
        try:
            future.set_result(self._agree(fact))
        except Exception as error:
            future.set_exception(error)
        finally:
            self._futures.pop(fact.save, None)

    def _agree(self, fact: Fact) -> Manifest | None:
        mine = FAILED + fact.why if fact.what is What.FAILED else fact.digest.hex()
        if self._world_size == 1 or self._connect is None:
            return self._publish(fact.save, [mine])
        store = self._store = self._store or self._connect()
        key = f"perdure/save/{fact.save.step}-{fact.save.epoch:x}-{fact.save.round}"
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
