"""A rank that begins to die is known long before it is dead."""

import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.protocol.names import Slot
from perdure.worker_runtime import last_breath
from perdure.worker_runtime.agent import processes
from perdure.worker_runtime.agent.processes import (
    RankProcess,
    finish,
    spawn,
    wait_exit,
)
from perdure.worker_runtime.agent.tree import is_exiting

Run = Callable[[Callable[[], Any]], Any]
Python = Callable[[str], list[str]]
Line = Callable[[RankProcess], Awaitable[str]]
SLOT = Slot("n0/3")


def test_dying_is_seen_long_before_death(
    run: Run, env: dict[str, str], python: Python, record_property: Callable[[str, object], None], line_from: Line
) -> None:
    """SIGKILL of a process with much memory: the flag at once, socket and pidfd only when the memory is torn down."""
    source = (
        "import time\nb = bytearray(800 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nsay('up')\ntime.sleep(60)"
    )

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        await line_from(process)
        assert not process.is_exiting()
        times: dict[str, float] = {}
        poll = select.poll()
        poll.register(process.pidfd, select.POLLIN)
        poll.register(process.sock, select.POLLIN)
        start = time.perf_counter()
        os.kill(process.pid, signal.SIGKILL)
        while len(times) < 3:  # A busy loop on purpose: it measures.
            if is_exiting(process.pid):
                times.setdefault("flag", time.perf_counter() - start)
            for descriptor, _ in poll.poll(0):
                times.setdefault("pidfd" if descriptor == process.pidfd else "socket", time.perf_counter() - start)
        for name, seconds in times.items():
            record_property(name, seconds)
        print({name: f"{1000 * seconds:.2f} ms" for name, seconds in times.items()}, file=sys.stderr)
        assert times["flag"] < min(times["socket"], times["pidfd"]) / 2
        assert await wait_exit(process) == -9
        await finish(process, 0)

    run(main)


BREATH = """
import sys, time
sys.path[:0] = [os.environ["RUNTIME"]]
import last_breath
assert last_breath.hold(int(os.environ["PERDURE_BEAT_FD"]))
if os.fork() == 0: os._exit(0)  # The death of a child is not the rank's.
os.wait()
"""


def test_dying_wakes_us_long_before_death(run: Run, env: dict[str, str], python: Python, line_from: Line) -> None:
    env["RUNTIME"] = str(Path(last_breath.__file__).parent)
    source = BREATH + "b = bytearray(600 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nsay('up')\ntime.sleep(60)"

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        await line_from(process)
        assert not process.dying.is_set()
        os.kill(process.pid, signal.SIGKILL)
        started = time.perf_counter()
        await process.dying.wait()
        told = time.perf_counter() - started
        assert await wait_exit(process) == -9
        dead = time.perf_counter() - started
        print(f"told after {1000 * told:.2f} ms, dead after {1000 * dead:.2f} ms")
        assert told < dead / 2
        await finish(process, 0)

    run(main)


def test_exec_is_not_death(
    run: Run, env: dict[str, str], python: Python, monkeypatch: pytest.MonkeyPatch, line_from: Line
) -> None:
    monkeypatch.setattr(processes, "DYING_WAIT_S", 0.05)
    env["RUNTIME"] = str(Path(last_breath.__file__).parent)
    source = BREATH + "say('up'); os.execv('/bin/sleep', ['sleep', '60'])"

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        await line_from(process)
        with trio.move_on_after(0.3):
            await process.dying.wait()
        assert not process.dying.is_set()
        await finish(process, 0)

    run(main)


def test_a_process_that_dumps_core_counts_as_exiting(run: Run, env: dict[str, str]) -> None:
    async def main() -> None:
        process = await spawn(["/bin/sh", "-c", "ulimit -c 0; kill -ABRT $$"], SLOT, 1, env)
        assert await wait_exit(process) == -signal.SIGABRT
        assert process.is_exiting()
        assert is_exiting(process.pid)  # A zombie.
        await finish(process, 0)
        assert is_exiting(process.pid)  # Nobody.

    run(main)
