"""What the machine itself can do with the same bytes, measured by all ranks at once: the limits methods are held to."""

import os
import statistics
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from checkpoint_method import Method, State

COPIES = 3
CHUNK = 16 << 20


class Limits(Method):
    """Copies between two buffers that are both touched; a buffered write, synced; a read of what was just written."""

    def prepare(self, state: State) -> None:
        size = sum(tensor.numel() for tensor in state.values())
        state.clear()
        self.source, self.target = torch.ones(size), torch.zeros(size)

    def measure(self, turn: int) -> dict[str, float]:
        self.place.folder.mkdir(parents=True, exist_ok=True)
        path = self.place.folder / f"limits-{self.place.rank}"
        dist.barrier()
        copies: list[float] = []
        for _ in range(COPIES):
            began = perf_counter()
            self.target.copy_(self.source)
            copies.append(perf_counter() - began)
        dist.barrier()
        began = perf_counter()
        self.write(path)
        disk = perf_counter() - began
        dist.barrier()
        began = perf_counter()
        self.read(path)
        read = perf_counter() - began
        dist.barrier()
        path.unlink()
        return {"copy": statistics.median(copies), "disk": disk, "read": read}

    def write(self, path: Path) -> None:
        left = memoryview(self.source.numpy()).cast("B")
        with open(path, "wb", buffering=0) as file:
            while left:
                left = left[file.write(left[:CHUNK]) :]
            os.fsync(file.fileno())

    def read(self, path: Path) -> None:
        left = memoryview(self.target.numpy()).cast("B")
        with open(path, "rb", buffering=0) as file:
            while left:
                count = file.readinto(left[:CHUNK])
                assert count, f"{path} ends {len(left)} bytes early"
                left = left[count:]


METHODS: dict[str, type[Method]] = {"limits": Limits}
