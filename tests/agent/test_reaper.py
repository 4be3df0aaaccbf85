"""Orphans are adopted and buried; children that somebody waits for are left alone."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from perdure.worker_runtime.agent.reaper import children, claim_child, exit_code, reap_orphans, release_child

Run = Callable[[Callable[[], Any]], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

ORPHANS = """
import os
for i in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: os._exit(i)
        os._exit(0)
    os.wait()
"""


def test_orphans_are_buried_on_sigchld(run: Run, until: Until) -> None:
    async def main() -> None:
        process = subprocess.Popen([sys.executable, "-S", "-c", ORPHANS])  # noqa: ASYNC220
        claim_child(process.pid)
        pidfd = os.pidfd_open(process.pid)
        await trio.lowlevel.wait_readable(pidfd)
        await until(lambda: children() == [process.pid])  # The reaper is woken by each of them.
        assert exit_code(pidfd, os.WNOWAIT) == 0
        assert process.wait() == 0
        release_child(process.pid)
        os.close(pidfd)

    run(main)


def test_a_claimed_child_keeps_its_status() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "exit 41"])
    claim_child(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert reap_orphans() == 0
    release_child(process.pid)
    assert process.wait() == 41


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a pid namespace needs root and unshare"
)
def test_it_works_as_pid_1() -> None:
    """In a pid namespace of its own, as in a container: orphans come to PID 1, and none stays a zombie."""
    source = """
        import os, secrets, sys, trio
        from perdure.worker_runtime.agent import processes, reaper
        from perdure.worker_runtime.agent.tree import snapshot
        async def main():
            assert os.getpid() == 1
            reaper.become_subreaper()
            env = {**os.environ, "PERDURE_TOKEN": "t"}
            async with trio.open_nursery() as nursery:
                await nursery.start(reaper.reaper)
                rank = await processes.spawn([sys.executable, "-S", "-c", ORPHANS + "os._exit(6)"], "n0/0", 1, env)
                assert await processes.wait_exit(rank) == 6
                await processes.finish(rank, 0)
                with trio.fail_after(5):
                    while len(snapshot()) > 1: await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
            print("clean")
        """
    program = f"ORPHANS = {ORPHANS!r}\n{textwrap.dedent(source)}\ntrio.run(main)"
    command = ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "clean\n", done.stderr
