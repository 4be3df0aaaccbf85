"""Process trees: nobody of the family is missed, no stranger is touched."""

import os
import signal
import subprocess
import time

from perdure.worker_runtime.agent.tree import (
    Entry,
    descendants,
    family,
    has_marks,
    is_living,
    kill_all,
    marked,
    rank_marks,
    read_entry,
    send,
)


def start(*command: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, **env})


def key_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    entry = read_entry(process.pid)
    assert entry is not None
    return entry.key


def test_a_process_name_may_hold_anything() -> None:
    entry = Entry(7, b"7 (a) b) S 1) S 3 4 5 6 7 4194304 0 0 0 0 0 0 0 0 20 0 1 0 99 0")
    assert (entry.parent, entry.session, entry.start, entry.dead) == (3, 5, 99, False)


def test_a_stranger_with_a_recycled_pid_is_never_signalled() -> None:
    with start("sleep", "60") as stranger:
        pid, started = key_of(stranger)
        recorded = (pid, started - 1)
        assert not send(recorded, signal.SIGKILL)
        assert family(recorded, rank_marks("no-such-token", "n0/0", 1)) == []
        assert kill_all(lambda: family(recorded, (b"PERDURE_TOKEN=no-such-token",))) == []
        assert stranger.poll() is None
        assert send((pid, started), signal.SIGKILL)
    assert not send((pid, started), signal.SIGKILL)


def test_gone_processes_are_nobody() -> None:
    process = start("true")
    key = key_of(process)
    process.wait()
    assert read_entry(process.pid) is None
    assert not is_living(key)
    assert not has_marks(process.pid, (b"A=b",))
    assert family(key, (b"PERDURE_TOKEN=none",)) == []


def test_marks_are_whole_variables() -> None:
    with start("sleep", "60", PERDURE_TOKEN="abc", PERDURE_SLOT="n0/1", PERDURE_LIFE="12") as process:
        deadline = time.monotonic() + 5
        while not has_marks(process.pid, rank_marks("abc", "n0/1", 12)):  # Until it is past exec.
            assert time.monotonic() < deadline
        assert not has_marks(process.pid, rank_marks("abc", "n0/1", 1))
        assert [e.pid for e in marked(rank_marks("abc", "n0/1", 12))] == [process.pid]
        process.kill()


def test_descendants_survive_a_loop_in_the_table() -> None:
    """Pids may be reused while the table is read, so parents may form a circle."""
    line = b"1 (x) S %d 1 1 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0"
    table = {2: Entry(2, line % 3), 3: Entry(3, line % 2), 4: Entry(4, line % 9)}
    assert descendants(table, 2) == {2, 3}
