"""Saving as a training function does it, with the real writer process and real folders, and no controller."""

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from perdure.checkpoint_io.alone import Committer
from perdure.checkpoint_io.catalog import newest_usable
from perdure.checkpoint_io.formats import Manifest, decode_sidecar
from perdure.checkpoint_io.names import published_name
from perdure.checkpoint_io.publish import publish
from perdure.checkpoint_io.published import load, read_back
from perdure.checkpoint_io.saver import Saver, Turn
from perdure.checkpoint_io.settings import CheckpointSettings
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What

DEADLINE_S = 30.0


class Rank:
    """One rank's saver with its committer, and all that they tell."""

    def __init__(
        self, root: Path, rank: int = 0, world_size: int = 1, store: Callable[[], Any] | None = None, **knobs: Any
    ):
        self.root = root
        self.facts: list[Fact] = []
        self.notes: list[str] = []
        self.committer = Committer(rank, world_size, store, partial(publish, root, created=0.0), DEADLINE_S)
        settings = CheckpointSettings(**{"node": "n0", "save": str(root), **knobs})
        self.saver = Saver(settings, self._tell, lambda level, text: self.notes.append(f"{level}: {text}"))
        self.turn = Turn(rank, world_size, 7, 0, store=store)
        self.saver.begin(self.turn)

    def _tell(self, fact: Fact) -> None:
        self.facts.append(fact)
        self.committer.tell(fact)

    def publish(self, step: int, state: dict[str, Any]) -> Any:
        """Save, spoil the state at once, and hand out what is to be waited for."""
        future = self.committer.expect(SaveId(step, self.turn.epoch, self.turn.round))
        assert self.saver.save(step, state) is not None, self.notes
        return future

    def saved(self, step: int, state: dict[str, Any]) -> Manifest | None:
        return self.publish(step, state).result(DEADLINE_S)

    def writer_pid(self) -> int:
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        return next(pid for pid in pids if b"checkpoint_io.writer" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def close(self) -> None:
        self.saver.close()
        self.committer.close()


@pytest.fixture
def ranks() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(*args: Any, **knobs: Any) -> Rank:
        made.append(Rank(*args, **knobs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def state_of(value: float, tensors: int = 5) -> dict[str, Any]:
    model = {f"layer.{n}": torch.full((64, 33), value) for n in range(tensors)}
    return {"model": model, "optimizer": {"lr": value, "groups": [{"params": [0, 1]}]}, "step": int(value)}


def spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        tensor.fill_(-1.0)
    state["optimizer"]["lr"] = -1.0
    state["step"] = -1


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_is_changed_after_the_call_is_not_saved(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    for step in range(1, 21):
        state = state_of(step)
        future = rank.publish(step, state)
        spoil(state)
        assert future.result(DEADLINE_S).step == step
        found = read_back(tmp_path / published_name(step))
        assert torch.equal(found["model"]["layer.3"], torch.full((64, 33), float(step)))
        assert found["optimizer"] == {"lr": step, "groups": [{"params": [0, 1]}]}
        assert found["step"] == step
    assert rank.notes == []


def test_the_layout_follows_the_state(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    for step, tensors in enumerate((2, 9, 9, 1), 1):
        state = {**state_of(step, tensors), "more": torch.arange(tensors)}
        future = rank.publish(step, state)
        spoil(state)
        future.result(DEADLINE_S)
        found = read_back(tmp_path, step=step)
        assert len(found["model"]) == tensors
        assert found["more"].tolist() == list(range(tensors))
        assert all((tensor == step).all() for tensor in found["model"].values())


def test_nothing_of_the_trainers_is_kept(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    state = state_of(1)
    tensors = [weakref.ref(tensor) for tensor in state["model"].values()]
    rank.saver.prepare(state)
    rank.saved(1, state)
    del state
    gc.collect()
    assert [ref() for ref in tensors] == [None] * 5


def test_busy_is_skipped_or_waited_for(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    rank.saved(1, state_of(1))
    with stopped(rank.writer_pid()):
        futures = [rank.publish(step, state_of(step)) for step in (2, 3)]
        assert rank.saver.save(4, state_of(4)) is None
        assert rank.facts[-1].what is What.FAILED
        assert rank.facts[-1].why == "skipped: both buffers are in use (being written: step 2, 3)"
        assert [(f.save.step, f.what, f.tier) for f in rank.facts[1:]] == [(4, What.FAILED, Tier.DURABLE)]
    assert [future.result(DEADLINE_S).step for future in futures] == [2, 3]
    rank.saved(5, state_of(5))
    waiting = ranks(tmp_path, on_busy="wait")
    waiting.saver.begin(Turn(0, 1, 8, 0))
    waiting.turn = Turn(0, 1, 8, 0)
    waiting.saved(6, state_of(6))
    for step in range(7, 15):
        assert waiting.saver.save(step, state_of(step)) is not None
    assert waiting.saver.finish(DEADLINE_S) == []


def test_what_cannot_be_saved_costs_no_buffer(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    for step in range(1, 5):
        with pytest.raises(TypeError, match=r"optimizer\.hook"):
            rank.saver.save(step, {"w": torch.ones(3), "optimizer": {"hook": lambda: None}})
    rank.saved(9, {"w": torch.ones(3), "optimizer": {"hook": None}})


def test_what_an_interrupt_took_is_given_back_in_the_next_round(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    rank.saved(1, state_of(1))

    def interrupted() -> Any:
        raise KeyboardInterrupt

    for round in range(1, 4):
        rank.saver.begin(replace(rank.turn, round=round, atomic=interrupted))
        with pytest.raises(KeyboardInterrupt):
            rank.saver.save(2, state_of(2))
    rank.turn = replace(rank.turn, round=4)
    rank.saver.begin(rank.turn)
    with stopped(rank.writer_pid()):
        assert [rank.saver.save(step, state_of(step)) is not None for step in (2, 3, 4)] == [True, True, False]


def test_a_step_is_a_number_that_fits(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    for step in (-1, 1 << 63):
        with pytest.raises(ValueError, match="a step is from 0 to"):
            rank.saver.save(step, state_of(1))
    for wrong in (3.0, "3", state_of(1)):
        with pytest.raises(TypeError, match=f"a step is an int, not a {type(wrong).__name__}"):
            rank.saver.save(wrong, state_of(1))
        with pytest.raises(TypeError, match="a step is an int"):
            rank.saver.due(wrong)
    rank.saved((1 << 63) - 1, state_of(1))


def test_a_forked_child_cannot_save(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    rank.saved(1, state_of(1))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            rank.saver.save(2, state_of(2))
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        assert "a forked child, as of a DataLoader, is no rank" in said.read()
    os.waitpid(pid, 0)
    rank.saved(2, state_of(2))


def test_a_torch_that_cannot_load_it_is_told_of_and_does_not_stop_a_save(
    tmp_path: Path, ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ranks(tmp_path)
    monkeypatch.delattr("torch.distributed.checkpoint.filesystem._StorageInfo")
    for step in (1, 2):
        assert rank.saved(step, {"w": torch.ones(4)}) is not None
    (warning,) = rank.notes
    assert warning.startswith("warning: checkpoints: torch.distributed.checkpoint may not be able to load")
    assert "_StorageInfo" in warning
    assert torch.equal(read_back(tmp_path / published_name(2))["w"], torch.ones(4))


def test_in_the_foreground(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path, async_save=False)
    saving = rank.saver.save(3, state_of(3))
    assert saving is not None
    assert saving.done
    assert saving.failures == {}
    assert [fact.what for fact in rank.facts] == [What.WRITTEN]


def test_a_disk_that_fails_is_told_and_training_goes_on(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder can be made here")
    rank = ranks(blocked, save_timeout=2.0)
    saving = rank.saver.save(1, state_of(1))
    assert saving is not None
    assert saving.wait(DEADLINE_S)
    assert str(blocked) in saving.failures[Tier.DURABLE]
    assert [(fact.what, fact.tier) for fact in rank.facts] == [(What.FAILED, Tier.DURABLE)]


def test_intervals_choose_the_tiers(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path / "durable", local=str(tmp_path / "local"), save_interval=4, non_persistent_save_interval=2)
    assert [step for step in range(1, 9) if rank.saver.due(step)] == [2, 4, 6, 8]
    for step in (2, 4, 5):
        saving = rank.saver.save(step, state_of(step))
        assert saving is not None
        assert saving.wait(DEADLINE_S)
    told = [(fact.save.step, fact.tier) for fact in rank.facts]
    assert told == [(2, Tier.LOCAL), (4, Tier.LOCAL), (4, Tier.DURABLE), (5, Tier.LOCAL), (5, Tier.DURABLE)]
    assert {fact.node for fact in rank.facts if fact.tier is Tier.LOCAL} == {"n0"}


def test_a_new_round_drops_what_the_last_one_left(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    rank.saved(1, state_of(1))
    with stopped(rank.writer_pid()):
        old = rank.saver.save(2, state_of(2))
        rank.turn = Turn(0, 1, 7, 1)
        rank.saver.begin(rank.turn)
        assert old is not None
        assert old.failures == {Tier.DURABLE: "its round is over"}
    future = rank.publish(2, state_of(22))
    assert future.result(DEADLINE_S).round == 1
    assert read_back(tmp_path, step=2)["step"] == 22
    assert [name.name for name in tmp_path.iterdir() if "saving" in name.name] == []


def test_a_killed_writer_is_told_and_replaced(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path)
    rank.saved(1, state_of(1))
    pid = rank.writer_pid()
    os.kill(pid, signal.SIGSTOP)
    saving = rank.saver.save(2, state_of(2))
    os.kill(pid, signal.SIGKILL)
    assert saving is not None
    assert saving.wait(DEADLINE_S)
    assert "SIGKILL" in saving.failures[Tier.DURABLE]
    rank.saved(3, state_of(3))
    assert rank.writer_pid() != pid
    newest = newest_usable(tmp_path)
    assert newest is not None


def two_ranks(ranks: Callable[..., Rank], root: Path) -> tuple[TCPStore, list[Rank]]:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> TCPStore:
        return TCPStore("127.0.0.1", master.port, is_master=False)

    return master, [ranks(root, rank, 2, connect) for rank in range(2)]


def test_what_all_ranks_hold_is_written_once(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    _master, both = two_ranks(ranks, tmp_path)
    for rank in both:
        rank.saver.prepare(state_of(4))
    futures = [rank.publish(4, state_of(4)) for rank in both]
    assert [future.result(DEADLINE_S) is not None for future in futures] == [True, False]
    folder = tmp_path / published_name(4)
    sidecars = [decode_sidecar((folder / f"__{rank}.shard").read_bytes()) for rank in range(2)]
    names = [{item.fqn for item in sidecar.items} for sidecar in sidecars]
    assert names[0] & names[1] == set()
    assert len(names[0] | names[1]) == 8
    assert all(sidecar.held for sidecar in sidecars)
    found = state_of(0)
    assert load(tmp_path, found) == 4
    assert found["step"] == 4


def test_what_a_rank_has_of_its_own_does_not_stop_the_rest_from_being_shared(
    tmp_path: Path, ranks: Callable[..., Rank]
) -> None:
    _master, both = two_ranks(ranks, tmp_path)
    states = [{**state_of(4), f"stage{rank.turn.rank}": torch.full((3,), rank.turn.rank)} for rank in both]
    for rank, state in zip(both, states, strict=True):
        rank.saver.prepare(state)
    for future in [rank.publish(4, state) for rank, state in zip(both, states, strict=True)]:
        future.result(DEADLINE_S)
    found = read_back(tmp_path, step=4)
    assert found["stage0"].tolist() == [0, 0, 0]
    assert found["stage1"].tolist() == [1, 1, 1]
    assert len(found["model"]) == 5
    folder = tmp_path / published_name(4)
    names = [{item.fqn for item in decode_sidecar((folder / f"__{n}.shard").read_bytes()).items} for n in range(2)]
    assert names[0] & names[1] == set()
    assert [rank.notes for rank in both] == [[], []]


def test_a_shard_that_failed_publishes_nothing(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    _master, both = two_ranks(ranks, tmp_path)
    for rank in both:
        rank.saver.prepare(state_of(4))
    for future in [rank.publish(4, state_of(4)) for rank in both]:
        future.result(DEADLINE_S)
    futures = [rank.committer.expect(SaveId(5, 7, 0)) for rank in both]
    assert both[0].saver.save(5, state_of(5)) is not None
    both[1].committer.tell(Fact(SaveId(5, 7, 0), What.FAILED, Tier.DURABLE, 1, why="ENOSPC"))
    for future in futures:
        with pytest.raises(OSError, match="rank 1: failed: ENOSPC"):
            future.result(DEADLINE_S)
    assert load(tmp_path, state_of(0)) == 4
