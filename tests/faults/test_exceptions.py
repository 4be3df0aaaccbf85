"""The training function raises: in one rank, in all, at different moments, before the first step."""

from collections.abc import Callable

from .harness import Job


def test_one_rank(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                raise ValueError("the loss is a banana")
        run(fault)
        """,
        respawn=False,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"], story["faults"]) == (1, "exception", 1)
    assert "the loss is a banana" in story["text"]
    assert "train.py" in story["text"]
    assert "Traceback" in job.log("fault")[0]["detail"]


def test_all_ranks_at_once_make_one_round(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        def fault(round, step):
            if (round.index, step) == (0, 5):
                raise ValueError(f"rank {round.rank}")
        run(fault)
        """,
        respawn=False,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


def test_two_ranks_at_different_moments_make_one_round(launch: Callable[..., Job]) -> None:
    """The second one fails while the first one's round is being left: its clean-up raises."""
    job = launch(
        """
        def fault(round, step):
            if round.index > 0 or step < 5:
                return
            if round.rank == 0:
                wait_said("second", round)
                raise ValueError("first")
            if round.rank == 2:
                say("second")
                try:
                    while True:
                        round.ping(6)
                        time.sleep(0.002)
                finally:
                    tell("second", round)
                    raise RuntimeError("second")
        run(fault)
        """,
        respawn=False,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after) == 3
    assert job.finish() == 0
    assert job.events("second", round=0, rank=2)
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["faults"]) == (0, 1), "what a rank raises because it is interrupted is no fault"


def test_same_fault_seen_by_four_reporters_makes_one_round(launch: Callable[..., Job]) -> None:
    """Rank 0, which hosts the store, dies inside a collective: its agent and three peers report it, none is blamed."""
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
        run(fault, gloo=True)
        """,
        nproc=4,
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 3
    job.wait_round(1, "connected")
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"], story["faults"]) == (0, "signal", 1)
    assert "SIGKILL" in story["text"]


def test_import_error_before_the_first_step_is_not_retried(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        def enter(round):
            import no_such_module_anywhere
        run(enter=enter)
        """,
        respawn=False,
    )
    assert job.wait_end() == 1
    job.assert_rounds(1)
    assert "Traceback" in job.output()
    assert "No module named 'no_such_module_anywhere'" in job.reason()


def test_import_error_of_the_script_itself_is_not_retried(launch: Callable[..., Job]) -> None:
    """The process dies before it has ever reached the gate."""
    job = launch("import no_such_module_anywhere\nrun()\n", respawn=False)
    assert job.wait_end() == 1
    assert job.rounds() == {}
    assert "No module named 'no_such_module_anywhere'" in job.reason()
    assert "not retried" in job.reason()
