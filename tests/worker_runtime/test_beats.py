"""The beat page, its writers in a round, and what the agent reads."""

import mmap
import os
import time
from collections.abc import Iterator

import pytest

from perdure.worker_runtime.beats import EXITING, RUNNING, SECTIONS_RECORDED, STEP_MAX, BeatPage
from perdure.worker_runtime.checkpoints import Checkpoints
from perdure.worker_runtime.interrupt import Flight
from perdure.worker_runtime.round import Round

from .harness import trainer


class _NoAbort:
    quick = True

    def run(self) -> None: ...

    def again(self) -> None: ...


@pytest.fixture
def page() -> Iterator[BeatPage]:
    page = BeatPage.create()
    yield page
    page.close()


@pytest.fixture
def round(page: BeatPage) -> Round:
    page.begin_round(3)
    flight = Flight(3, _NoAbort(), lambda: None)
    checkpoints = Checkpoints({}, lambda fact: None, lambda level, text: None)
    return Round(flight, page.words, rank=0, world_size=1, local_rank=0, local_world_size=1, checkpoints=checkpoints)


def test_the_agent_reads_what_the_rank_writes(page: BeatPage, round: Round) -> None:
    reader = BeatPage.attach(os.dup(page.fd))
    before = time.monotonic_ns()
    with round.section("setup"), round.section("step"):
        round.ping(17)
        beat = reader.read()
    assert (beat.step, beat.round, beat.stage) == (17, 3, RUNNING)
    assert before <= beat.ping_ns <= time.monotonic_ns()
    assert [name for name, _ in beat.sections] == ["setup", "step"]
    assert before <= beat.sections[0][1] <= beat.sections[1][1]
    assert reader.read().sections == ()
    page.last_words(EXITING, 16)
    assert (reader.read().dying, reader.read().code) == (EXITING, 16)
    page.begin_round(4)
    assert (reader.read().step, reader.read().ping_ns, reader.read().round) == (-1, 0, 4)
    reader.close()


@pytest.mark.parametrize(("step", "shown"), [(2**70, STEP_MAX), (-5, -5), (True, 1), (0, 0)])
def test_steps_of_every_kind(page: BeatPage, round: Round, step: int, shown: int) -> None:
    round.ping(step)
    assert page.read().step == shown


def test_wrong_names_and_values_are_refused_where_they_are_made(round: Round) -> None:
    with pytest.raises(ValueError, match="unknown section 'stpe'; known are setup, step, checkpointing"):
        round.section("stpe")
    with pytest.raises(TypeError, match="whole number"):
        round.ping(1.5)  # pyright: ignore[reportArgumentType]
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive number of seconds"), round.pause(max=seconds):
            pass


def test_deep_sections_are_counted(page: BeatPage, round: Round) -> None:
    sections = [round.section("step") for _ in range(SECTIONS_RECORDED + 9)]
    for section in sections:
        section.__enter__()
    assert len(page.read().sections) == SECTIONS_RECORDED
    for section in sections:
        section.__exit__(None, None, None)
    assert page.read().sections == ()


def test_a_pause_is_bounded_and_nests(page: BeatPage, round: Round) -> None:
    round.ping(1)
    pinged = page.read().ping_ns
    with round.pause(max=10):
        outer = page.read().pause_until_ns
        assert 9e9 < outer - time.monotonic_ns() < 10e9
        with round.pause(max=1):
            assert page.read().pause_until_ns < outer
        assert page.read().pause_until_ns == outer
    assert page.read().pause_until_ns == 0
    assert page.read().ping_ns > pinged


def test_a_scribbling_rank_does_not_break_the_reader(page: BeatPage) -> None:
    for at in range(1, mmap.PAGESIZE // 8):
        page.words[at] = -(1 << 60) + at
    page.read()
    for at in range(1, mmap.PAGESIZE // 8):
        page.words[at] = (1 << 60) + at
    assert {name for name, _ in page.read().sections} == {"unknown"}
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)


def test_what_is_no_page_is_refused() -> None:
    fd = os.memfd_create("not-a-page")
    with pytest.raises(ValueError, match="0 bytes"):
        BeatPage.attach(fd)
    os.ftruncate(fd, mmap.PAGESIZE)
    with pytest.raises(ValueError, match="magic"):
        BeatPage.attach(fd)
    os.close(fd)


def test_hot_calls_are_cheap(round: Round) -> None:
    def cost_ns(call: object) -> float:
        return min(_timed(call) for _ in range(20))

    def _timed(call: object) -> float:
        assert callable(call)
        began = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - began) / 2000

    def pings() -> None:
        for step in range(2000):
            round.ping(step)

    def sections() -> None:
        for _ in range(2000):
            with round.section("step"):
                pass

    assert cost_ns(pings) < 1000
    assert cost_ns(sections) < 2000


def test_the_automatic_stamp_tells_stuck_from_busy() -> None:
    with trainer(
        """
        import ctypes
        @perdure.resilient
        def train(round):
            round.ping(1)
            end = time.monotonic() + 0.5
            while time.monotonic() < end: pass
            round.ping(2)
            ctypes.CDLL(None).usleep(700_000)
            round.ping(3)
            end = time.monotonic() + 0.2
            while time.monotonic() < end: pass
            ctypes.PyDLL(None).usleep(700_000)
            round.ping(4)
            return None
        train()
        """,
        env={"PERDURE_AUTO_STAMP_S": "0.05"},
    ) as rank:
        rank.start()
        worst = {1: 0.0, 2: 0.0, 3: 0.0}
        end = time.monotonic() + 20
        while (beat := rank.page.read()).step < 4 and time.monotonic() < end:
            if beat.step in worst:
                worst[beat.step] = max(worst[beat.step], (time.monotonic_ns() - beat.auto_ns) / 1e9)
            time.sleep(0.005)
        assert worst[1] < 0.3
        assert 0.5 < worst[2] < 1.0
        assert 0.5 < worst[3] < 1.0
