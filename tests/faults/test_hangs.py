"""Ranks that do not move any more: frozen, in a loop, in C; and their peers, who wait for them and are not to blame."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from .harness import HANGS, Job, Seats

LOCK = """
import ctypes
def lock(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    tell("locked")
    library.pthread_mutex_lock(mutex)  # for ever, and no signal ends it
"""


def detection_s(job: Job, at: float, index: int = 1) -> float:
    """Seconds from the fault to the first rank that is in the next round."""
    return min(each.at for each in job.wait_round(index).values()) - at


def fault_lines(job: Job) -> dict[int, str]:
    return {line["rank"]: line["kind"] for line in job.log("fault")}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_is_killed_and_replaced(launch: Callable[..., Job], rank: int) -> None:
    job = launch(**HANGS)
    before = job.wait_round(0)
    job.kill(before[rank], signal.SIGSTOP)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={rank}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (rank, "soft_hang")
    assert "hard_timeout=2" in job.wait_log("killed")["text"]


def test_a_rank_that_was_frozen_and_goes_on_is_kept(launch: Callable[..., Job]) -> None:
    """Between soft_timeout and hard_timeout: its round is lost, its process is not."""
    job = launch(soft_timeout=1, hard_timeout=15, respawn=False)
    before = job.wait_round(0)
    job.kill(before[1], signal.SIGSTOP)
    job.wait_log("fault", "no progress")
    job.kill(before[1], signal.SIGCONT)
    after = job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_machine_that_stood_still_blames_nobody(launch: Callable[..., Job]) -> None:
    """`scontrol suspend`, or a paused virtual machine: everything is stopped for longer than hard_timeout."""
    job = launch(**HANGS)
    before = job.wait_round(0)
    job.wait_log("running")
    everybody = [job.controller_pid(), job.agents["n0"].pid, *(each.pid for each in before.values())]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 4
    job.wait_for(lambda: time.monotonic() > end, "the time of the suspension")
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    job.wait_log("frozen", "this agent stood still")
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.log("killed") == []
    assert {line["rank"] for line in job.log("fault")} == {1}


def test_a_pause_suspends_judgement_and_ends(launch: Callable[..., Job]) -> None:
    """In the pause the rank is silent for longer than hard_timeout; after another one it hangs."""
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank) == (0, 1):
                if step == 5:
                    with round.pause(max=20):
                        time.sleep(2.5)
                    tell("back", round)
                if step == 6:
                    with round.pause(max=0.5):
                        time.sleep(1000)
        run(fault)
        """,
        respawn=False,
        **HANGS,
    )
    before = job.wait_round(0)
    job.wait_event("back", round=0)
    assert job.log("fault") == []
    after = job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.wait_log("recovered")["rank"] == 1


def test_a_python_livelock_is_left_in_place(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                tell("fault", round)
                while True:
                    pass
        run(fault)
        """,
        respawn=False,
        **HANGS,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (1, "soft_hang")
    assert "no ping after step 5" in story["text"]
    assert 0.9 < detection_s(job, job.events("fault")[0].at) < 1.6


@pytest.mark.parametrize("call", ["os.read(os.pipe()[0], 1)", "ctypes.CDLL(None).sleep(1000)", "lock_of_python()"])
def test_a_c_call_that_signals_end_is_left_in_place(launch: Callable[..., Job], call: str) -> None:
    job = launch(
        f"""
        import ctypes, threading
        def lock_of_python():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                {call}
                while True:  # what sleep() returned to
                    pass
        run(fault)
        """,
        respawn=False,
        **HANGS,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (1, "soft_hang")


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_a_c_call_that_never_returns_costs_only_its_process(launch: Callable[..., Job], library: str) -> None:
    """CDLL lets go of the GIL, PyDLL holds it, so that not even the runtime's own thread runs."""
    job = launch(
        LOCK
        + f"""
def fault(round, step):
    if (round.index, round.rank, step) == (0, 1, 5):
        lock(ctypes.{library}(None))
run(fault)
""",
        **HANGS,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (1, "soft_hang")
    killed = job.wait_log("killed")
    assert killed["rank"] == 1
    assert "runs no Python" in killed["text"]
    assert "hard_timeout=2" in killed["text"]


IN_A_COLLECTIVE = """
def fault(round, step):
    if (round.index, round.rank, step) == (0, 1, 5):
        tell("fault", round)
        hang()
run(fault, gloo=True)
"""


def judge_peers(job: Job, before: Seats, after: Seats, dead: set[int]) -> None:
    assert job.survivors(before, after, dead) == 3 - len(dead)
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"], story["faults"]) == (1, "soft_hang", 1)
    assert set(fault_lines(job)) >= {1}
    killed = {line["rank"] for line in job.log("killed")}
    assert killed == dead, "peers that wait in a collective are victims: nobody kills them"


def test_peers_in_a_collective_outlive_a_rank_in_a_livelock(launch: Callable[..., Job]) -> None:
    job = launch("def hang():\n    while True: pass\n" + IN_A_COLLECTIVE, respawn=False, **HANGS)
    judge_peers(job, job.wait_round(0), job.wait_round(1), set())


def test_peers_in_a_collective_outlive_a_rank_that_hangs_in_c(launch: Callable[..., Job]) -> None:
    source = LOCK + "def hang():\n    lock(ctypes.PyDLL(None))\n" + IN_A_COLLECTIVE
    job = launch(source, **HANGS)
    judge_peers(job, job.wait_round(0), job.wait_round(1), {1})


def test_a_swallowed_interrupt_is_named_and_comes_again(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        def stubborn():
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                return
        def fault(round, step):
            if round.index > 0 or step != 5:
                return
            if round.rank == 2:
                say("stubborn")
                stubborn()
            elif round.rank == 0:
                wait_said("stubborn", round)
                raise ValueError("boom")
        run(fault)
        """,
        respawn=False,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    swallowed = job.wait_log("swallowed")
    assert swallowed["slot"] == before[2].slot
    assert "train.py:" in swallowed["text"]


def test_a_rank_that_does_not_come_back_is_killed_at_the_barrier(launch: Callable[..., Job]) -> None:
    """It moves and it pings, but it never leaves the round that is over: it swallows every interrupt."""
    job = launch(
        """
        def fault(round, step):
            if round.index > 0 or step < 5:
                return
            if round.rank == 2:
                say("stubborn")
                while True:
                    try:
                        while True:
                            round.ping(6)
                            time.sleep(0.01)
                    except BaseException:
                        pass
            elif round.rank == 0:
                wait_said("stubborn", round)
                raise ValueError("boom")
        run(fault)
        """,
        soft_timeout=1,
        hard_timeout=2,
        heartbeat_timeout=2.5,
        barrier_timeout=3,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={2}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (0, "exception")
    assert "barrier_timeout" in story["text"]
