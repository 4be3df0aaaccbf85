"""torch's own ways of checkpointing: `torch.save`, and `torch.distributed.checkpoint` in its five variants."""

import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_method import Method, State, take_over
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class TorchSave(Method):
    """One file per rank, synced inside the call: nobody else would do it later."""

    def save(self, step: int) -> None:
        folder = self.folder_of(step)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{self.place.rank}.pt", "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, step: int, into: State) -> None:
        take_over(torch.load(self.folder_of(step) / f"{self.place.rank}.pt", weights_only=True), into)


class DcpSave(Method):
    def save(self, step: int) -> None:
        dcp.save(self.state, checkpoint_id=self.folder_of(step), process_group=self.place.group)

    def load(self, step: int, into: State) -> None:
        dcp.load(into, checkpoint_id=self.folder_of(step), process_group=self.place.group)


class DcpAsync(DcpSave):
    """Without a stager of our own, one is made and thrown away by every call."""

    writer = AsyncCheckpointerType.THREAD
    options: StagingOptions | None = None

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.stager = None if self.options is None else DefaultStager(self.options)
        self.written: Future[Any] | None = None

    def save(self, step: int) -> None:
        found = dcp.async_save(
            self.state,
            checkpoint_id=self.folder_of(step),
            process_group=self.place.group,
            async_checkpointer_type=self.writer,
            async_stager=self.stager,
        )
        assert isinstance(found, Future), "a stager that stages in the call itself answers with one future"
        self.written = found

    def done(self, step: int) -> bool:
        assert self.written is not None
        if not self.written.done():
            return False
        self.written.result()
        return True

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


def staging(shared_memory: bool) -> StagingOptions:
    """The rest of what a stager can do needs CUDA."""
    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared_memory,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )


class DcpAsyncThreadReused(DcpAsync):
    options = staging(shared_memory=False)


class DcpAsyncProcess(DcpAsync):
    writer = AsyncCheckpointerType.PROCESS


class DcpAsyncProcessShared(DcpAsync):
    writer = AsyncCheckpointerType.PROCESS
    options = staging(shared_memory=True)


METHODS: dict[str, type[Method]] = {
    "torch_save": TorchSave,
    "dcp_save": DcpSave,
    "dcp_async_thread": DcpAsync,
    "dcp_async_thread_reused": DcpAsyncThreadReused,
    "dcp_async_process": DcpAsyncProcess,
    "dcp_async_process_shm": DcpAsyncProcessShared,
}
