"""Ranks that leave by themselves: with every code, in the function and before they ever reached it."""

from collections.abc import Callable

import pytest

from .harness import HANGS, Job


@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(3)", "os._exit(0)", "os._exit(3)", "sys.exit('no more')"])
def test_leaving_the_function_while_others_run_is_a_fault(launch: Callable[..., Job], how: str) -> None:
    job = launch(f"""
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                {how}
        run(fault)
        """)
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    code = 0 if "0" in how else 1 if "no more" in how else 3
    assert (story["rank"], story["kind"]) == (1, "exit")
    assert f"code {code}" in story["text"]


@pytest.mark.parametrize("code", [16, 17, 75])
def test_codes_of_policy_end_the_job_and_are_its_own(launch: Callable[..., Job], code: int) -> None:
    job = launch(
        f"""
        def fault(round, step):
            if (round.rank, step) == (1, 5):
                sys.exit({code})
        run(fault)
        """,
        respawn=False,
    )
    assert job.wait_end() == code
    job.assert_rounds(1)
    assert f"code {code}" in job.reason()


def test_a_code_of_policy_counts_though_a_reserve_takes_over_at_once(launch: Callable[..., Job]) -> None:
    """It says no last words, so that its death is known before its code."""
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                os._exit(17)
        run(fault)
        """,
        nproc=3,
        active_world_size=2,
    )
    assert job.wait_end() == 17
    assert "code 17" in job.reason()


def test_a_rank_that_exits_before_it_checks_in_is_named(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        if os.environ["PERDURE_SLOT"] == "n0/1":
            print("the licence server is away", file=sys.stderr)
            sys.exit(3)
        run()
        """,
        respawn=False,
    )
    assert job.wait_end() == 3
    assert job.rounds() == {}
    text = job.reason()
    assert "n0/1" in text
    assert "code 3" in text
    assert "the licence server is away" in text


def test_a_rank_that_is_killed_before_it_checks_in_is_started_again(launch: Callable[..., Job]) -> None:
    job = launch("""
        if os.environ["PERDURE_SLOT"] == "n0/1" and os.environ["PERDURE_LIFE"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        run()
        """)
    seats = job.wait_round(0)
    assert len(seats) == 3
    assert job.finish() == 0
    job.assert_rounds(1)
    assert "SIGKILL" in job.wait_log("slot_gone")["text"]


def test_a_slot_whose_processes_never_check_in_stays_empty(launch: Callable[..., Job]) -> None:
    """The other ranks start without it: they are enough for min_world_size."""
    job = launch("""
        if os.environ["PERDURE_SLOT"] == "n0/1":
            os.kill(os.getpid(), signal.SIGKILL)
        run()
        """)
    seats = job.wait_round(0)
    assert len(seats) == 2
    assert job.finish() == 0
    assert "n0/1 stays empty" in job.wait_log("slot_empty")["text"]


def test_exit_codes_after_the_function_are_the_job_s(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        run()
        if os.environ["PERDURE_SLOT"] == "n0/2":
            sys.exit(5)
        """,
        respawn=False,
    )
    job.wait_round(0)
    assert job.finish() == 5
    assert "code 5" in job.reason()


def test_a_death_after_the_function_is_no_fault_and_no_success(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        run()
        if os.environ["PERDURE_SLOT"] == "n0/2":
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        respawn=False,
    )
    job.wait_round(0)
    assert job.finish() == 128 + 9
    job.assert_rounds(1)
    assert len(job.events("left")) == 3


def test_scripts_that_never_call_a_resilient_function_end_as_they_end(launch: Callable[..., Job]) -> None:
    job = launch("tell('left')", nproc=2, respawn=False)
    assert job.wait_end() == 0
    assert len(job.events("left")) == 2


def test_a_rank_that_leaves_and_never_gets_out_is_killed(launch: Callable[..., Job]) -> None:
    """It hangs in its exit handlers, as libraries like to do."""
    job = launch(
        """
        import atexit
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                atexit.register(time.sleep, 1000)
                sys.exit(3)
        run(fault)
        """,
        **HANGS,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"]) == (1, "exit")
