"""Only one holder, for as long as it lives and not a moment longer."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.controller.lease import Condition, Holder, Lease, LeaseError, LeaseHeld, read_holder
from perdure.protocol.names import ProcessId, boot_id, start_time, this_process

HOLD = """
import sys
from pathlib import Path
from perdure.controller.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]), "controller 1 of job llama")
child = 0
{then}
print("held", flush=True)
print(child, flush=True)
sys.stdin.read()
"""

SPAWN = """
import subprocess
child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).pid
"""

FORK = """
import os, signal
told, telling = os.pipe()
child = os.fork()
if child == 0:
    os.write(telling, b"x")
    signal.pause()
os.read(told, 1)
"""


class Holding:
    """A real process that holds the lease."""

    def __init__(self, path: Path, then: str = "") -> None:
        program = HOLD.replace("{then}", then)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        self.pid = self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def holding(path: Path) -> Iterator[Holding]:
    holding = Holding(path)
    yield holding
    holding.close()


def refusal(path: Path) -> LeaseHeld:
    with pytest.raises(LeaseHeld) as caught:
        Lease.acquire(path, "second")
    return caught.value


def test_the_refusal_says_who_leads(path: Path, holding: Holding) -> None:
    held = refusal(path)
    assert held.holder is not None
    assert held.holder.process == ProcessId(boot_id(), holding.pid, start_time(holding.pid) or 0)
    assert held.condition is Condition.ALIVE
    assert f"controller 1 of job llama, pid {holding.pid} on {os.uname().nodename}, since 20" in str(held)
    assert "it is running" in str(held)


def test_a_killed_holder_gives_way_at_once(path: Path, holding: Holding) -> None:
    os.kill(holding.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holding.pid, os.WEXITED | os.WNOWAIT)  # dead, and not even reaped
    with Lease.acquire(path, "second"):
        holder = read_holder(path)
        assert holder is not None
        assert (holder.who, holder.process) == ("second", this_process())


def test_a_stopped_holder_still_leads_and_is_called_stopped(path: Path, holding: Holding) -> None:
    os.kill(holding.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holding.pid, os.WSTOPPED | os.WNOWAIT)
    held = refusal(path)
    assert held.condition is Condition.STOPPED
    assert "SIGSTOP" in str(held)
    assert "kill -CONT" in str(held)
    os.kill(holding.pid, signal.SIGCONT)
    os.waitid(os.P_PID, holding.pid, os.WCONTINUED | os.WNOWAIT)
    assert refusal(path).condition is Condition.ALIVE
    holding.kill()
    Lease.acquire(path, "second").release()


@pytest.mark.parametrize("then", [SPAWN, FORK], ids=["program", "fork"])
def test_a_child_does_not_keep_the_lease_of_a_killed_holder(path: Path, then: str) -> None:
    holding = Holding(path, then)
    assert holding.process.stdout is not None
    child = int(holding.process.stdout.readline())
    try:
        holding.kill()
        assert start_time(child) is not None, "the child outlives the holder"
        Lease.acquire(path, "second").release()
    finally:
        os.kill(child, signal.SIGKILL)
        holding.close()


def test_release_gives_way_and_forgets_the_name(path: Path) -> None:
    lease = Lease.acquire(path, "first")
    lease.release()
    lease.release()
    assert read_holder(path) is None
    Lease.acquire(path, "second").release()
    assert path.exists()


def test_the_same_process_cannot_take_it_twice_nor_lose_it_by_reading(path: Path) -> None:
    with Lease.acquire(path, "first"):
        assert path.read_bytes()
        assert refusal(path).condition is Condition.ALIVE
        done = subprocess.run(
            [sys.executable, "-c", HOLD.replace("{then}", ""), str(path)], capture_output=True, text=True
        )
        assert "LeaseHeld" in done.stderr


def test_conditions(path: Path) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = ProcessId(boot_id(), child.pid, start_time(child.pid) or 0)
    assert Holder("x", "here", zombie, 0.0).condition() is Condition.ZOMBIE
    child.wait()
    assert Holder("x", "here", zombie, 0.0).condition() is Condition.GONE
    me = this_process()
    assert Holder("x", "here", me, 0.0).condition() is Condition.ALIVE
    assert Holder("x", "here", ProcessId(me.boot, me.pid, me.start - 1), 0.0).condition() is Condition.GONE
    assert Holder("x", "there", ProcessId("another boot", me.pid, me.start), 0.0).condition() is Condition.ELSEWHERE


def test_a_holder_that_wrote_nothing_readable_still_holds(path: Path) -> None:
    with Lease.acquire(path, "first"):
        path.write_bytes(b"\xff garbage")
        held = refusal(path)
        assert (held.holder, held.condition) == (None, None)
        assert "has not said who it is" in str(held)


def test_unusable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match=r"cannot open the lease .*No such file or directory"):
        Lease.acquire(tmp_path / "nowhere" / "lock", "first")
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(LeaseError, match="not a regular file"):
        Lease.acquire(tmp_path / "lock", "first")


def test_a_full_disk_does_not_keep_the_lease_from_being_taken(small_disk: Path, fill: Callable[[Path], Path]) -> None:
    (small_disk / "lock").touch()
    fill(small_disk)
    with Lease.acquire(small_disk / "lock", "first"):
        assert "has not said" in str(refusal(small_disk / "lock"))
