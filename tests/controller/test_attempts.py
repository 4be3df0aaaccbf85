"""Which attempt of a job a controller leads: the run directory counts, and a scheduler that starts the job again."""

from pathlib import Path

from perdure.controller.journal import Journal, read_header
from perdure.controller.run_directory import RunDirectory, attempt_number
from perdure.protocol.exit_codes import ExitCode


def a_run(path: Path, attempt: int = 0) -> RunDirectory:
    """A run directory, with the journal of an attempt that has not ended."""
    run = RunDirectory(path / "run")
    if attempt:
        Journal.open(run.journal, "llama", attempt).close()
    return run


def restarted(count: int) -> dict[str, str]:
    return {"SLURM_RESTART_COUNT": str(count)} if count else {}


def test_the_first_attempt(tmp_path: Path) -> None:
    assert attempt_number(a_run(tmp_path), restarted(0).get) == 1


def test_a_controller_that_comes_back_leads_the_attempt_that_is_there(tmp_path: Path) -> None:
    for count in (0, 1):
        run = a_run(tmp_path / str(count), attempt=count + 1)
        (run.path / "attempt-1").mkdir()
        assert attempt_number(run, restarted(count).get) == 2
        assert run.journal.exists()


def test_a_finished_attempt_is_put_away(tmp_path: Path) -> None:
    run = a_run(tmp_path, attempt=1)
    run.write_verdict(75, "preempted")
    assert attempt_number(run, restarted(1).get) == 2
    assert not run.journal.exists()


def test_a_job_that_is_started_again_does_not_go_on_with_the_old_journal(tmp_path: Path) -> None:
    """Everything was killed at once, before any controller could write a verdict."""
    run = a_run(tmp_path, attempt=1)
    run.write_file(run.endpoint, b"{}")
    assert attempt_number(run, restarted(1).get) == 2
    assert not run.journal.exists()
    assert not run.endpoint.exists()
    old = RunDirectory(run.path / "attempt-1")
    assert read_header(old.journal).attempt == 1
    verdict = old.read_verdict()
    assert verdict is not None
    assert verdict.code == ExitCode.CONTROLLER_LOST
    assert verdict.reason == ("attempt 1 ended without a verdict: the scheduler has started attempt 2 of the job")


def test_attempts_that_left_nothing_count_all_the_same(tmp_path: Path) -> None:
    assert attempt_number(a_run(tmp_path), restarted(3).get) == 4
    run = a_run(tmp_path, attempt=4)
    assert attempt_number(run, restarted(3).get) == 4
    assert run.journal.exists()
