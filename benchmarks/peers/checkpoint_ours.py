"""perdure's way of checkpointing, in a job without controller and agents.

What the two do to a save is done by `checkpoint_publisher.py`, a process as free of torch as the agent's is: it hears
from each rank that its shard is durable, and publishes. A save counts as done once it is published.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from time import monotonic

import torch.distributed as dist
from checkpoint_method import Method, State

from perdure.checkpoint_io.names import local_name
from perdure.checkpoint_io.restore import Where, restore
from perdure.checkpoint_io.saver import Saver
from perdure.checkpoint_io.saving import Saving
from perdure.checkpoint_io.settings import CheckpointSettings
from perdure.checkpoint_io.turn import Turn
from perdure.protocol.checkpoints import Fact, Resume, SaveId, What

EPOCH, ROUND = 1, 0
PREPARE_S = 60.0
LAYING_OUT = ("perdure-layout", "perdure-staging")
"""The saver's threads that make buffers; the first one starts the second."""


class Ours(Method):
    """The durable tier alone: the same disk as the peers', written once."""

    KNOB = "save"
    """Of CheckpointSettings and of Where: which tier's folder is given."""

    def prepare(self, state: State) -> None:
        super().prepare(state)
        rank, world_size = self.place.rank, self.place.world_size
        self.published = self.place.folder.parent / "published"
        self.saving: Saving | None = None
        pipe = self.place.folder.parent / "told"
        if rank == 0:
            self.place.folder.mkdir(parents=True, exist_ok=True)
            self.published.mkdir()
            os.mkfifo(pipe)
            folder = self.place.folder if self.KNOB == "save" else None
            self.publisher = start_publisher(pipe, folder, self.published, world_size)
        dist.barrier(group=self.place.group)
        self.pipe = os.open(pipe, os.O_RDWR)  # for reading as well: then opening it waits for nobody
        self.saver = Saver(CheckpointSettings(node="here", **{self.KNOB: str(self.place.folder)}), self.tell, note)
        port = int(os.environ["MASTER_PORT"])
        store = partial(dist.TCPStore, "127.0.0.1", port, None, False)
        self.saver.begin(Turn(rank, world_size, EPOCH, ROUND, store=store))
        self.saver.prepare(state)
        wait_ready()

    def tell(self, fact: Fact) -> None:
        """In a thread of the saver's: the rank's part of a save is durable, or is not going to be."""
        if fact.what is What.WRITTEN:
            line = json.dumps({"step": fact.save.step, "rank": fact.rank, "digest": fact.digest.hex()})
            os.write(self.pipe, line.encode() + b"\n")

    def save(self, step: int) -> None:
        self.saving = self.saver.save(step, self.state)

    def done(self, step: int) -> bool:
        if self.saving is None:
            raise RuntimeError(f"step {step} was skipped")
        if self.saving.failures:
            raise RuntimeError(f"step {step} failed: {self.saving.failures}")
        return (self.published / str(step)).exists()

    def load(self, step: int, into: State) -> None:
        digest = bytes.fromhex((self.published / str(step)).read_text())
        save, folder = SaveId(step, EPOCH, ROUND), self.place.folder
        durable = self.KNOB == "save"
        resume = Resume(save, self.place.world_size, digest, durable=durable, local=not durable)
        where = Where(rank=self.place.rank, world_size=self.place.world_size, **{self.KNOB: folder})
        restore(into, resume, where)

    def close(self) -> None:
        self.saver.close()
        if self.place.rank == 0:
            self.publisher.kill()
            self.publisher.wait()


class OursLocal(Ours):
    """The node-local tier alone. Nothing is published: a save is done when all its shards are on the disk."""

    KNOB = "local"

    def forget(self, step: int) -> None:
        shutil.rmtree(self.place.folder / local_name(SaveId(step, EPOCH, ROUND)), ignore_errors=True)


def note(level: str, text: str) -> None:
    print(f"{level}: {text}", file=sys.stderr, flush=True)


def wait_ready() -> None:
    """A job trains for a while before its first save. Here that would be too short a while: wait for the buffers."""
    deadline = monotonic() + PREPARE_S
    for name in LAYING_OUT:
        for thread in [each for each in threading.enumerate() if each.name == name]:
            thread.join(deadline - monotonic())
            if thread.is_alive():
                raise RuntimeError(f"no buffers within {PREPARE_S:.0f} s: {name} is at it still")


def start_publisher(pipe: Path, folder: Path | None, published: Path, world_size: int) -> subprocess.Popen[bytes]:
    """folder: where to publish, if anything is."""
    program = Path(__file__).with_name("checkpoint_publisher.py")
    where = [f"--pipe={pipe}", f"--published={published}", f"--world-size={world_size}"]
    where += [f"--folder={folder}"] if folder is not None else []
    epoch = [f"--epoch={EPOCH}", f"--round={ROUND}"]
    return subprocess.Popen([sys.executable, "-P", str(program), *where, *epoch])


METHODS: dict[str, type[Method]] = {"ours_durable": Ours, "ours_local": OursLocal}
