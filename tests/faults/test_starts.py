"""Processes that come to the gate late, never, or not fit for another round."""

import signal
from collections.abc import Callable

import pytest

from .harness import HANGS, Job

QUICK_BARRIER: dict[str, object] = {**HANGS, "heartbeat_timeout": 5, "barrier_timeout": 6}


def test_a_process_that_hangs_before_the_gate_is_killed_and_started_again(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        if os.environ["PERDURE_SLOT"] == "n0/1" and os.environ["PERDURE_LIFE"] == "1":
            tell("hangs")
            time.sleep(1000)
        run()
        """,
        startup_timeout=4,
    )
    hangs = job.wait_event("hangs")
    seats = job.wait_round(0)
    assert len(seats) == 3
    assert hangs.key not in {each.key for each in seats.values()}
    assert job.finish() == 0
    job.assert_rounds(1)
    assert "startup_timeout" in job.wait_log("kill")["text"]


def test_a_frozen_reserve_is_found_when_it_is_needed(launch: Callable[..., Job]) -> None:
    """Nobody judges a reserve while it waits. Given a seat it never enters, and costs one round and itself.

    It dies of the kill only when the training is complete, which is then no less a success.
    """
    source = """
        tell("started")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run()
        """
    job = launch(source, nproc=3, active_world_size=2, termination_grace_time=2, **QUICK_BARRIER)
    before = job.wait_round(0)
    (reserve,) = {each.key for each in job.events("started")} - {each.key for each in before.values()}
    (frozen,) = [each for each in job.events("started") if each.key == reserve]
    job.kill(frozen, signal.SIGSTOP)
    job.kill(before[1])
    after = job.wait_round(2)
    assert job.survivors(before, after, dead={1}) == 1
    assert len(after) == 2
    assert job.finish() == 0
    assert frozen.pid not in {each.pid for each in after.values()}
    assert "barrier_timeout" in job.wait_log("fault", "barrier_timeout")["text"]
    assert job.log("recovered")[-1]["kind"] == "barrier_late"


UNFIT = """
import atexit
def healthy():
    if os.environ["PERDURE_SLOT"] == "n0/1" and os.environ["PERDURE_LIFE"] == "1":
        atexit.register(time.sleep, LEAVING_S)
        raise RuntimeError("row remapping failed")
@perdure.resilient(health_check=[healthy])
def train(round):
    tell("entered", round)
    for step in range(round.index * 1000, round.index * 1000 + 999):
        round.ping(step)
        if (round.index, round.rank, step) == (0, 2, 5):
            wait_said("all", round)
            raise ValueError("boom")
        time.sleep(0.004)
        if is_said("release"):
            return
train()
"""


@pytest.mark.parametrize("leaving_s", [0, 1000])
def test_a_rank_that_fails_its_health_check_leaves_and_is_replaced(launch: Callable[..., Job], leaving_s: int) -> None:
    """If it does not leave, it is killed after barrier_timeout."""
    source = UNFIT.replace("LEAVING_S", str(leaving_s))
    job = launch(source, **QUICK_BARRIER)
    before = job.wait_round(0)
    job.say("all")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert len(after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert "row remapping failed" in str(job.log("fault"))


def test_a_finalize_hook_that_fails_costs_its_process(launch: Callable[..., Job]) -> None:
    job = launch("""
        def finalize():
            if os.environ["PERDURE_SLOT"] == "n0/0" and os.environ["PERDURE_LIFE"] == "1":
                raise OSError("a file that was still open")
        @perdure.resilient(finalize=[finalize])
        def train(round):
            tell("entered", round)
            for step in range(round.index * 1000, round.index * 1000 + 999):
                round.ping(step)
                if (round.index, round.rank, step) == (0, 2, 5):
                    wait_said("all", round)
                    raise ValueError("boom")
                time.sleep(0.004)
                if is_said("release"):
                    return
        train()
        """)
    before = job.wait_round(0)
    job.say("all")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    assert "a file that was still open" in str(job.log("fault"))


def test_children_of_a_rank_may_come_and_die(launch: Callable[..., Job]) -> None:
    """Forked workers, as a data loader makes them: their deaths are none of the rank's."""
    job = launch(
        """
        def fault(round, step):
            if step == 3:
                fault.child = os.fork()
                if fault.child == 0:
                    time.sleep(1000)
                tell("forked", round, child=fault.child)
            if step == 6 and round.index == 0:
                os.kill(fault.child, signal.SIGKILL)
                os.waitpid(fault.child, 0)
                tell("buried", round)
            if step == 20 and round.index == 0 and round.rank == 1:
                wait_said("all", round)
                raise ValueError("boom")
        run(fault)
        """,
        respawn=False,
    )
    before = job.wait_round(0)
    job.wait_round(0, "buried")
    job.assert_rounds(1)
    job.say("all")
    after = job.wait_round(1)
    assert job.survivors(before, after) == 3
    job.wait_round(1, "forked")
    assert job.finish() == 0
    job.assert_rounds(2)
