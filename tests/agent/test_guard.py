"""The guard: a killed agent leaves nothing, and an orderly end or a dead guard harms nobody."""

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.worker_runtime.agent.guarding import keep_guard
from perdure.worker_runtime.agent.reaper import children, reap_orphans
from perdure.worker_runtime.agent.tree import marked

Run = Callable[[Callable[[], Any]], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

AGENT = textwrap.dedent(
    """
    import os, sys, trio
    from perdure.worker_runtime.agent import guarding, processes, reaper
    from perdure.worker_runtime.agent.fork_server import ForkServer
    RANK = '''
    import os, signal, socket, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
    socket.socket(fileno=int(os.environ["PERDURE_RANK_FD"])).send(b"up")
    time.sleep(60)
    '''
    async def main():
        reaper.become_subreaper()
        env = {**os.environ, "PERDURE_TOKEN": sys.argv[1]}
        path = sys.argv[2]
        with open(path, "w") as file: file.write(RANK)
        async with trio.open_nursery() as nursery:
            await nursery.start(reaper.reaper)
            await nursery.start(guarding.keep_guard, sys.argv[1], print)
            server = ForkServer(env, print, ["json"])
            nursery.start_soon(server.serve)
            await server.ready.wait()
            for index, fork in enumerate((None, server)):
                rank = await processes.spawn([sys.executable, path], f"n0/{index}", 1, env, fork_server=fork)
                assert rank.forked == bool(fork)
                for _ in range(2):
                    await trio.lowlevel.wait_readable(rank.sock)
                    rank.sock.recv(10)
            print("up", flush=True)
            await trio.sleep_forever()
    """
)


def test_a_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    script = f"{AGENT}\ntrio.run(main)\n"
    command = [sys.executable, "-c", script, token, str(tmp_path / "rank.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"up\n"
        assert len(marked((f"PERDURE_TOKEN={token}".encode(),))) == 5  # Two ranks, their orphans, the fork server.
        agent.kill()
        killed = time.monotonic()
    while marked((f"PERDURE_TOKEN={token}".encode(),)):
        assert time.monotonic() - killed < 3.0
        time.sleep(0.01)
    while children():  # The guard, and what it killed: this test is their subreaper.
        assert time.monotonic() - killed < 5.0
        reap_orphans()


def test_goodbye_harms_nobody_and_the_guard_leaves(run: Run) -> None:
    token = secrets.token_hex(8)

    async def main() -> None:
        environment = {**os.environ, "PERDURE_TOKEN": token}
        with subprocess.Popen(["sleep", "60"], env=environment) as bystander:  # noqa: ASYNC220
            async with trio.open_nursery() as nursery:
                await nursery.start(keep_guard, token, print)
                assert len(children()) == 2
                nursery.cancel_scope.cancel()
            assert children() == [bystander.pid]
            assert bystander.poll() is None
            bystander.kill()

    run(main)


def test_a_killed_guard_is_replaced(run: Run, until: Until) -> None:
    lines: list[str] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(keep_guard, "x", lines.append)
            (first,) = children()
            os.kill(first, signal.SIGKILL)
            await until(lambda: children() not in ([first], []))
            nursery.cancel_scope.cancel()

    run(main)
    assert len(lines) == 1
    assert "died" in lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what a process waits for")
def test_the_guard_is_small(run: Run, until: Until) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(keep_guard, "x", print)
            (pid,) = children()
            proc = Path("/proc", str(pid))
            # Until it waits for its pipe.
            await until(lambda: "read" in (proc / "wchan").read_text())
            pages = int((proc / "statm").read_text().split()[1])
            assert pages * os.sysconf("SC_PAGE_SIZE") < 16 << 20
            nursery.cancel_scope.cancel()

    run(main)
