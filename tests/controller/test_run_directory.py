"""The run directory holds what the present attempt wrote, whole, and nothing else."""

import os
import select
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.controller.journal import Journal, read_header
from perdure.controller.run_directory import RunDirectory, RunDirectoryError

FILES = {"journal", "endpoint.json", "keys.json", "lock", "verdict.json", "perdure.log", "perdure.jsonl"}


def run_an_attempt(path: Path, number: int) -> RunDirectory:
    run = RunDirectory(path)
    Journal.open(run.journal, "llama", number).close()
    for file in (run.endpoint, run.keys, run.log, run.log_json):
        run.write_file(file, b"attempt %d\n" % number)
    run.lock.touch()
    return run


def test_it_is_made_for_its_owner_only(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "llama")
    assert run.path.stat().st_mode & 0o7777 == 0o700
    assert os.listdir(run.path) == []
    RunDirectory(run.path)
    paths = (run.journal, run.endpoint, run.keys, run.lock, run.verdict, run.log, run.log_json)
    assert {path.name for path in paths} == FILES


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"/file is no directory"):
        RunDirectory(tmp_path / "file")
    with pytest.raises(RunDirectoryError, match=r"/file is no directory|/file/run is no directory"):
        RunDirectory(tmp_path / "file" / "run")


def test_a_directory_that_others_may_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(RunDirectoryError, match=rf"mode 0770.*run: chmod go-w {tmp_path}"):
        RunDirectory(tmp_path)
    tmp_path.chmod(0o755)
    RunDirectory(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_the_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, -1)
    with pytest.raises(RunDirectoryError, match=r"belongs to user 12345 .* must be your own"):
        RunDirectory(tmp_path / "run")


def test_a_read_only_file_system_is_refused(read_only_disk: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot write into .* Read-only file system"):
        RunDirectory(read_only_disk)
    with pytest.raises(RunDirectoryError, match=r"cannot make the run directory .* Read-only file system"):
        RunDirectory(read_only_disk / "run")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A temporary directory that other users may look into, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_no_permission_is_said(open_path: Path) -> None:
    place = open_path / "closed"
    place.mkdir(mode=0o500)
    os.chown(place, 12345, -1)
    reading, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.seteuid(12345)
            for path in (place, place / "run"):
                try:
                    RunDirectory(path)
                except RunDirectoryError as error:
                    os.write(told, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(told)
    os.waitpid(pid, 0)
    with open(reading) as answers:
        lines = answers.read().splitlines()
    assert len(lines) == 2
    assert all("Permission denied" in line and "name another one" in line for line in lines)


def test_a_verdict_is_read_as_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.read_verdict() is None
    written = run.write_verdict(90, "max_iterations=3 used up", "rank 3 (n2/1):\nkilled by SIGKILL")
    assert run.read_verdict() == written
    assert (written.code, written.reason) == (90, "max_iterations=3 used up")
    assert run.verdict.stat().st_mode & 0o777 == 0o600
    assert os.listdir(run.path) == ["verdict.json"]


def test_a_verdict_that_somebody_changed_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.verdict.write_text('{"code": "zero"}')
    with pytest.raises(RunDirectoryError, match=r"verdict.json cannot be understood .*code.* remove it"):
        run.read_verdict()


def test_killed_at_any_point_the_verdict_is_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for turn in range(50):
        reading, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(told, b"x")
                for count in range(100_000):
                    run.write_verdict(turn, f"reason {count}", "c" * (count * 977 % 50_000))
            finally:
                os._exit(1)
        os.close(told)
        assert os.read(reading, 1) == b"x"
        select.select([], [], [], turn * 0.0003)  # another point each time
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        verdict = run.read_verdict()
        assert verdict is None or verdict.reason.startswith("reason ")
    assert set(os.listdir(run.path)) <= {"verdict.json", ".verdict.json.tmp"}


def test_a_full_disk_keeps_the_older_file(small_disk: Path, fill: Callable[[Path], Path]) -> None:
    run = RunDirectory(small_disk)
    first = run.write_verdict(0, "completed")
    fill(small_disk)
    with pytest.raises(RunDirectoryError, match="No space left"):
        run.write_verdict(1, "failed", "x" * 10_000)
    assert run.read_verdict() == first
    assert set(os.listdir(small_disk)) == {"verdict.json", "filler"}


def test_the_first_attempt_has_nothing_to_put_away(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "run").rotate_finished() == 1


def test_a_finished_attempt_is_put_away(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        run = RunDirectory(tmp_path / "run")
        assert run.rotate_finished() == number
        assert run.read_verdict() is None
        assert set(os.listdir(run.path)) - {"lock"} == {f"attempt-{n}" for n in range(1, number)}
        run_an_attempt(run.path, number).write_verdict(number, "done")
    assert RunDirectory(tmp_path / "run").rotate_finished() == 4
    old = RunDirectory(tmp_path / "run" / "attempt-2")
    assert set(os.listdir(old.path)) == FILES - {"lock", "keys.json"}
    assert read_header(old.journal).attempt == 2
    assert old.log.read_bytes() == b"attempt 2\n"
    verdict = old.read_verdict()
    assert verdict is not None
    assert verdict.code == 2


def test_an_attempt_is_put_away_under_the_number_in_its_journal(tmp_path: Path) -> None:
    """A scheduler counts the attempts that never came as far as a run directory."""
    run = run_an_attempt(tmp_path / "run", 4)
    run.write_verdict(75, "preempted")
    assert run.rotate_finished() == 5
    assert read_header(run.path / "attempt-4" / "journal").attempt == 4


def test_the_journal_of_a_crashed_controller_stays(tmp_path: Path) -> None:
    run = run_an_attempt(tmp_path / "run", 1)
    before = set(os.listdir(run.path))
    assert run.rotate_finished() == 1
    assert set(os.listdir(run.path)) == before


@pytest.mark.parametrize("crash_at", range(7))
def test_putting_away_can_be_interrupted_anywhere(
    tmp_path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_an_attempt(tmp_path / "run", 1)
    run.write_verdict(0, "completed")
    rename, count = os.rename, 0

    def rename_or_crash(source: Path, target: Path) -> None:
        nonlocal count
        if count == crash_at:
            raise KeyboardInterrupt
        count += 1
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_or_crash)
        if crash_at < 6:
            with pytest.raises(KeyboardInterrupt):
                run.rotate_finished()
        else:
            assert run.rotate_finished() == 2
    assert RunDirectory(run.path).rotate_finished() == 2
    assert set(os.listdir(run.path)) == {"lock", "attempt-1"}
    assert set(os.listdir(run.path / "attempt-1")) == FILES - {"lock", "keys.json"}
