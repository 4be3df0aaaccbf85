"""The methods that `checkpoint.py` compares, each as a crew: the ranks of one job, which measure a save when told to.

A crew that waits for its turn uses no processor: its ranks are blocked in a read.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from harness import PEERS, BenchmarkFailed, Event, Job, free_port

OURS, LIMITS = "ours", "limits"

METHODS = (
    "torch_save",
    "dcp_save",
    "dcp_async_thread",
    "dcp_async_thread_reused",
    "dcp_async_process",
    "dcp_async_process_shm",
    "nvrx_torch_temporal",
    "nvrx_torch_persistent",
    "nvrx_fs_temporal",
    "nvrx_fs_persistent",
    "nvrx_local",
)
"""The peers. What each is, `peers/checkpoint_torch.py` and `peers/checkpoint_nvrx.py` say."""

START_S = 120.0
TURN_S = 60.0
TURN_S_PER_GIB = 90.0
CLOSE_S = 15.0
SHM = "/dev/shm/"


class Case(NamedTuple):
    """tier: which of perdure's own is measured; a peer has but one."""

    ranks: int
    mib: int
    tier: str = "durable"

    def __str__(self) -> str:
        local = " local tier" if self.tier == "local" else ""
        return f"ranks={self.ranks} {self.mib} MiB{local}"

    @property
    def ours(self) -> str:
        return f"{OURS}_{self.tier}"

    @property
    def size(self) -> int:
        return self.mib << 20

    @property
    def patience_s(self) -> float:
        """For one turn. Whoever takes longer is reported as hanging."""
        return TURN_S + TURN_S_PER_GIB * self.mib / 1024


class Turn(NamedTuple):
    """One save, in seconds, of the rank that was slowest in each respect.

    lost: the stall and what the loop lost until the save was done. left: of `durable`, the syncing that the method
    itself had not done. base: of a training step without a save. flight: of the loop while the save was written, in
    `steps` steps. torn: tensors that did not come back as they were when the save was called, over all ranks.
    """

    stall: float
    lost: float
    durable: float
    left: float
    restore: float
    base: float
    flight: float
    steps: int
    torn: int
    tensors: int


class Limits(NamedTuple):
    """What the machine needs for the same bytes, in seconds."""

    copy: float
    disk: float
    read: float


def shared_memory_of(job: Job) -> set[Path]:
    """What its processes have in /dev/shm: semaphores of multiprocessing, which outlive those who are killed."""
    found: set[Path] = set()
    for pid in job.members():
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        found |= {Path(line[line.index(SHM) :]) for line in lines if SHM in line and not line.endswith("(deleted)")}
    return found


def largest(events: Sequence[Event], name: str) -> float:
    return max(event[name] for event in events)


class Crew:
    """The ranks of one job that saves by one method; none of it is left at the end, even if it hangs."""

    def __init__(self, method: str, case: Case) -> None:
        self.method, self.case = method, case
        self.job = Job()
        self.prepared_s = 0.0
        self.nbytes = 0
        self.turns = 0

    def __enter__(self) -> "Crew":
        self.job.__enter__()
        try:
            self.start()
        except BaseException:
            self.job.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shared: set[Path] = set()
        try:
            if error is None:
                self.end()
            shared = shared_memory_of(self.job)
        finally:
            self.job.__exit__(kind, error, trace)
            for path in shared:
                path.unlink(missing_ok=True)

    def start(self) -> None:
        worker = [sys.executable, str(PEERS / "checkpoint_worker.py"), f"--events={self.job.events_file}"]
        worker += [f"--method={self.method}", f"--size={self.case.size}", f"--folder={self.job.folder / 'saves'}"]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.case.ranks)}
        for rank in range(self.case.ranks):
            self.job.start(worker, commands=True, RANK=str(rank), LOCAL_RANK=str(rank), **place)
        self.job.essential = self.job.processes
        ready = self.told("ready", START_S)
        self.prepared_s = largest(ready, "prepare")
        self.nbytes = sum(event["nbytes"] for event in ready)

    def told(self, kind: str, timeout_s: float, **wanted: int) -> list[Event]:
        """What all ranks said of it."""
        what = f"{self.method}: {kind} {wanted or ''}"
        self.job.wait_for(what, lambda: len(self.job.events(kind, **wanted)) == self.case.ranks, timeout_s)
        return self.job.events(kind, **wanted)

    def command(self, text: str) -> None:
        for process in self.job.processes:
            assert process.stdin is not None
            try:
                os.write(
                    process.stdin.fileno(), text.encode() + b"\n"
                )  # past its buffer, which nobody could empty then
            except BrokenPipeError as error:
                raise BenchmarkFailed(f"{self.method}: a rank is gone\n{self.job.tail()}") from error

    def ask(self, save: int) -> list[Event]:
        self.command(f"turn {save}")
        return self.told("turn", self.case.patience_s, save=save)

    def turn(self, save: int) -> Turn:
        said = self.ask(save)
        slowest = {name: largest(said, name) for name in ("stall", "lost", "restore", "base", "flight", "left")}
        return Turn(
            **slowest,
            durable=largest(said, "durable") + slowest["left"],
            steps=max(event["steps"] for event in said),
            torn=sum(event["torn"] for event in said),
            tensors=sum(event["tensors"] for event in said),
        )

    def limits(self) -> Limits:
        self.turns += 1
        said = self.ask(self.turns)
        return Limits(largest(said, "copy"), largest(said, "disk"), largest(said, "read"))

    def end(self) -> None:
        """Let the method close. One that does not in time is killed with the rest: its figures are there already."""
        self.job.essential = []
        with contextlib.suppress(BenchmarkFailed):
            self.command("end")
            self.job.wait_for("end", lambda: not self.job.members(), CLOSE_S)
