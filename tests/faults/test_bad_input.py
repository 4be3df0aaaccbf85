"""Wrong configuration, hostile peers, full and forbidden folders: one clear error, or a refusal; nobody dies."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from perdure.controller.journal import read_records

from .cluster import kill_controller, same_processes, stamp, wait_new, wait_phase
from .harness import PERDURE, Job


class Answer:
    """How a command ended that should not start anything."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        self.code = done.returncode
        self.said = done.stderr + done.stdout


def run(folder: Path, *words: str, env: dict[str, str] | None = None, command: str = "run") -> Answer:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SLURM"))}
    end = ["--", "true"] if command == "run" else []
    line = [str(PERDURE), command, *words, *end]
    done = subprocess.run(
        line, cwd=folder, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=30, check=False
    )
    return Answer(done)


def assert_refused(answer: Answer, *words: str) -> None:
    assert answer.code == 2, answer.said
    assert "Traceback" not in answer.said, answer.said
    for word in words:
        assert word in answer.said, f"{word!r} is not in: {answer.said}"


# ---- configuration --------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_comes_in_one_error(tmp_path: Path) -> None:
    """A wrong type, an unknown knob and a contradiction, each from another source."""
    (tmp_path / "perdure.toml").write_text('soft_timeout = "soon"\nsoft_timout = 3\n')
    answer = run(tmp_path, "--heartbeat-interval=60", "--heartbeat-timeout=30", env={"PERDURE_MAX_ITERATIONS": "many"})
    assert_refused(answer, "errors in the configuration", "soon", "soft_timout", "did you mean soft_timeout")
    assert_refused(answer, "PERDURE_MAX_ITERATIONS=many", "heartbeat_interval < heartbeat_timeout")
    assert not (tmp_path / "perdure-runs").exists()


@pytest.mark.parametrize("command", ["run", "controller"])
def test_contradictions_are_refused_by_both_commands(tmp_path: Path, command: str) -> None:
    answer = run(tmp_path, "--soft-timeout=90", "--hard-timeout=60", "--barrier-timeout=30", command=command)
    assert_refused(answer, "soft_timeout < hard_timeout", "hard_timeout < barrier_timeout")


def test_more_active_ranks_than_there_are(tmp_path: Path) -> None:
    assert_refused(run(tmp_path, "--nproc=2", "--active-world-size=3"), "active_world_size", "here 2")


def test_no_program(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SLURM"))}
    line = [str(PERDURE), "run", "--nproc", "0"]
    done = subprocess.run(line, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=30, check=False)
    assert_refused(Answer(done), "nothing after --", "--nproc 0")


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    line = [str(PERDURE), "run", "--run-dir", str(tmp_path / "run"), "--", "/no/such/program"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 127, done.stderr
    assert "/no/such/program" in done.stderr
    assert "Traceback" not in done.stderr


# ---- addresses ------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = run(
            tmp_path,
            "--agents=1",
            "--host=127.0.0.1",
            f"--port={port}",
            f"--run-dir={tmp_path}/r",
            command="controller",
        )
    assert_refused(answer, f"port {port}", "another program has it")


def test_a_host_that_cannot_be_resolved(tmp_path: Path) -> None:
    answer = run(tmp_path, "--agents=1", "--host=no-such-host.invalid", "--run-dir=r", command="controller")
    assert_refused(answer, "no-such-host.invalid")


def test_an_address_of_another_host(tmp_path: Path) -> None:
    answer = run(tmp_path, "--agents=1", "--host=192.0.2.7", "--run-dir=r", command="controller")
    assert_refused(answer, "192.0.2.7", "this host has no such address")


def test_a_host_name_that_nobody_can_resolve_does_not_matter(launch: Callable[..., Job]) -> None:
    prefix = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid; exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no UTS namespaces can be made here")
    job = launch(prefix=prefix)
    job.wait_round(0)
    assert job.finish() == 0


# ---- the run directory ----------------------------------------------------------------------------------------


def controller_on(job: Job, *words: str) -> Answer:
    """A controller of the job's run directory, started by hand."""
    line = [str(PERDURE), "controller", "--run-dir", str(job.run_dir), "--agents", "2", "--host", "127.0.0.1", *words]
    return Answer(
        subprocess.run(line, env=job.env, cwd=job.folder, capture_output=True, text=True, timeout=30, check=False)
    )


@pytest.fixture
def headless(launch: Callable[..., Job]) -> Iterator[Job]:
    """A job that runs, and has just lost its controller. It goes on with another one afterwards, to its end."""
    job = launch(nodes=("n0", "n1"), nproc=1)
    before = job.wait_round(0)
    wait_phase(job, "running")
    kill_controller(job)
    journal = (job.run_dir / "journal").read_bytes()
    yield job
    path = job.run_dir / "journal"
    if path.is_fifo():
        path.unlink()
    path.write_bytes(journal)
    path.chmod(0o600)
    since = stamp(job)
    job.start_controller()
    wait_new(job, since, "controller_back")
    same_processes(before, job)
    assert job.finish() == 0
    job.assert_rounds(1)


def test_the_journal_of_another_job(headless: Job) -> None:
    answer = controller_on(headless, "--job", "somebody-else")
    assert_refused(answer, headless.env["PERDURE_JOB"], "somebody-else")


def test_a_damaged_journal_is_refused_with_the_offset(headless: Job) -> None:
    path = headless.run_dir / "journal"
    offset, payload = list(read_records(path))[1]  # there is always one behind it: the last may be half written
    content = bytearray(path.read_bytes())
    place = content.index(payload)
    content[place + len(payload) // 2] ^= 0x40
    path.write_bytes(content)
    assert_refused(controller_on(headless), str(offset), str(path))


def test_a_journal_that_is_a_fifo(headless: Job) -> None:
    path = headless.run_dir / "journal"
    path.unlink()
    os.mkfifo(path)
    assert_refused(controller_on(headless), "is not a regular file")


def test_a_journal_with_a_torn_tail_is_cut(launch: Callable[..., Job]) -> None:
    job = launch(nodes=("n0", "n1"), nproc=1)
    before = job.wait_round(0)
    wait_phase(job, "running")
    kill_controller(job)
    with open(job.run_dir / "journal", "ab") as file:
        file.write(b"\x40\x00\x00\x00\x12\x34")
    since = stamp(job)
    job.start_controller()
    wait_new(job, since, "controller_back")
    same_processes(before, job)
    assert job.finish() == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(folder: Path, run_dir: Path) -> Answer:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("another user's rights need root and setpriv")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*user, str(PERDURE), "--version"], capture_output=True, check=False).returncode:
        pytest.skip("user nobody cannot run this installation")
    line = [*user, str(PERDURE), "controller", "--agents=1", "--host=127.0.0.1", f"--run-dir={run_dir}"]
    return Answer(subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=30, check=False))


def test_a_run_directory_of_somebody_else(open_folder: Path) -> None:
    run_dir = open_folder / "run"
    run_dir.mkdir(mode=0o700)
    assert_refused(as_nobody(open_folder, run_dir), str(run_dir))


def test_a_run_directory_that_cannot_be_made(open_folder: Path) -> None:
    assert_refused(as_nobody(open_folder, open_folder / "run"), "cannot make the run directory", "Permission denied")


def test_a_run_directory_into_which_others_may_write(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    answer = run(tmp_path, f"--run-dir={run_dir}", "--agents=1", command="controller")
    assert_refused(answer, "others may write", f"chmod go-w {run_dir}")


def test_what_the_own_controller_refuses_ends_the_agent(tmp_path: Path) -> None:
    """`perdure run` alone on a machine: the error is shown once, and nothing goes on without a controller."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    answer = run(tmp_path, f"--run-dir={run_dir}")
    assert_refused(answer, "others may write")


# ---- full disks -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "perdure-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_a_disk_that_is_full_at_the_start(small_disk: Path, tmp_path: Path) -> None:
    fill(small_disk)
    answer = run(tmp_path, f"--run-dir={small_disk}", "--agents=1", "--host=127.0.0.1", command="controller")
    assert_refused(answer, "No space left on device", str(small_disk))


def test_a_disk_that_fills_up_under_the_journal(small_disk: Path, launch: Callable[..., Job]) -> None:
    """The job goes on, faults are still handled, and somebody is told."""
    job = launch(nodes=("n0", "n1"), nproc=2, run_dir=small_disk)
    before = job.wait_round(0)
    wait_phase(job, "running")
    fill(small_disk)
    for index in range(3):
        job.kill(before[3])
        after = job.wait_round(index + 1)
        assert job.survivors(before, after, dead={3}) == 3
        before = after
    assert job.finish() == 0
    job.assert_rounds(4)
    assert "Traceback" not in job.output("controller")


def test_a_full_disk_under_the_logs_of_the_ranks(small_disk: Path, launch: Callable[..., Job]) -> None:
    fill(small_disk)
    job = launch(
        "print('x' * 100000, file=sys.stderr)\nrun()\n", nproc=2, monitor_process_logdir=str(small_disk / "logs")
    )
    before = job.wait_round(0)
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 1
    assert job.finish() == 0


# ---- streams --------------------------------------------------------------------------------------------------


def test_the_reader_of_the_output_goes_away(launch: Callable[..., Job]) -> None:
    """`perdure run ... 2>&1 | head -1`"""
    job = launch(
        """
        def fault(round, step):
            print("a line of output", round.rank, step, flush=False)
            print("a line of stderr", round.rank, step, file=sys.stderr)
        run(fault)
        """,
        prefix=["sh", "-c", '("$@"; echo $? > code) 2>&1 | head -1 > first', "sh"],
        nproc=2,
    )
    before = job.wait_round(0)
    job.wait_for(lambda: (job.folder / "first").stat().st_size > 0, "the first line")
    job.kill(before[0])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 1
    job.finish()
    assert (job.folder / "code").read_text() == "0\n"
    assert len((job.folder / "first").read_text().splitlines()) == 1


# ---- peers ----------------------------------------------------------------------------------------------------


def garbage(address: tuple[str, int]) -> None:
    """What strangers on a network send: web requests, random bytes, pickles, and nothing at all."""
    zmtp = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    for data in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000), pickle.dumps({"rank": 0}), zmtp, b""):
        for _ in range(5):
            with socket.create_connection(address, timeout=5) as stranger:
                stranger.sendall(data)


def knock(address: str, **options: str) -> None:
    """A ZeroMQ peer without the job's keys, or with wrong ones."""
    context = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        if options:
            public, secret = zmq.curve_keypair()
            peer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            peer.setsockopt(zmq.CURVE_SECRETKEY, secret)
            peer.setsockopt(zmq.CURVE_SERVERKEY, options["server_public"].encode())
        peer.connect(address)
        for _ in range(20):
            peer.send(pickle.dumps({"stop": True}))
        peer.poll(300)
        peer.close()
    finally:
        context.term()


def test_strangers_on_the_port_change_nothing(launch: Callable[..., Job]) -> None:
    job = launch(nodes=("n0", "n1"), nproc=2)
    before = job.wait_round(0)
    endpoint = job.endpoint()
    host, _, port = endpoint["address"].rpartition("//")[2].rpartition(":")
    garbage((host, int(port)))
    knock(endpoint["address"])
    knock(endpoint["address"], server_public=endpoint["server_public"])
    same_processes(before, job)
    job.kill(before[2])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={2}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    totals = job.log("refused")[-1]["text"]
    assert "connections (key refused)" in totals
    assert "connections (invalid handshake)" in totals or "connections (ended without a message)" in totals


def test_a_peer_with_the_keys_that_talks_nonsense(launch: Callable[..., Job]) -> None:
    """Somebody of the same user, with the job's own keys: every message is refused and counted."""
    job = launch(nodes=("n0", "n1"), nproc=2)
    before = job.wait_round(0)
    endpoint, keys = job.endpoint(), json.loads((job.run_dir / "keys.json").read_bytes())
    context = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, keys["client_public"].encode())
        peer.setsockopt(zmq.CURVE_SECRETKEY, keys["client_secret"].encode())
        peer.setsockopt(zmq.CURVE_SERVERKEY, endpoint["server_public"].encode())
        peer.connect(endpoint["address"])
        for data in (b"", b"\x00", os.urandom(1000), pickle.dumps(["stop"]), b"\xdf\xff\xff\xff\xff", b"[" * 1000):
            peer.send(data)
            peer.send_multipart([data, data])
        job.wait_log("refused")
        peer.close()
    finally:
        context.term()
    same_processes(before, job)
    job.kill(before[0])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 3
    assert job.finish() == 0
