"""`perdure inspect` on the journals of real jobs: one that has ended, and one that runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PERDURE = Path(sys.executable).with_name("perdure")

TRAINER = """
import os, signal, sys, time
import perdure

@perdure.resilient
def train(round):
    round.ping(round.index)
    if round.index == 0 and round.rank == 1:
        raise ValueError("boom")
    if round.index == 1 and round.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(sys.argv) > 1 and round.index == 2:
        open(sys.argv[1], "w").write("running")
    while len(sys.argv) > 1 or round.index < 2:
        time.sleep(0.01)

train()
"""


def start(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    (folder / "train.py").write_text(TRAINER)
    knobs = ("--nproc=3", "--granularity=rank", "--active-world-size=2", "--job=demo", f"--run-dir={folder / 'run'}")
    command = [str(PERDURE), "run", *knobs, "--", sys.executable, str(folder / "train.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job with two faults that has ended well."""
    folder = tmp_path_factory.mktemp("job")
    with start(folder) as job:
        assert job.wait(60) == 0
    return folder / "run"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The run directory of a job in its third round."""
    told = tmp_path / "told"
    os.mkfifo(told)
    with start(tmp_path, str(told)) as job:
        assert told.read_text().startswith("running")
        yield tmp_path / "run"
        job.terminate()
        assert job.wait(60) == 143


def inspect(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [str(PERDURE), "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_story_of_a_job(run_dir: Path) -> None:
    done = inspect(run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert "job demo, attempt 1: ended with code 0 (COMPLETED)" in done.stdout
    assert "ValueError: boom at train.py:9, step 0; " in done.stdout
    assert "killed by SIGKILL" in done.stdout
    assert "takes rank 0; world 2, " in done.stdout
    assert inspect(run_dir / "journal").stdout.splitlines()[3:] == done.stdout.splitlines()[3:]


def test_one_round_and_json(run_dir: Path) -> None:
    assert inspect(run_dir, "--round", 1).stdout.startswith("ROUND 1")
    rounds = [json.loads(line) for line in inspect(run_dir, "--json").stdout.splitlines()]
    assert [each["outcome"] for each in rounds] == ["fault", "fault", "completed"]
    assert rounds[1]["cause"]["code"] == 9
    (only,) = [json.loads(line) for line in inspect(run_dir, "--json", "--round", 0).stdout.splitlines()]
    assert only == rounds[0]


def test_a_running_job_is_told_of_and_left_alone(running: Path) -> None:
    before = (running / "lock").read_bytes()
    done = inspect(running)
    assert done.returncode == 0
    assert "its controller is alive: controller of job demo" in done.stdout
    assert "as far as the journal goes" in done.stdout
    assert (running / "lock").read_bytes() == before


def test_damage_is_told_after_what_is_readable(run_dir: Path, tmp_path: Path) -> None:
    content = bytearray((run_dir / "journal").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "journal").write_bytes(content)
    done = inspect(tmp_path)
    assert done.returncode == 1
    assert "ROUND 0" in done.stdout
    assert "is damaged at offset" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["no-such-place"], "does not exist"),
        (["."], "holds no journal"),
        ([__file__], "is not a perdure journal"),
    ],
)
def test_what_is_no_journal_is_refused(arguments: list[str], why: str, tmp_path: Path) -> None:
    command = [str(PERDURE), "inspect", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("perdure inspect: ")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_round_that_never_was_is_refused(run_dir: Path) -> None:
    done = inspect(run_dir, "--round", 7)
    assert done.returncode == 1
    assert "there is no round 7" in done.stderr
    assert "rounds 0 to 2" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(run_dir: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        command = [str(PERDURE), "inspect", str(run_dir)]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
