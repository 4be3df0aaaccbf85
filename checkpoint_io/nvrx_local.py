"""`LocalCheckpointManager` for code written for nvidia-resiliency-ext's local checkpoints, on perdure's own.

Its objects are kept as they are: a TensorAwareStateDict goes in and comes out, and a save is an AsyncRequest for its
queues. Beneath, each is a save like any other: one copy of the tensors in the training thread, then the writer process,
digests, replicas, and the controller's word on what is complete and what to resume from. So nothing here is collective.

What a rank saves is one opaque part, of its own, under names of its own: `nvrx.<rank>.tensors.<number>`, and
`nvrx.<rank>.hollow` for the object without its tensors and their shapes. Only the same rank of a world of the same size
can use it. The object is pickled, and unpickled only if the job itself wrote it (see `restore`).
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..protocol.checkpoints import Resume
from .checkpointer import Checkpointer
from .restore import StateMismatch
from .settings import from_environment

try:
    # By name, as it has no types.
    _core: Any = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    _base: Any = import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager")
except ImportError as error:
    raise ImportError(
        f"perdure.checkpoint_io.nvrx_local needs nvidia-resiliency-ext ({error}): pip install perdure[nvidia]"
    ) from error

__all__ = ["LocalCheckpointManager"]

CheckpointingException: Any = _base.CheckpointingException

WAIT_LIMIT_S = 86_400.0
"""Longer than any save_timeout, after which the writer gives up."""


class _Round(Protocol):
    """What is needed of `perdure.Round`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def resume(self) -> Resume | None: ...
    @property
    def checkpointer(self) -> Checkpointer: ...
    def section(self, name: str) -> AbstractContextManager[None]: ...


class LocalCheckpointManager:
    """Made anew in each round. `partial(LocalCheckpointManager, round)` takes what nvidia-resiliency-ext's does.

    root_local_ckpt_dir: not used; the folder is that of the job, non_persistent_local_ckpt_dir.
    session_id: only comes back in the ids of `load`; jobs are told apart by their folders and journals.
    repl_strategy: must be None; the job's knob `replication` has copies made, in the background.
    """

    def __init__(
        self,
        round: _Round,
        root_local_ckpt_dir: str | os.PathLike[str] | None = None,
        session_id: str = "",
        repl_strategy: object = None,
    ) -> None:
        if repl_strategy is not None:
            raise ValueError(
                f"repl_strategy={type(repl_strategy).__name__}: perdure replicates by itself; leave it out, and set"
                " replication in perdure.toml"
            )
        self._round = round
        self._root = root_local_ckpt_dir
        self._session_id = session_id

    @property
    def local_ckpt_dir(self) -> Path | None:
        """Where this node's saves really are, for messages; without a job, the folder that was given."""
        settings = from_environment(os.environ)
        folder = self._root if settings is None else settings.local
        return None if folder is None else Path(folder)

    def find_latest(self) -> int:
        """The step that all ranks resume from in this round, by the controller's choice; -1 if there is none.

        What is saved in this round counts from the next one on.
        """
        resume = self._round.resume
        return -1 if resume is None else resume.step

    def load(self) -> tuple[Any, tuple[int, int, str]]:
        """This rank's part of the save that `find_latest` names, on the devices that it was on; and its id.

        Raises CheckpointingException if there is none that this rank could use; RestoreError if it cannot be read: let
        that go on, and the next round gets another save.
        """
        rank = self._round.rank
        step = self._refuse_foreign()
        checkpointer = self._round.checkpointer
        # What to allocate is known only from what was saved.
        first = _named(rank, None, None)
        try:
            checkpointer.restore(first)
        except StateMismatch as error:
            raise CheckpointingException(
                f"step {step} holds no part of rank {rank} that a LocalCheckpointManager saved; load it as it was"
                f" saved, with round.checkpointer.restore: {error}"
            ) from error
        specs, _ = _part(first, rank)["hollow"]
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
        whole = _named(rank, tensors, None)
        checkpointer.restore(whole)
        _, state = _part(whole, rank)["hollow"]
        state.insert_tensors(tensors)
        state.restore_tensor_device(non_blocking=False)
        return state, (step, rank, self._session_id)

    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Save this rank's part of `iteration`. What is changed after the call is not saved, and nothing is kept.

        is_async: an AsyncRequest whose work is done already, for whoever adds finalize functions to it and gives it to
        a queue; nothing depends on that. Otherwise None, when this rank's part is durable or has failed.

        A disk that fails raises nothing: the log says what is not saved, or is skipped.
        """
        tensors: Sequence[Tensor] = list(state_dict.pop_tensors())
        try:
            _refuse_sharded(tensors)
            specs = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
            named = _named(self._round.rank, tensors, (specs, state_dict))
            saving = self._round.checkpointer.save(iteration, named)
        finally:
            state_dict.insert_tensors(tensors)
        if is_async:
            # Not None, for which persistent queues wait in vain. All fields by name: versions differ in defaults.
            return _core.AsyncRequest(async_fn=_nothing, async_fn_args=(), async_fn_kwargs={}, finalize_fns=[])
        if saving is not None:
            with self._round.section("checkpointing"):
                saving.wait(WAIT_LIMIT_S)
        return None

    def _refuse_foreign(self) -> int:
        """The step to load, if this rank can have a part of it."""
        resume, now = self._round.resume, self._round.world_size
        if resume is None:
            raise CheckpointingException("there is nothing to load: find_latest() is -1 in this round")
        if resume.world_size != now:
            raise CheckpointingException(
                f"step {resume.step} was saved by {resume.world_size} ranks and this round has {now}: a rank's part is"
                " opaque, so it cannot be resharded. Run with as many ranks as then, or save with"
                " round.checkpointer.save, which any number can restore"
            )
        return resume.step


def _named(rank: int, tensors: Sequence[Tensor] | None, hollow: object) -> dict[str, Any]:
    """A rank's part as a state; without tensors if they are None."""
    part = {"hollow": hollow} if tensors is None else {"tensors": list(tensors), "hollow": hollow}
    return {"nvrx": {str(rank): part}}


def _part(state: dict[str, Any], rank: int) -> dict[str, Any]:
    return state["nvrx"][str(rank)]


def _refuse_sharded(tensors: Sequence[Tensor]) -> None:
    """What ranks hold together is shared out by its name, and here each rank has names of its own."""
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"tensor {number} of shape {tuple(tensor.shape)} is a DTensor: save it with round.checkpointer.save,"
                " which keeps it sharded, or put its to_local() in the state"
            )


def _nothing() -> None:
    """Runs in the queue's process, which has to have something to run."""
