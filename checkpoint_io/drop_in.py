"""`async_save` in the manner of `torch.distributed.checkpoint`, for trainers that call it and need no more than that.

    future = perdure.checkpoint_io.async_save(state, checkpoint_id="/shared/run/step_100")
    ...
    future.result()            # published, on all ranks; or why not

The folder is in `torch_dist` format, appears whole or not at all, and an existing one is never written over. No
collective runs: ranks speak through the store of the default process group, from threads. Buffers and the writer
process stay for the next call. A process that exits waits for what is being written and says what is lost.
"""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..protocol.checkpoints import Fact, Publish, SaveId
from ..protocol.folders import sync_folder
from .alone import Committer
from .files import delete_tree
from .formats import Manifest
from .names import published_name
from .publish import publish
from .saver import Saver
from .settings import CheckpointSettings
from .turn import Turn

LIMIT_S = 1800.0
"""For all ranks to have written a save."""
FAILING_S = 10.0
"""The same, at the exit of a process that has failed: the others may never write theirs, and must hear of it."""


class _Group:
    """One life of the default process group, or of the process where there is none."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.calls = 0
        self.folders: dict[SaveId, Path] = {}
        self.committer = Committer(rank, world_size, None if store is None else store.clone, self._publish, LIMIT_S)
        self.epoch = self._agree_on_epoch()

    def _agree_on_epoch(self) -> int:
        """So that nothing that an earlier life has left in the same folder is taken for this one's."""
        mine = int(time() * 1e6)
        if self.store is None:
            return mine
        return int(self.store.compare_set("perdure/epoch", "", str(mine)).decode())

    def _publish(self, order: Publish) -> Manifest:
        """Publish aside, under our own name, then rename to the caller's."""
        final = self.folders[order.save]
        aside = aside_of(final)
        manifest = publish(aside, order, created=time())
        os.rename(aside / published_name(order.save.step), final)
        sync_folder(final.parent)
        delete_tree(aside)
        return manifest


class _Process:
    """What stays from call to call."""

    lock = threading.Lock()
    saver: Saver | None = None
    turn: Turn | None = None
    group: _Group | None = None
    pid: int | None = None
    """Whose exit is waited at: not that of a forked child."""
    exiting = False


def aside_of(final: Path) -> Path:
    return final.with_name(f"{final.name}.saving")


def async_save(state: Mapping[str, Any], *, checkpoint_id: str | os.PathLike[str]) -> "Future[None]":
    """Begin to save `state` in the folder `checkpoint_id`; returns when it is copied. To be called by all ranks.

    The future is done on each rank when the folder is there, for good; its exception says why it is not. A save that
    is called while two are being written waits for one of them.

    Raises FileExistsError if the folder exists; TypeError or ValueError for a state that cannot be saved.
    """
    final = Path(os.path.abspath(checkpoint_id))
    if final.exists():
        raise FileExistsError(f"{final} exists; a checkpoint is never written over: choose another checkpoint_id")
    with _Process.lock:
        if _Process.pid != os.getpid():
            _Process.pid = os.getpid()
            atexit.register(_at_exit)
        group = _group()
        saver = _saver(group)
        save = SaveId(group.calls, group.epoch, 0)
        group.calls += 1
        group.folders[save] = final
        published = group.committer.expect(save)
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        published.add_done_callback(partial(_pass_on, done=done, final=final))
        published.add_done_callback(lambda _: group.folders.pop(save, None))
        try:
            # None, if it is skipped, needs no care: the committer is told so as well.
            saver.save(save.step, state, into=str(aside_of(final)))
        except BaseException as error:
            group.committer.give_up(save, f"{type(error).__name__}: {error}")
            raise
    return done


def close() -> None:
    """Wait for what is being written, then end the writer process and give the buffers back. The next save makes new
    ones. The exit of the interpreter does the same."""
    _close(LIMIT_S)


def _at_exit() -> None:
    if _Process.pid == os.getpid():
        _Process.exiting = True
        # Set by the interpreter when it has shown an exception that nobody caught.
        _close(FAILING_S if hasattr(sys, "last_type") else LIMIT_S)


def _close(limit_s: float) -> None:
    if _Process.group is not None:
        _Process.group.committer.wait(limit_s)
    with _Process.lock:
        saver, _Process.saver = _Process.saver, None
        group, _Process.group = _Process.group, None
    if saver is not None:
        saver.close()
    if group is not None:
        group.committer.close()


def _pass_on(published: "Future[Manifest | None]", done: "Future[None]", final: Path) -> None:
    error = published.exception()
    if error is None:
        done.set_result(None)
        return
    done.set_exception(error)
    if _Process.exiting:
        # Nobody is left to ask the future.
        print(f"perdure: {final} is lost: {error}", file=sys.stderr)


def _group() -> _Group:
    """The present process group; another one than at the last call begins anew."""
    store: Any = None
    rank, world_size = 0, 1
    if dist.is_available() and dist.is_initialized():
        store = vars(distributed_c10d)["_get_default_store"]()
        rank, world_size = dist.get_rank(), dist.get_world_size()
    group = _Process.group
    if group is None or (group.store, group.rank, group.world_size) != (store, rank, world_size):
        if group is not None:
            # What it has not finished is dropped, as by a new round: its futures say so.
            group.committer.close()
        group = _Process.group = _Group(store, rank, world_size)
    return group


def _saver(group: _Group) -> Saver:
    saver = _Process.saver
    if saver is None:
        settings = CheckpointSettings(node="", on_busy="wait", save_timeout=LIMIT_S)
        saver = _Process.saver = Saver(settings, _tell, _note)
        _Process.turn = None
    turn = _Process.turn
    if turn is None or turn.epoch != group.epoch:
        connect = None if group.store is None else group.store.clone
        _Process.turn = Turn(group.rank, group.world_size, group.epoch, 0, store=connect)
        saver.begin(_Process.turn)
    return saver


def _tell(fact: Fact) -> None:
    if _Process.group is not None:
        _Process.group.committer.tell(fact)


def _note(level: str, text: str) -> None:
    if level != "info":
        warnings.warn(f"perdure: {text}", RuntimeWarning, stacklevel=2)
