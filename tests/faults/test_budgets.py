"""How often a job may fail, on every path, and that the same failure again and again is not retried for ever."""

from collections.abc import Callable

import pytest

from .harness import Job

ALWAYS = """
def fault(round, step):
    if step == 3 and round.rank == round.index % round.world_size:
        if round.index % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")
run(fault)
"""


@pytest.mark.parametrize("allowed", [1, 2])
def test_max_rank_faults_counts_exceptions_and_deaths(launch: Callable[..., Job], allowed: int) -> None:
    job = launch(ALWAYS, nproc=2, max_rank_faults=allowed)
    assert job.wait_end() == 90
    job.assert_rounds(allowed + 1)
    assert f"rank fault {allowed + 1} of at most {allowed} (max_rank_faults)" in job.reason()


@pytest.mark.parametrize("allowed", [1, 3])
def test_max_iterations_counts_rounds(launch: Callable[..., Job], allowed: int) -> None:
    job = launch(ALWAYS, nproc=2, max_iterations=allowed)
    assert job.wait_end() == 90
    job.assert_rounds(allowed)
    assert f"of at most {allowed} (max_iterations)" in job.reason()


def test_the_same_failure_without_progress_ends_the_job(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        @perdure.resilient
        def train(round):
            tell("entered", round)
            round.ping(100)
            raise ValueError("always here")
        train()
        """,
        nproc=2,
        respawn=False,
    )
    assert job.wait_end() == 93
    job.assert_rounds(3)
    assert "always here" in job.reason()
    assert "without progress" in job.reason()


def test_the_same_death_without_progress_ends_the_job(launch: Callable[..., Job]) -> None:
    """Reserves take over at once, often before it is known how a rank died; that must not hide that it is the same."""
    job = launch(
        """
        @perdure.resilient
        def train(round):
            tell("entered", round)
            round.ping(5)
            if round.rank == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            while True:
                time.sleep(0.004)
        train()
        """,
        nproc=4,
        active_world_size=2,
    )
    assert job.wait_end() == 93
    job.assert_rounds(3)


def test_a_slot_that_fails_again_and_again_is_left_out(launch: Callable[..., Job]) -> None:
    """There is a reserve that can take its place."""
    job = launch(
        """
        @perdure.resilient
        def train(round):
            tell("entered", round)
            meet(round)
            round.ping(5)
            if os.environ["PERDURE_SLOT"] == "n0/1":
                raise ValueError("a broken device")
            wait_said("release", round)
        train()
        """,
        nproc=3,
        active_world_size=2,
        respawn=False,
    )
    last = job.wait_round(3)
    assert {each.slot for each in last.values()} == {"n0/0", "n0/2"}
    assert job.survivors(job.wait_round(2), last, all_seated=False) == 2
    assert job.finish() == 0
    assert "n0/1" in job.wait_log("suspect")["text"]


def test_the_last_rank_cannot_be_done_without(launch: Callable[..., Job]) -> None:
    job = launch(nproc=1, respawn=False)
    job.kill(job.wait_round(0)[0])
    assert job.wait_end() == 91
    assert "SIGKILL" in str(job.log("fault"))
