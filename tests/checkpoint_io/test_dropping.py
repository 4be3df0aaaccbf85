"""A save that another rank did not save is given up at once: by the writer process, the saver, and before it begins."""

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from perdure.checkpoint_io import writer_client
from perdure.checkpoint_io.names import local_name, saving_name
from perdure.checkpoint_io.saver import Saver
from perdure.checkpoint_io.settings import VARIABLE, CheckpointSettings
from perdure.checkpoint_io.writer_client import Writer
from perdure.checkpoint_io.writer_messages import Failed, Released, Written
from perdure.protocol.checkpoints import GIVEN_UP, Fact, SaveId, Tier, What
from perdure.protocol.rank_messages import Enter
from perdure.worker_runtime.checkpoints import Checkpoints
from perdure.worker_runtime.entry import _lone_round  # pyright: ignore[reportPrivateUsage]

from .test_saver import DEADLINE_S, Rank, state_of, stopped
from .test_saver import ranks as ranks
from .test_writer_trouble import FREEZE, THAW, freezable
from .writing import Trainer, check_shard, names, tmpfs, training

Kind = tuple[type[object], Tier | None]


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with training() as trainer:
        yield trainer


def save_of(step: int, round: int = 4) -> SaveId:
    return SaveId(step, 9, round)


def kinds(trainer: Trainer, step: int) -> list[Kind]:
    return [(type(each), getattr(each, "tier", None)) for each in trainer.of(step)]


def reasons(trainer: Trainer, step: int) -> set[str]:
    return {each.why for each in trainer.of(step) if isinstance(each, Failed)}


def await_passed_on(writer: Writer) -> None:
    """Wait until the client's thread has said it to the process; nobody is told of that."""
    end = time.monotonic() + 20
    while True:
        with writer._changed:  # pyright: ignore[reportPrivateUsage]
            if not writer._drops:  # pyright: ignore[reportPrivateUsage]
                return
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- the writer -----------------------------------------------------------------------------------------------


@pytest.fixture
def large() -> Iterator[Trainer]:
    """Its saves take long enough for the process to read a few packets meanwhile."""
    with training(32 << 20) as trainer:
        yield trainer


def test_each_tier_has_an_answer_and_nothing_is_left(large: Trainer, tmp_path: Path) -> None:
    trainer, pid = large, large.pid()
    os.kill(pid, signal.SIGSTOP)
    trainer.write(1, tmp_path / "l", tmp_path / "d")
    trainer.write(2, tmp_path / "l", tmp_path / "d", 1)
    trainer.writer.drop([save_of(2)])
    await_passed_on(trainer.writer)
    os.kill(pid, signal.SIGCONT)
    assert len(trainer.finish(1)) == 3
    trainer.finish(2)
    assert kinds(trainer, 2) == [(Failed, Tier.LOCAL), (Failed, Tier.DURABLE), (Released, None)]
    assert reasons(trainer, 2) == {GIVEN_UP}
    assert {name.split("/")[1] for name in names(tmp_path)} == {local_name(save_of(1)), saving_name(save_of(1))}
    data = trainer.images[1].fill()
    trainer.write(3, tmp_path / "l", image=1)
    trainer.finish(3)
    check_shard(tmp_path / "l" / local_name(save_of(3)), data, values=0, extra=0)
    assert (trainer.pid(), trainer.notes) == (pid, [])


def test_one_that_waits_behind_a_disk_that_stands_still_is_released_at_once(trainer: Trainer, tmp_path: Path) -> None:
    with freezable(tmp_path / "net") as disk:
        fcntl.ioctl(disk, FREEZE, 0)
        try:
            trainer.write(1, None, tmp_path / "net")
            trainer.write(2, None, tmp_path / "net", 1)
            trainer.write(3, tmp_path / "l", None, 1)
            trainer.until(lambda: trainer.is_free(3))  # so the one before it waits for the disk
            trainer.writer.drop([save_of(2)])
            trainer.until(lambda: trainer.is_free(2))
            assert kinds(trainer, 2) == [(Failed, Tier.DURABLE), (Released, None)]
            assert trainer.of(1) == [], "it is being written"
            trainer.writer.drop([save_of(1)])
            await_passed_on(trainer.writer)
        finally:
            fcntl.ioctl(disk, THAW, 0)
        trainer.until(lambda: trainer.is_free(1))
        assert kinds(trainer, 1) == [(Failed, Tier.DURABLE), (Released, None)]
        assert names(tmp_path / "net") == []


def test_what_is_written_on_one_tier_stays_told_and_the_other_is_not_tried_again(
    trainer: Trainer, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "small", "1m") as small:
        trainer.write(1, tmp_path / "l", small)
        trainer.until(lambda: trainer.notes)  # it is about to be tried again
        trainer.writer.drop([save_of(1)])
        trainer.finish(1)
        assert kinds(trainer, 1) == [(Released, None), (Written, Tier.LOCAL), (Failed, Tier.DURABLE)]
        assert reasons(trainer, 1) == {GIVEN_UP}


def test_what_is_not_in_flight_is_not_touched(trainer: Trainer, tmp_path: Path) -> None:
    trainer.writer.drop([save_of(1), save_of(2, round=3)])
    await_passed_on(trainer.writer)
    trainer.write(1, tmp_path)
    trainer.finish(1)
    trainer.writer.drop([save_of(1)])
    trainer.write(2, tmp_path)
    trainer.writer.drop([save_of(2, round=3), save_of(1)])
    trainer.finish(2)
    await_passed_on(trainer.writer)
    for step in (1, 2):
        assert kinds(trainer, step) == [(Written, Tier.LOCAL), (Released, None)]


def test_one_that_is_dropped_and_abandoned_is_told_of_once(trainer: Trainer, tmp_path: Path) -> None:
    os.kill(trainer.pid(), signal.SIGSTOP)
    trainer.write(1, tmp_path)
    trainer.writer.drop([save_of(1)])
    await_passed_on(trainer.writer)
    trainer.writer.abandon(9, 5)
    os.kill(trainer.pid(), signal.SIGCONT)
    trainer.until(lambda: trainer.is_free(1))
    assert kinds(trainer, 1) == [(Released, None)]


def test_a_process_whose_saves_are_all_done_is_not_stuck(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if an image was free before the save was through, or its round ended."""
    monkeypatch.setattr(writer_client, "GRACE_S", 0.1)
    monkeypatch.setattr(writer_client, "ABANDON_LIMIT_S", 0.1)
    trainer.write(1, tmp_path / "l", tmp_path / "d", deadline_s=0.4)
    trainer.finish(1)
    with tmpfs(tmp_path / "small", "1m") as small:
        trainer.write(2, tmp_path / "l", small, 1)
        trainer.until(lambda: trainer.notes)
        trainer.writer.abandon(9, 5)
        process = os.pidfd_open(trainer.pid())
        assert select.select([process], [], [], 1.0)[0] == [], trainer.notes
        os.close(process)
    assert len(trainer.notes) == 1, trainer.notes
    assert [child.flights for child in trainer.writer._children] == [{}]  # pyright: ignore[reportPrivateUsage]


# ---- the saver ------------------------------------------------------------------------------------------------


def writer_of(saver: Saver) -> Writer:
    writer = saver._buffers._writer  # pyright: ignore[reportPrivateUsage]
    assert writer is not None
    return writer


def told(rank: Rank, step: int) -> list[tuple[What, Tier, str]]:
    return [(fact.what, fact.tier, fact.why) for fact in rank.facts if fact.save.step == step]


BOTH_GIVEN_UP = [(What.FAILED, Tier.LOCAL, GIVEN_UP), (What.FAILED, Tier.DURABLE, GIVEN_UP)]


def test_a_saving_ends_as_failed_and_its_buffer_serves_the_next(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path / "d", local=str(tmp_path / "l"))
    saved = rank.saver.save(1, state_of(1, 500))
    assert saved is not None
    assert saved.wait(DEADLINE_S)
    with stopped(rank.writer_pid()):
        kept, vain = (rank.saver.save(step, state_of(step, 500)) for step in (2, 3))
        assert kept is not None
        assert vain is not None
        rank.saver.drop([SaveId(3, 7, 0)])
        await_passed_on(writer_of(rank.saver))
        assert not vain.done
    assert kept.wait(DEADLINE_S)
    assert vain.wait(DEADLINE_S)
    assert vain.failures == {Tier.LOCAL: GIVEN_UP, Tier.DURABLE: GIVEN_UP}
    assert told(rank, 3) == BOTH_GIVEN_UP
    assert kept.failures == {}
    for step in (4, 5):
        saving = rank.saver.save(step, state_of(step, 500))
        assert saving is not None, rank.facts[-1]
        assert saving.wait(DEADLINE_S)
        assert saving.failures == {}


def test_one_that_is_vain_before_it_begins_is_not_copied(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    rank = ranks(tmp_path / "d", local=str(tmp_path / "l"))
    known: set[SaveId] = set()
    rank.turn = replace(rank.turn, vain=known)
    rank.saver.begin(rank.turn)
    state = state_of(1)
    known.update([SaveId(1, 7, 0), SaveId(2, 7, 1)])
    assert rank.saver.save(1, state) is None
    assert told(rank, 1) == BOTH_GIVEN_UP
    assert rank.saver.save(1, state) is None
    assert len(rank.facts) == 2
    saving = rank.saver.save(2, state)
    assert saving is not None, "it is the same step of another round that is vain"
    assert saving.wait(DEADLINE_S)
    assert saving.failures == {}
    assert [each.name for each in (tmp_path / "l").iterdir()] == [local_name(SaveId(2, 7, 0))]


def test_one_that_becomes_vain_while_it_is_copied(tmp_path: Path, ranks: Callable[..., Rank]) -> None:
    """`drop` comes after the look at what is vain and before the writer has it."""
    rank = ranks(tmp_path / "d", local=str(tmp_path / "l"))
    model = state_of(1, 2000)["model"]  # takes long enough for the process to read a few packets meanwhile
    known: set[SaveId] = set()

    class Spoiled:
        def __reduce__(self) -> tuple[type, tuple[()]]:
            known.add(SaveId(2, 7, 0))
            rank.saver.drop([SaveId(2, 7, 0)])
            await_passed_on(writer_of(rank.saver))
            return dict, ()

    rank.turn = replace(rank.turn, vain=known)
    rank.saver.begin(rank.turn)
    first = rank.saver.save(1, {"model": model, "odd": None})
    assert first is not None
    assert first.wait(DEADLINE_S)
    with stopped(rank.writer_pid()):
        saving = rank.saver.save(2, {"model": model, "odd": Spoiled()})
        assert saving is not None
        await_passed_on(writer_of(rank.saver))
    assert saving.wait(DEADLINE_S)
    assert saving.failures[Tier.DURABLE] == GIVEN_UP
    assert rank.saver.save(3, {"model": model, "odd": None}) is not None


# ---- the process ----------------------------------------------------------------------------------------------


def test_what_is_said_before_there_is_a_checkpointer_is_known_to_it(tmp_path: Path) -> None:
    facts: list[Fact] = []
    settings = CheckpointSettings(node="n0", save=str(tmp_path))
    checkpoints = Checkpoints({VARIABLE: settings.text()}, facts.append, lambda level, text: None)
    round = _lone_round()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    enter = Enter(0, 0, 1, 0, 1, "127.0.0.1", store.port, "job", epoch=7)
    checkpoints.begin(enter, round)
    checkpoints.drop((SaveId(1, 7, 0),))
    try:
        assert checkpoints.get(round).save(1, state_of(1)) is None
        assert [(fact.what, fact.why) for fact in facts] == [(What.FAILED, GIVEN_UP)]
        second = checkpoints.get(round).save(2, state_of(2))
        assert second is not None
        assert second.wait(DEADLINE_S)
        checkpoints.drop((SaveId(2, 7, 0), SaveId(3, 7, 0), SaveId(4, 7, 0)))
        assert checkpoints.get(round).save(3, state_of(3)) is None
        await_passed_on(writer_of(checkpoints.get(round)._saver))  # pyright: ignore[reportPrivateUsage]
        checkpoints.begin(enter, round)
        again = checkpoints.get(round).save(4, state_of(3))
        assert again is not None, "another round begins"
        assert again.wait(DEADLINE_S)
        assert again.failures == {}
    finally:
        checkpoints.close()
    checkpoints.drop((SaveId(4, 7, 0),))
