"""An OOM kill is told from a plain SIGKILL, by the counts of the kernel."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.protocol.names import Slot
from perdure.worker_runtime.agent import oom
from perdure.worker_runtime.agent.oom import OomWatch, count_file, read_count
from perdure.worker_runtime.agent.processes import finish, spawn, wait_exit

Run = Callable[[Callable[[], Any]], Any]
SLOT = Slot("n0/0")

EAT = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
sock = socket.socket(fileno=int(os.environ["PERDURE_RANK_FD"]))
sock.send(b"in")
sock.recv(10)
eaten = [bytearray(b"x") * (4 << 20) for _ in range(100)]
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of 64 MiB, of this test's own."""
    file = count_file(os.getpid())
    if file is None:
        pytest.skip("this machine shows no OOM counts")
    folder = Path(file).parent / f"perdure-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if Path(file).name == "memory.oom_control" else "memory.max"
        (folder / limit).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


async def eater(env: dict[str, str], folder: Path) -> Any:
    """A rank that waits in the cgroup, with the watch that a rank gets which was started there."""
    process = await spawn([sys.executable, "-S", "-c", EAT, str(folder)], SLOT, 1, env)
    process.sock.setblocking(True)
    assert process.sock.recv(10) == b"in"
    process.sock.setblocking(False)
    process.oom = OomWatch(process.pid)
    return process


def test_an_oom_kill_is_told_from_kill_9(run: Run, env: dict[str, str], group: Path) -> None:
    """Two ranks share a cgroup: one is the OOM killer's, the other one is killed by hand after it."""

    async def main() -> None:
        victim, other = await eater(env, group), await eater(env, group)
        assert victim.oom.usable
        victim.sock.send(b"eat")
        assert await wait_exit(victim) == -signal.SIGKILL
        os.kill(other.pid, signal.SIGKILL)
        assert await wait_exit(other) == -signal.SIGKILL
        assert victim.oom.claim()
        assert not other.oom.claim()
        assert not victim.oom.claim()
        for process in (victim, other):
            await finish(process, 0)

    run(main)


def test_a_plain_kill_is_never_oom(run: Run, env: dict[str, str]) -> None:
    async def main() -> None:
        process = await spawn(["sleep", "60"], SLOT, 1, env)
        os.kill(process.pid, signal.SIGKILL)
        assert await wait_exit(process) == -signal.SIGKILL
        assert not process.oom.claim()
        await finish(process, 0)

    run(main)


def test_a_kill_that_the_rank_outlived_was_another_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "memory.events"
    counts.write_text("low 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    monkeypatch.setattr(oom, "count_file", lambda _: str(counts))
    monkeypatch.setattr(oom, "SETTLE_S", 0.0)
    with subprocess.Popen(["sleep", "60"]) as process:
        watch = OomWatch(process.pid)
        counts.write_text("oom_kill 4\n")
        watch.look()
        watch.look()
        assert not watch.claim()
        counts.write_text("oom_kill 5\n")
        watch.look()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        watch.look()  # A dead process lays nothing aside.
        assert watch.claim()
        assert not watch.claim()


def test_a_rise_before_the_start_and_a_claim_after_it_do_not_cancel_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "memory.oom_control"
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    monkeypatch.setattr(oom, "count_file", lambda _: str(counts))
    first = OomWatch(os.getpid())
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    second = OomWatch(os.getpid())
    assert first.claim()
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert second.claim()
    assert not first.claim()


def test_a_kernel_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_count(str(tmp_path / "none")) == 0
    monkeypatch.setattr(oom, "count_file", lambda _: None)
    watch = OomWatch(os.getpid())
    watch.look()
    assert not watch.usable
    assert not watch.claim()
