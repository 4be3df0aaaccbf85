"""Faults at bad moments: while another one is being handled, at the end of a round, at its beginning."""

import os
import signal
from collections.abc import Callable

import pytest

from .harness import Job

UNWIND = """
def fault(round, step):
    if round.index > 0 or step < 5:
        return
    if round.rank == 1:
        wait_said("waiting", round)
        raise ValueError("first")
    if round.rank == 2:
        try:
            say("waiting")
            while True:
                round.ping(6)
                time.sleep(0.002)
        finally:
            tell("unwinding", round)
            wait_said("unwound")
"""


def test_a_rank_is_killed_while_it_leaves_the_round(launch: Callable[..., Job]) -> None:
    """ABORTING: one rank has failed, the next one dies while its clean-up is awaited."""
    job = launch(UNWIND + "run(fault)")
    before = job.wait_round(0)
    job.wait_event("unwinding", rank=2)
    job.kill(before[2])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={2}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"], story["faults"]) == (1, "exception", 2)


def test_a_rank_that_had_left_the_round_is_killed_before_the_others_have(launch: Callable[..., Job]) -> None:
    """ABORTING: the rank that failed first is back at the gate, and dies there."""
    job = launch(UNWIND + "run(fault)")
    before = job.wait_round(0)
    job.wait_event("unwinding", rank=2)
    job.kill(before[1])
    job.wait_log("slot_gone", "SIGKILL")
    job.say("unwound")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_rank_is_killed_while_another_one_s_successor_starts(launch: Callable[..., Job]) -> None:
    """PLANNING: the next round waits for a process that starts, and meanwhile a second rank dies."""
    job = launch("""
        tell("started", life=int(os.environ["PERDURE_LIFE"]))
        if os.environ["PERDURE_LIFE"] != "1":
            wait_said("go")
        run()
        """)
    before = job.wait_round(0)
    job.kill(before[0])
    job.wait_event("started", slot=before[0].slot, more={"life": 2})
    job.kill(before[1])
    job.wait_event("started", slot=before[1].slot, more={"life": 2})
    job.say("go")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0, 1}) == 1
    assert len(after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


def test_the_successor_is_killed_while_it_starts(launch: Callable[..., Job]) -> None:
    """PLANNING: the process that the next round waits for dies, too; another one is started."""
    job = launch("""
        tell("started", life=int(os.environ["PERDURE_LIFE"]))
        if os.environ["PERDURE_LIFE"] == "2":
            wait_said("never")
        run()
        """)
    before = job.wait_round(0)
    job.kill(before[0])
    job.kill(job.wait_event("started", slot=before[0].slot, more={"life": 2}))
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 2
    assert len(after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


FINISH = """
def leave(round):
    if round.index == 0 and round.rank == 2:
        tell("last", round)
        wait_said("never", round)
run(leave=leave)
"""


def test_a_rank_is_killed_when_the_others_have_returned(launch: Callable[..., Job]) -> None:
    """Those who had returned run again: the round was not complete."""
    job = launch(FINISH, nproc=3)
    before = job.wait_round(0)
    job.say("release")
    for rank in (0, 1):
        job.wait_event("returned", round=0, rank=rank)
    job.wait_event("last", round=0)
    job.kill(before[2])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={2}) == 2
    assert job.wait_end() == 0
    job.assert_rounds(2)
    assert len(job.events("left")) == 3


def test_a_rank_that_had_returned_is_killed_while_it_waits_for_the_others(launch: Callable[..., Job]) -> None:
    job = launch(FINISH, nproc=3)
    before = job.wait_round(0)
    job.say("release")
    job.wait_event("last", round=0)
    job.wait_event("returned", round=0, rank=0)
    job.kill(before[0])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 2
    assert job.wait_end() == 0
    job.assert_rounds(2)
    assert len(job.events("left")) == 3


def test_a_rank_that_never_returns_is_left_in_place_after_completion_timeout(launch: Callable[..., Job]) -> None:
    job = launch(FINISH, nproc=3, completion_timeout=0.7, respawn=False)
    before = job.wait_round(0)
    job.say("release")
    after = job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.wait_end() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert story["rank"] == 2
    assert "completion_timeout" in story["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_the_others_connect(launch: Callable[..., Job], rank: int) -> None:
    """In the first init_process_group of round 0 and again of round 1: rank 0 hosts its store."""
    job = launch(f"""
        def enter(round):
            if round.rank == {rank} and round.index < 2:
                time.sleep(15)
        run(enter=enter, gloo=True)
        """)
    for index in (0, 1):
        before = job.wait_round(index)
        job.kill(before[rank])
        after = job.wait_round(index + 1)
        assert job.survivors(before, after, dead={rank}) == 2
    job.wait_round(2, "connected")
    assert job.finish() == 0
    job.assert_rounds(3)
    for story in job.log("recovered"):
        assert (story["rank"], story["kind"], story["faults"]) == (rank, "signal", story["round"])


def test_rank_0_raises_before_it_connects(launch: Callable[..., Job]) -> None:
    """The others wait in init_process_group for a store whose host stays alive and never comes."""
    job = launch(
        """
        def enter(round):
            if round.index == 0 and round.rank == 0:
                raise OSError("no device")
        run(enter=enter, gloo=True)
        """,
        nproc=2,
        respawn=False,
    )
    before, after = job.wait_round(0), job.wait_round(1, "connected")
    assert job.survivors(before, after) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.wait_log("recovered")["rank"] == 0


def test_a_rank_dies_on_its_way_into_the_round(launch: Callable[..., Job]) -> None:
    """It is told to enter, and dies before it has; its peers are in the function already."""
    job = launch("""
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                say("boom")
                raise ValueError("boom")
        import perdure.worker_runtime.attempt as attempt
        prepare = attempt.Attempt._prepare
        def slow(self, port):
            if self.enter.round == 1 and self.enter.rank == 2:
                tell("preparing", None)
                time.sleep(60)
            prepare(self, port)
        attempt.Attempt._prepare = slow
        run(fault)
        """)
    before = job.wait_round(0)
    on_its_way = job.wait_event("preparing")
    assert on_its_way.pid == before[2].pid
    for rank in (0, 1):
        job.wait_event("entered", round=1, rank=rank)
    os.kill(on_its_way.pid, signal.SIGKILL)
    after = job.wait_round(2)
    assert job.survivors(before, after, dead={2}) == 2
    assert job.finish() == 0
    assert job.wait_log("recovered", "SIGKILL")["rank"] == 2
