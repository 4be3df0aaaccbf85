"""Real processes: starting them, learning of their end, ending them."""

import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.protocol.names import Slot, is_alive
from perdure.worker_runtime.agent import processes
from perdure.worker_runtime.agent.processes import (
    KILLED,
    TERMINATED,
    RankProcess,
    SpawnError,
    finish,
    kill,
    kill_tree_now,
    spawn,
    wait_exit,
)
from perdure.worker_runtime.agent.tree import is_living, read_entry

Run = Callable[[Callable[[], Any]], Any]
Python = Callable[[str], list[str]]
Line = Callable[[RankProcess], Awaitable[str]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
SLOT = Slot("n0/3")


def test_every_exit_code_and_signal_is_told(run: Run, env: dict[str, str]) -> None:
    async def one(script: str, wanted: int, limit: trio.CapacityLimiter) -> None:
        async with limit:
            process = await spawn(["/bin/sh", "-c", script], Slot(f"n0/{wanted}"), 1, env)
            assert await wait_exit(process) == wanted
            assert await wait_exit(process) == wanted
            assert await finish(process, 0.1) == TERMINATED
            assert process.code == wanted

    async def main() -> None:
        limit = trio.CapacityLimiter(8)
        async with trio.open_nursery() as nursery:
            for code in range(0, 256, 5):
                nursery.start_soon(one, f"exit {code}", code, limit)
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1):
                nursery.start_soon(one, f"ulimit -c 0; kill -{int(number)} $$", -number, limit)

    run(main)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (None, "not on PATH"),
        ("missing", "no such program"),
        ("plain", "not executable"),
        ("text", "interpreter"),
    ],
)
def test_a_command_that_cannot_start_is_one_clear_error(
    run: Run, env: dict[str, str], tmp_path: Path, make: str | None, words: str
) -> None:
    program = tmp_path / "program"
    if make in ("plain", "text"):
        program.write_text("no script")
        program.chmod(0o755 if make == "text" else 0o644)

    async def main() -> None:
        with pytest.raises(SpawnError, match=words) as caught:
            await spawn([str(program) if make else "no-such-program"], SLOT, 1, env)
        assert SLOT in str(caught.value)

    run(main)


def test_a_rank_without_token_is_refused(run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="PERDURE_TOKEN"):
            await spawn(["true"], SLOT, 1, {})

    run(main)


def test_what_a_rank_inherits(run: Run, env: dict[str, str], python: Python, line_from: Line) -> None:
    source = """
links = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
names = {os.path.basename(link): os.readlink(link) for link in links if os.path.exists(link)}
page = os.environ["PERDURE_BEAT_FD"]
extra = set(names) - {"0", "1", "2", page, str(sock.fileno())}
say((os.getsid(0) == os.getpid(), names["0"], "memfd" in names[page], sorted(extra), os.environ["PERDURE_SLOT"],
     os.environ["PERDURE_LIFE"]))
"""

    async def main() -> None:
        leak = os.open("/dev/null", os.O_RDONLY)
        process = await spawn(python(source), SLOT, 4, env)
        os.close(leak)
        told = await line_from(process)
        assert told == str((True, "/dev/null", True, [], "n0/3", "4"))
        assert await wait_exit(process) == 0
        assert process.sock.recv(10) == b""
        assert not is_alive(process.identity)
        await finish(process, 0)

    run(main)


FAMILY = """
import signal, time
def child(own_session, orphan, deaf):
    if os.fork() == 0:
        if own_session: os.setsid()
        if orphan and os.fork(): os._exit(0)
        if deaf: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(os.getpid())
        time.sleep(60)
        os._exit(0)
child(False, False, False)
child(True, False, True)
child(True, True, False)
child(True, True, True)
"""


@pytest.mark.parametrize("end", ["exits", "killed", "lives"])
def test_the_whole_tree_goes(run: Run, env: dict[str, str], python: Python, end: str, line_from: Line) -> None:
    """Children in the same session, in their own, orphans in their own, deaf to SIGTERM or not."""
    source = FAMILY + ("say('done')\n" if end == "exits" else "say('done'); time.sleep(60)\n")

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        told = [await line_from(process) for _ in range(5)]
        keys = [e.key for pid in told if pid != "done" and (e := read_entry(int(pid))) is not None]
        assert len(keys) == 4
        if end == "lives":
            assert await kill(process, 0.1) == KILLED
            assert await wait_exit(process) == -signal.SIGTERM
        else:
            if end == "killed":
                os.kill(process.pid, signal.SIGKILL)
            assert await wait_exit(process) == (0 if end == "exits" else -9)
            assert sum(is_living(key) for key in keys) == 4
        result = await finish(process, 0.1)
        assert result == (TERMINATED if end == "lives" else KILLED)
        assert not any(is_living(key) for key in keys)

    run(main)


FUGITIVE = """
import os, time
# Always on the move: the process that a scan finds is soon gone, and its child lives. Bounded, in case nobody stops it.
for _ in range(5000):
    if os.fork(): os._exit(0)
    if os.fork() == 0: time.sleep(20); os._exit(0)
"""


def test_a_fork_bomb_is_stopped(run: Run, env: dict[str, str], python: Python) -> None:
    async def main() -> None:
        process = await spawn(python(FUGITIVE), SLOT, 1, env)
        assert await wait_exit(process) == 0
        assert await kill_tree_now(process) == KILLED
        assert process.family() == []
        await finish(process, 0)

    run(main)


def test_another_rank_and_another_life_are_left_alone(
    run: Run, env: dict[str, str], python: Python, until: Until, line_from: Line
) -> None:
    async def main() -> None:
        ranks = [
            await spawn(python(FAMILY + "time.sleep(60)"), slot, life, env)
            for slot, life in ((SLOT, 1), (SLOT, 2), (Slot("n0/4"), 1))
        ]
        for process in ranks:
            for _ in range(4):
                await line_from(process)
        await until(lambda: [len(process.family()) for process in ranks] == [5, 5, 5])
        assert await kill_tree_now(ranks[0]) == KILLED
        assert [len(process.family()) for process in ranks] == [0, 5, 5]
        for process in ranks:
            await finish(process, 0)

    run(main)


def test_a_stopped_rank_runs_its_handler_first(run: Run, env: dict[str, str], python: Python, line_from: Line) -> None:
    source = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(44))\nsay('up')\ntime.sleep(60)"

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        await line_from(process)
        os.kill(process.pid, signal.SIGSTOP)
        assert await kill(process, 5.0) == TERMINATED
        assert await wait_exit(process) == 44
        await finish(process, 0)

    run(main)


def test_a_cancelled_kill_kills_at_once(
    run: Run, env: dict[str, str], python: Python, until: Until, line_from: Line
) -> None:
    async def main() -> None:
        process = await spawn(python(FAMILY + "time.sleep(60)"), SLOT, 1, env)
        for _ in range(4):
            await line_from(process)
        with trio.move_on_after(0.05):
            await kill(process, 30.0)
        await until(lambda: process.family() == [])
        with trio.move_on_after(0):
            await finish(process, 1.0)
        assert process.finished

    run(main)


def test_a_cancelled_wait_loses_nothing(run: Run, env: dict[str, str], python: Python, line_from: Line) -> None:
    source = "os.write(2, b'one\\n'); say('up'); sock.recv(10); os.write(2, b'two\\n'); os._exit(5)"

    async def main() -> None:
        process = await spawn(python(source), SLOT, 1, env)
        await line_from(process)
        with trio.move_on_after(0.05):
            await wait_exit(process)
        process.sock.send(b"go")
        assert await wait_exit(process) == 5
        assert process.stderr.text() == "one\ntwo"
        await finish(process, 0)

    run(main)


def test_thirty_lives_leave_nothing(run: Run, env: dict[str, str]) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for life in range(30):
            process = await spawn(["/bin/sh", "-c", "sleep 60 & sleep 60"], SLOT, life, env)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_exit, process)
                await kill(process, 0.2 if life % 2 else 0)
            assert process.code in (-15, -9)
            await finish(process, 0)
        assert len(os.listdir("/proc/self/fd")) == before

    run(main)


def test_a_host_out_of_descriptors_leaks_none(run: Run, env: dict[str, str]) -> None:
    async def main() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        try:
            for spare in range(12):
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
                try:
                    process = await spawn(["sleep", "60"], SLOT, 1, env)
                except (OSError, SpawnError):
                    continue
                await finish(process, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    run(main)


def test_unkillable_is_said(run: Run, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here can withstand SIGKILL, so the signal is kept from it."""
    monkeypatch.setattr(processes, "KILL_WAIT_S", 0.1)

    async def main() -> None:
        process = await spawn(["sleep", "60"], SLOT, 1, env)
        with monkeypatch.context() as patch:
            patch.setattr(processes, "kill_all", lambda find, _: [entry.key for entry in find()])
            assert await kill_tree_now(process) == processes.UNKILLABLE
        await finish(process, 0)

    run(main)
