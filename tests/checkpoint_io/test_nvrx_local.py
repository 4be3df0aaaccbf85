"""nvidia-resiliency-ext's local checkpoints on our tiers: its own objects and queue, our writer process and folders.

Their BasicTensorAwareStateDict refuses tensors that are not on CUDA; `OnCpu` is it without that.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.checkpoint_io.alone import Committer
from perdure.checkpoint_io.checkpointer import Checkpointer
from perdure.checkpoint_io.names import local_name
from perdure.checkpoint_io.nvrx_local import LocalCheckpointManager
from perdure.checkpoint_io.publish import publish
from perdure.checkpoint_io.restore import RestoreError
from perdure.checkpoint_io.saver import Turn
from perdure.checkpoint_io.settings import VARIABLE, CheckpointSettings
from perdure.protocol.checkpoints import Fact, Resume, SaveId, Tier, What, digest_of_save

DEADLINE_S = 30.0


class OnCpu(BasicTensorAwareStateDict):
    """Their own class, for tensors on the CPU."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        assert not non_blocking
        assert not self.is_hollow


class Ending:
    """Is pickled into a call that makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@dataclass
class Seat:
    """One rank in one round: what the manager needs of `perdure.Round`, with a real checkpointer."""

    checkpointer: Checkpointer
    rank: int = 0
    world_size: int = 1
    resume: Resume | None = None
    index: int = 0
    sections: list[str] = field(default_factory=list)

    def section(self, name: str) -> AbstractContextManager[None]:
        self.sections.append(name)
        return nullcontext()


class Node:
    """All ranks of a world, on one node, in rounds."""

    def __init__(self, root: Path, world_size: int, **knobs: Any) -> None:
        self.facts: list[Fact] = []
        self.notes: list[str] = []
        self.local = root / "local"
        self.settings = CheckpointSettings(**{"node": "n0", "local": str(self.local), **knobs})
        self.checkpointers = [Checkpointer(self.settings, self._tell, self._note) for _ in range(world_size)]
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.committers: list[Committer] = []
        self.rounds = 0

    def _tell(self, fact: Fact) -> None:
        self.facts.append(fact)
        for committer in self.committers:
            committer.tell(fact)

    def _note(self, level: str, text: str) -> None:
        self.notes.append(f"{level}: {text}")

    def _connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.store.port, is_master=False)

    def round(self, resume: Resume | None = None, world_size: int | None = None) -> list[Seat]:
        size = world_size or len(self.checkpointers)
        index, self.rounds = self.rounds, self.rounds + 1
        seats = [Seat(each, rank, size, resume, index) for rank, each in enumerate(self.checkpointers)]
        for seat in seats:
            seat.checkpointer.begin(Turn(seat.rank, size, 7, index, resume=resume, store=self._connect))
        return seats

    def finished(self, step: int, tier: Tier = Tier.LOCAL) -> Resume:
        """What a controller would resume from, once every rank has written `step`."""
        for each in self.checkpointers:
            each.finish()
        written = {fact.rank: fact for fact in self.facts if (fact.save.step, fact.tier) == (step, tier)}
        assert [written[rank].what for rank in range(len(self.checkpointers))] == [What.WRITTEN] * len(written)
        digest = digest_of_save(written[rank].digest for rank in sorted(written))
        local = tier is Tier.LOCAL
        return Resume(written[0].save, len(written), digest, durable=not local, local=local)

    def close(self) -> None:
        for each in (*self.checkpointers, *self.committers):
            each.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(world_size: int = 1, **knobs: Any) -> Node:
        made.append(Node(tmp_path, world_size, **knobs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def model_of(value: float, rows: int = 33) -> dict[str, Any]:
    tensors: list[Any] = [torch.full((64, rows), value), torch.full((5,), value).bfloat16(), torch.empty(0, 3)]
    return {"layers": tensors, "step": int(value), "scalar": torch.tensor(value), "kept": Path("of a class")}


def assert_equal(found: Any, value: float, rows: int = 33) -> None:
    assert type(found) is OnCpu
    assert not found.is_hollow
    expected = model_of(value, rows)
    for ours, theirs in zip(found.tensors, OnCpu(expected).tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert (found.state_dict["step"], found.state_dict["kept"]) == (expected["step"], expected["kept"])


def test_what_was_saved_is_loaded_in_the_next_round(node: Callable[..., Node]) -> None:
    here = node()
    (seat,) = here.round()
    manager = LocalCheckpointManager(seat)
    assert manager.find_latest() == -1
    with pytest.raises(CheckpointingException, match="nothing to load"):
        manager.load()
    for step in range(1, 6):
        state = OnCpu(model_of(step))
        tensors = list(state.tensors)
        manager.save(state, step, is_async=True)
        # It is as it was: theirs would be a copy on the CPU now.
        assert [id(tensor) for tensor in state.tensors] == [id(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(-1)
        state.state_dict["step"] = -1
        resume = here.finished(step)
    assert manager.find_latest() == -1
    (seat,) = here.round(resume)
    manager = LocalCheckpointManager(seat, "/elsewhere", session_id="mine")
    assert manager.find_latest() == 5
    found, part = manager.load()
    assert part == (5, 0, "mine")
    assert_equal(found, 5)
    assert here.notes == []
    # A further save needs no other layout than the one that `load` has prepared.
    manager.save(found, 6)
    assert_equal(LocalCheckpointManager(here.round(here.finished(6))[0]).load()[0], 5)


def save_on_all(seats: list[Seat], step: int, rows: Callable[[int], int] = lambda rank: rank + 2) -> None:
    """At once, as ranks agree on a layout in their first save; in a job each has a process of its own."""

    def save(seat: Seat) -> None:
        LocalCheckpointManager(seat).save(OnCpu(model_of(seat.rank + 1, rows(seat.rank))), step, is_async=True)

    with ThreadPoolExecutor(len(seats)) as threads:
        list(threads.map(save, seats))


def test_each_rank_has_its_own_part(node: Callable[..., Node]) -> None:
    here = node(2)
    save_on_all(here.round(), 4)
    seats = here.round(here.finished(4))
    for rank in (1, 0):
        found, part = LocalCheckpointManager(seats[rank]).load()
        assert part == (4, rank, "")
        assert_equal(found, rank + 1, rank + 2)


def test_another_world_size_is_refused(node: Callable[..., Node]) -> None:
    here = node(2)
    save_on_all(here.round(), 4)
    manager = LocalCheckpointManager(here.round(here.finished(4), world_size=3)[0])
    assert manager.find_latest() == 4
    with pytest.raises(CheckpointingException, match=r"step 4 was saved by 2 ranks and this round has 3"):
        manager.load()


def test_a_save_of_another_kind_is_refused(node: Callable[..., Node]) -> None:
    here = node()
    (seat,) = here.round()
    assert seat.checkpointer.save(2, {"w": torch.ones(3)}) is not None
    with pytest.raises(CheckpointingException, match=r"step 2 holds no part of rank 0"):
        LocalCheckpointManager(here.round(here.finished(2))[0]).load()


def test_from_the_durable_tier(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node(local=None, save=str(tmp_path / "save"))
    (seat,) = here.round()
    here.committers.append(Committer(0, 1, None, partial(publish, tmp_path / "save", created=0.0), DEADLINE_S))
    published = here.committers[0].expect(SaveId(3, 7, 0))
    LocalCheckpointManager(seat).save(OnCpu(model_of(3)), 3, is_async=True)
    assert published.result(DEADLINE_S) is not None
    assert_equal(LocalCheckpointManager(here.round(here.finished(3, Tier.DURABLE))[0]).load()[0], 3)


def test_what_the_job_has_not_committed_is_not_unpickled(node: Callable[..., Node], tmp_path: Path) -> None:
    here = node()
    LocalCheckpointManager(here.round()[0]).save(OnCpu({"w": torch.ones(3), "end": Ending(tmp_path / "made")}), 3)
    resume = here.finished(3)
    for digest in (b"", b"another"):
        with pytest.raises(RestoreError):
            LocalCheckpointManager(here.round(msgspec.structs.replace(resume, digest=digest))[0]).load()
    assert not (tmp_path / "made").exists()


def test_a_flipped_bit_is_found(node: Callable[..., Node]) -> None:
    here = node()
    LocalCheckpointManager(here.round()[0]).save(OnCpu(model_of(3)), 3)
    resume = here.finished(3)
    data = here.local / local_name(resume.save) / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    raw[2000] ^= 1
    data.write_bytes(raw)
    with pytest.raises(RestoreError, match="cannot be restored"):
        LocalCheckpointManager(here.round(resume)[0]).load()
    assert [(fact.what, fact.rank) for fact in here.facts][-1] == (What.BAD, 0)


def test_in_the_foreground(node: Callable[..., Node]) -> None:
    here = node()
    (seat,) = here.round()
    for step in (1, 2):
        assert LocalCheckpointManager(seat).save(OnCpu(model_of(step)), step, is_async=False) is None
        assert [(fact.save.step, fact.what) for fact in here.facts][-1] == (step, What.WRITTEN)
    assert seat.sections == ["checkpointing"] * 2
    # A second time at one step: skipped, with a word, and not waited for.
    assert LocalCheckpointManager(seat).save(OnCpu(model_of(2)), 2) is None
    assert LocalCheckpointManager(seat).save(OnCpu(model_of(2)), 2, is_async=True) is not None
    assert [note for note in here.notes if "step 2 is saved already" in note] == here.notes
    assert len(here.notes) == 2


def test_a_disk_that_fails_raises_nothing(node: Callable[..., Node], tmp_path: Path) -> None:
    (tmp_path / "local").write_text("no folder can be made here")
    here = node()
    assert LocalCheckpointManager(here.round()[0]).save(OnCpu(model_of(2)), 2) is None
    assert [(fact.what, fact.tier) for fact in here.facts] == [(What.FAILED, Tier.LOCAL)]


def test_a_state_that_cannot_be_saved_comes_back_whole(node: Callable[..., Node]) -> None:
    (seat,) = node().round()
    for bad in ({"hook": lambda: None}, {"sparse": torch.eye(3).to_sparse()}):
        state = OnCpu({**model_of(1), **bad})
        with pytest.raises(TypeError, match=r"nvrx\.0\."):
            LocalCheckpointManager(seat).save(state, 1)
        assert not state.is_hollow
        assert len(list(state.tensors)) == 4 + ("sparse" in bad)


def test_a_dtensor_is_refused(node: Callable[..., Node]) -> None:
    (seat,) = node().round()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        make: Callable[..., DTensor] = DTensor.from_local
        state = OnCpu({"w": make(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()])})
        with pytest.raises(TypeError, match=r"tensor 0 of shape \(4,\) is a DTensor: save it with round.checkpointer"):
            LocalCheckpointManager(seat).save(state, 1)
        assert not state.is_hollow
    finally:
        dist.destroy_process_group()


def test_replication_and_the_folder_are_the_jobs(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    here = node()
    make = partial(LocalCheckpointManager, here.round()[0])
    with pytest.raises(ValueError, match=r"repl_strategy=object.*set replication in perdure\.toml"):
        make("/elsewhere", repl_strategy=object())
    assert make("/elsewhere").local_ckpt_dir == Path("/elsewhere")
    assert make().local_ckpt_dir is None
    monkeypatch.setenv(VARIABLE, here.settings.text())
    assert make("/elsewhere").local_ckpt_dir == here.local


def test_without_their_package_the_error_names_the_extra() -> None:
    script = "import sys; sys.modules['nvidia_resiliency_ext'] = None; import perdure.checkpoint_io.nvrx_local"
    command = [sys.executable, "-P", "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: perdure.checkpoint_io.nvrx_local needs nvidia-resiliency-ext")
    assert last.endswith("pip install perdure[nvidia]")


TRAINER = """
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    import perdure
    from perdure.checkpoint_io.nvrx_local import LocalCheckpointManager

    class OnCpu(BasicTensorAwareStateDict):
        def __init__(self, state_dict):
            self.state_dict = state_dict
            self._is_hollow = False
        def restore_tensor_device(self, non_blocking=True):
            pass

    finalized = []

    @perdure.resilient
    def train(round, queue):
        dist.init_process_group("gloo")
        manager = LocalCheckpointManager(round)
        weights = torch.zeros(100, round.rank + 1)
        latest = manager.find_latest()
        if latest != -1:
            state, _ = manager.load()
            weights = state.state_dict["weights"]
        assert (weights == max(latest, 0) * (round.rank + 1)).all()
        Path(f"from-{round.index}-{round.rank}").write_text(str(latest))
        for step in range(max(latest, 0) + 1, 13):
            weights += round.rank + 1
            dist.barrier()
            round.ping(step)
            if (round.index, round.rank, step) == (0, 1, 7):
                raise ValueError("boom")
            if step % 4 == 0:
                assert manager.save(OnCpu({"weights": weights}), step) is None
            elif step % 2 == 0:
                request = manager.save(OnCpu({"weights": weights}), step, is_async=True)
                request.add_finalize_fn(lambda step=step: finalized.append(step))
                if round.rank == 0:
                    queue.schedule_async_request(request)
                else:
                    request.execute_finalize_fns(validate_matching_call_idx=False)
            queue.maybe_finalize_async_calls(no_dist=True)
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        Path(f"finalized-{round.rank}").write_text(" ".join(map(str, finalized)))
        dist.destroy_process_group()

    if __name__ == "__main__":
        queue = AsyncCallsQueue(persistent=True)
        train(queue)
        queue.close()
"""


def test_in_a_job_with_their_queue(tmp_path: Path) -> None:
    """Two ranks, one of them with a queue, whose own collectives need a GPU and are left out."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINER))
    tier = [f"--non-persistent-local-ckpt-dir={tmp_path / 'local'}", "--non-persistent-save-interval=2"]
    command = [str(Path(sys.executable).with_name("perdure")), "run", "--nproc=2", "--on-busy=wait", *tier]
    program = [sys.executable, "-W", "ignore", str(script)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SLURM"))}
    env = {**kept, "RES_OPTIONS": "use-vc", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command += [f"--run-dir={tmp_path / 'run'}", "--", *program]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=90, check=False, **streams)
    assert done.returncode == 0, done.stdout
    assert [(tmp_path / f"from-0-{rank}").read_text() for rank in (0, 1)] == ["-1", "-1"]
    resumed = {int((tmp_path / f"from-1-{rank}").read_text()) for rank in (0, 1)}
    # Step 4 was waited for on both ranks; 6 may have been complete as well.
    assert len(resumed) == 1, done.stdout
    assert resumed <= {4, 6}, done.stdout
    for rank in (0, 1):
        again = ["6"] if resumed == {4} else []
        assert (tmp_path / f"finalized-{rank}").read_text().split() == ["2", "6", *again, "10"]
