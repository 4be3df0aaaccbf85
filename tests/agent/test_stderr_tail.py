"""What ranks write to stderr: passed on, kept, bounded, and never in the way."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.protocol.names import Slot
from perdure.worker_runtime.agent.processes import (
    TERMINATED,
    finish,
    spawn,
    wait_exit,
)
from perdure.worker_runtime.agent.stderr_tail import KEEP_BYTES, KEEP_LINES, Outlet, StderrTail

Run = Callable[[Callable[[], Any]], Any]
Python = Callable[[str], list[str]]
SLOT = Slot("n0/3")


def test_stderr_without_newlines_is_bounded_and_passed_on(
    run: Run, env: dict[str, str], python: Python, tmp_path: Path
) -> None:
    source = (
        "import os\nfor i in range(500): os.write(2, b'x' * 10000)\nos.write(2, b'\\xff\\xfe the end')\nos._exit(3)"
    )

    async def main() -> None:
        outlet = Outlet(str(tmp_path))
        process = await spawn(python(source), SLOT, 1, env, outlets=(outlet,))
        assert await wait_exit(process) == 3
        await finish(process, 0)
        text = process.stderr.text()
        assert text.endswith("xxx\\xff\\xfe the end")
        assert len(text) <= KEEP_BYTES + 20
        assert process.stderr.total == 5_000_010
        outlet.close(5.0)
        assert (tmp_path / "n0-3.1.stderr").stat().st_size + outlet.dropped == 5_000_010

    run(main)


def test_only_the_last_lines_and_the_last_state_of_a_progress_bar_are_kept(run: Run) -> None:
    async def main() -> None:
        read, write = os.pipe()
        tail = StderrTail(read, "x")
        os.write(write, b"".join(b"line %d\r\n" % i for i in range(300)) + b"10%\r50%\r100%\n")
        os.close(write)
        await tail.pump()
        lines = tail.text().split("\n")
        assert lines[-1] == "100%"
        assert lines[-2] == "line 299"
        assert len(lines) <= KEEP_LINES
        tail.close()

    run(main)


def test_a_full_disk_or_a_missing_folder_costs_only_the_copy(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    outlet = Outlet(str(tmp_path))
    outlet.put("full", b"12345")
    outlet.put("good", b"123")
    outlet.close(5.0)
    assert outlet.dropped == 5
    assert "No space left" in outlet.error
    assert (tmp_path / "good").read_bytes() == b"123"
    gone = Outlet(str(tmp_path / "nowhere"))
    gone.put("a", b"12")
    gone.close(5.0)
    assert gone.dropped == 2


def test_a_reader_that_stalls_never_stalls_us(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stuck")
    outlet = Outlet(str(tmp_path))
    started = time.monotonic()
    for _ in range(100):
        outlet.put("stuck", bytes(100_000))
    outlet.close(0.05)
    assert time.monotonic() - started < 1.0
    assert outlet.dropped > 0
    # Let the thread go: it sits in the open of a FIFO that nobody reads.
    reader = os.open(tmp_path / "stuck", os.O_RDONLY)
    while os.read(reader, 1 << 20):
        pass
    os.close(reader)


def test_a_grandchild_that_holds_stderr_does_not_delay_the_news(run: Run, env: dict[str, str]) -> None:
    async def main() -> None:
        process = await spawn(["/bin/sh", "-c", "sleep 60 & echo last words >&2; exit 9"], SLOT, 1, env)
        started = time.monotonic()
        assert await wait_exit(process) == 9
        assert time.monotonic() - started < 2.0
        assert process.stderr.text() == "last words"
        assert len(process.family()) == 1
        assert await finish(process, 1.0) == TERMINATED
        assert process.family() == []

    run(main)
