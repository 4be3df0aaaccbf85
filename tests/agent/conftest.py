"""What the tests of process supervision share. Each test must leave no child and no descriptor behind."""

import ctypes
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.worker_runtime.agent.processes import RankProcess
from perdure.worker_runtime.agent.reaper import PR_SET_CHILD_SUBREAPER, become_subreaper, children, reaper
from perdure.worker_runtime.agent.tree import descendants, kill_all, read_entry, snapshot


@pytest.fixture(scope="module", autouse=True)
def subreaper() -> Iterator[None]:
    """For these tests only: whoever runs the others buries no orphans."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)


@pytest.fixture
def env() -> dict[str, str]:
    """A rank's environment, with a token of this test's own."""
    return {**os.environ, "PERDURE_TOKEN": secrets.token_hex(8), "PYTHONDONTWRITEBYTECODE": "1"}


HELLO = """
import os, socket
sock = socket.socket(fileno=int(os.environ["PERDURE_RANK_FD"]))
def say(text): sock.send(str(text).encode())
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command that runs this source, quickly; the source may `say` something to its agent."""

    def command(source: str) -> list[str]:
        path = tmp_path / f"{secrets.token_hex(4)}.py"
        path.write_text(HELLO + source)
        return [sys.executable, "-S", str(path)]

    return command


async def _until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


@pytest.fixture
def line_from() -> Callable[[RankProcess], Awaitable[str]]:
    """The next thing that a rank says."""

    async def line(process: RankProcess) -> str:
        await trio.lowlevel.wait_readable(process.sock)
        return process.sock.recv(65536).decode()

    return line


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits for what the kernel tells nobody."""
    return _until


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[], Awaitable[Any]]], Any]]:
    """Runs an async function beside the reaper, for 30 s at most, and checks that it left nothing."""

    def runner(function: Callable[[], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    await nursery.start(reaper)
                    result = await function()
                    await _until(lambda: children() == [])  # The reaper is about to bury the last orphans.
                    nursery.cancel_scope.cancel()
            return result

        before = set(os.listdir("/proc/self/fd"))
        result = trio.run(main)
        assert len(set(os.listdir("/proc/self/fd")) - before) == 0
        return result

    yield runner
    left = children()
    kill_all(lambda: [entry for pid in descendants(snapshot(), os.getpid()) if (entry := read_entry(pid)) is not None])
    while children():  # So that one failure does not become those of the tests after it.
        os.wait()
    assert left == []
