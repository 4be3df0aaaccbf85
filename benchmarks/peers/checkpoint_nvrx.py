"""nvidia-resiliency-ext's ways of checkpointing, as a job on CPUs can use them.

"Temporal" writers are forked for each save, "persistent" ones are spawned once. Of version 0.4.1 all of them call
torch.cuda; `checkpoint_worker.py` makes those calls harmless in every process.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_method import Method, Place, State, take_over
from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as planning
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

WRITER_THREADS = 2


class TorchAsync(Method):
    """`TorchAsyncCheckpoint`: torch.save in another process. It syncs nothing."""

    persistent = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.saver = TorchAsyncCheckpoint(persistent_queue=self.persistent)

    def save(self, step: int) -> None:
        folder = self.folder_of(step)
        folder.mkdir(parents=True, exist_ok=True)
        self.saver.async_save(self.state, str(folder / f"{self.place.rank}.pt"))

    def done(self, step: int) -> bool:
        self.saver.finalize_async_save(blocking=False, no_dist=True)
        return self.saver._async_calls_queue.get_num_unfinalized_calls() == 0

    def load(self, step: int, into: State) -> None:
        take_over(torch.load(self.folder_of(step) / f"{self.place.rank}.pt", weights_only=True), into)

    def close(self) -> None:
        self.saver.finalize_async_save(blocking=True, no_dist=True, terminate=True)


class TorchAsyncPersistent(TorchAsync):
    persistent = True


class Queued(Method):
    """Those that hand requests to a queue, which all ranks ask together whether they are done."""

    persistent = False

    def prepare(self, state: State) -> None:
        super().prepare(state)
        self.queue = AsyncCallsQueue(persistent=self.persistent)

    def done(self, step: int) -> bool:
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        return self.queue.get_num_unfinalized_calls() == 0

    def close(self) -> None:
        self.queue.close()


class FileSystem(Queued):
    """`FileSystemWriterAsync`, with its plan cache on, which is its fastest way."""

    def prepare(self, state: State) -> None:
        super().prepare(state)
        planning.init_checkpoint_metadata_cache()

    def save(self, step: int) -> None:
        folder = self.folder_of(step)
        folder.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriterAsync(str(folder), thread_count=WRITER_THREADS)
        planner = dcp.DefaultSavePlanner()
        plan = planning.save_state_dict_async_plan(
            self.state, writer, self.place.group, planner=planner, enable_cache=True
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finish = partial(self.finish, plan)
        self.queue.schedule_async_request(AsyncRequest(function, arguments, [finish], {}, preload))

    def finish(self, plan: tuple[Any, ...]) -> None:
        planning.save_state_dict_async_finalize(*plan)
        dist.barrier(group=self.place.group)  # the coordinator has written the metadata: done for all

    def load(self, step: int, into: State) -> None:
        dcp.load(into, checkpoint_id=self.folder_of(step), process_group=self.place.group)


class FileSystemPersistent(FileSystem):
    persistent = True


class HostState(BasicTensorAwareStateDict):
    """The peer's state dictionary takes CUDA tensors only. A clone is what its copy to the host is to a CPU tensor."""

    def __init__(self, state: State) -> None:
        self.state_dict = dict(state)
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


class Local(Queued):
    """`LocalCheckpointManager` without replication. It syncs nothing, and keeps one save."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.manager = LocalCheckpointManager(place.folder)

    def save(self, step: int) -> None:
        request = self.manager.save(HostState(self.state), step, is_async=True)
        assert request is not None
        self.queue.schedule_async_request(request)

    def load(self, step: int, into: State) -> None:
        latest = self.manager.find_latest()
        assert latest == step, f"the newest local checkpoint is of step {latest}, step {step} was saved last"
        take_over(self.manager.load()[0].state_dict, into)

    def forget(self, step: int) -> None:
        pass  # the manager deletes the save before the newest by itself, and checks that the newest is there


METHODS: dict[str, type[Method]] = {
    "nvrx_torch_temporal": TorchAsync,
    "nvrx_torch_persistent": TorchAsyncPersistent,
    "nvrx_fs_temporal": FileSystem,
    "nvrx_fs_persistent": FileSystemPersistent,
    "nvrx_local": Local,
}
