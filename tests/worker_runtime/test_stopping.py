"""`Round.should_stop`: held, released, interrupted in a real trainer; and that no step is passed behind an answer."""

import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from perdure.protocol.names import NO_ROUND
from perdure.protocol.rank_messages import Entered, Hold, Interrupt, Passed, Raised, Ready, Returned, StopAt
from perdure.worker_runtime.stopping import Stop

from .harness import Rank, trainer

ASKS = """
    @perdure.resilient
    def train(round):
        if round.index == 0:
            for step in range(10**9):
                round.ping(step)
                if round.should_stop(step):
                    return step
        return "again"
    print(train())
    """
"""Steps of a few microseconds each."""


def hold(rank: Rank, index: int = 0) -> int:
    rank.send(Hold(index))
    passed = rank.expect(Passed, 5)
    assert passed.round == index
    return passed.step


def wait_blocked(rank: Rank, step: int) -> None:
    """It has pinged the step after the one that it passed last, and asks about it."""
    rank.wait_page(step + 1)


def test_held_it_waits_and_leaves_after_the_agreed_step() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        passed = hold(rank)
        wait_blocked(rank, passed)
        assert hold(rank) == passed, "the same answer, if it is asked again"
        rank.send(StopAt(0, passed + 20_000))
        assert rank.expect(Returned) == Returned(0)
        assert rank.finish()[:2] == (0, f"{passed + 20_000}\n")


def test_it_leaves_at_once_if_the_agreed_step_is_its_next() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        passed = hold(rank)
        rank.send(StopAt(0, passed + 1))
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, f"{passed + 1}\n")


def test_a_rank_that_never_asked_has_passed_no_step() -> None:
    with trainer("""
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        @perdure.resilient
        def train(round):
            round.ping(7)
            signal.sigwait({signal.SIGUSR2})
            return round.should_stop(0)
        print(train())
        """) as rank:
        rank.start()
        rank.wait_page(7)
        assert hold(rank) == -1
        rank.send(StopAt(0, 0))
        rank.process.send_signal(signal.SIGUSR2)
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "True\n")


def test_an_interrupt_while_held_ends_the_round() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        wait_blocked(rank, hold(rank))
        began = time.monotonic()
        ready = rank.interrupt(deadline_s=3)
        assert time.monotonic() - began < 1.0
        assert ready.fault is None
        assert ready.swallowed == ()
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "again\n")


def test_a_job_that_ends_while_held_ends_the_process() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        wait_blocked(rank, hold(rank))
        code, _, stderr = rank.finish(143, "the grace has passed")
        assert code == 143
        assert "the grace has passed" in stderr


def test_held_in_an_atomic_section_it_leaves_that_first() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            if round.index:
                return "again"
            for step in range(10**9):
                with round.atomic():
                    round.ping(step)
                    round.should_stop(step)
                    done = step
        print(train())
        """) as rank:
        rank.start()
        rank.wait_page(100)
        wait_blocked(rank, hold(rank))
        ready = rank.interrupt(deadline_s=3)
        assert (ready.fault, ready.swallowed) == (None, ())


def test_ctrl_c_while_held_is_heard() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            for step in range(10**9):
                round.ping(step)
                try:
                    round.should_stop(step)
                except KeyboardInterrupt:
                    raise ValueError("heard") from None
        train()
        """) as rank:
        rank.start()
        rank.wait_page(100)
        wait_blocked(rank, hold(rank))
        rank.process.send_signal(signal.SIGINT)
        raised = rank.expect(Raised)
        assert raised.fault.message == "ValueError: heard"


def test_held_it_does_not_look_like_a_hang() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        wait_blocked(rank, hold(rank))
        end = time.monotonic() + 5
        while rank.page.read().pause_until_ns < time.monotonic_ns():
            assert time.monotonic() < end
            time.sleep(0.001)
        ready = rank.interrupt()
        assert ready.fault is None
        assert rank.page.read().pause_until_ns < time.monotonic_ns() + 10**9


def test_orders_of_another_round_say_nothing() -> None:
    with trainer(ASKS) as rank:
        rank.start()
        rank.wait_page(100)
        rank.send(Hold(5))
        rank.send(StopAt(5, 0))
        rank.send(StopAt(NO_ROUND, 0))
        rank.send(Interrupt(0, "the test says so"))
        assert isinstance(rank.receive(), Ready)


@pytest.mark.parametrize("step", ["1.5", "'9'", "None"])
def test_a_step_is_a_whole_number(step: str) -> None:
    with trainer(f"""
        @perdure.resilient
        def train(round):
            round.should_stop({step})
        train()
        """) as rank:
        rank.start()
        assert "round.should_stop(step) takes a whole number" in rank.expect(Raised).fault.message


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_no_step_is_passed_behind_an_answer() -> None:
    """The race itself, many times: two threads of one process, as in a rank."""
    for _ in range(300):
        stop = Stop()
        last = -1
        go = threading.Barrier(2)
        answers: list[int] = []

        def answer(stop: Stop = stop, go: threading.Barrier = go, answers: list[int] = answers) -> None:
            go.wait()
            answers.append(stop.hold())

        thread = threading.Thread(target=answer)
        thread.start()
        go.wait()
        step = 0
        while stop.passes(step):
            last = step
            step += 1
        thread.join()
        assert last <= answers[0] <= last + 1


def test_steps_beyond_64_bits_are_clipped() -> None:
    stop = Stop()
    assert stop.passes(1 << 70)
    assert stop.hold() == (1 << 63) - 2
    other = Stop()
    assert other.passes(-5)
    assert other.hold() == -1
