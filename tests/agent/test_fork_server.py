"""A rank from the fork server is the same as one that was started the plain way, and no server is needed."""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.protocol.names import Slot
from perdure.worker_runtime.agent import fork_server
from perdure.worker_runtime.agent.fork_child import target_of
from perdure.worker_runtime.agent.fork_server import ForkServer
from perdure.worker_runtime.agent.processes import finish, kill, spawn, wait_exit
from perdure.worker_runtime.agent.reaper import children

Run = Callable[[Callable[[], Any]], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
SLOT = Slot("n0/0")


@asynccontextmanager
async def serving(
    env: dict[str, str], log: Callable[[str], None], *modules: str, cwd: Path
) -> AsyncIterator[ForkServer]:
    """A ready fork server that has imported little, so that tests are quick."""
    server = ForkServer(env, log, modules or ("json",), str(cwd))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve)
        await server.ready.wait()
        yield server
        nursery.cancel_scope.cancel()


PORTRAIT = """
import gc, json, os, signal, sys, threading
OURS = ("PERDURE_RANK_FD", "PERDURE_BEAT_FD", "PERDURE_LIFE", "LC_CTYPE")
known = {os.environ["PERDURE_RANK_FD"], os.environ["PERDURE_BEAT_FD"], "0", "1", "2"}
opened = {fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)}
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
out = sys.stdout
sys.stderr.write(json.dumps({
    "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__, "package": __package__,
    "spec": getattr(__spec__, "name", None), "main": sys.modules["__main__"].__dict__ is globals(),
    "builtins": type(__builtins__).__name__, "executable": sys.executable, "cwd": os.getcwd(), "umask": os.umask(0o22),
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(),
    "priority": stat[15], "nice": stat[16], "threads": stat[17],
    "stdin": os.readlink("/proc/self/fd/0"), "more open": sorted(opened - known),
    "inheritable": [os.get_inheritable(int(n)) for n in sorted(known)],
    "signals": [str(signal.getsignal(n)) for n in range(1, 32)],
    "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "gc": gc.isenabled(), "main thread": threading.main_thread() is threading.current_thread(),
    "env": {name: value for name, value in os.environ.items() if name not in OURS},
    "stdout": [type(out.buffer).__name__, out.write_through, out.line_buffering, out.encoding],
    "stderr": [sys.stderr.line_buffering, sys.stderr.errors],
}))
"""


async def end_of(command: list[str], env: dict[str, str], server: ForkServer | None, life: int = 1) -> tuple[int, str]:
    process = await spawn(command, SLOT, life, env, fork_server=server)
    assert process.forked == (server is not None)
    code = await wait_exit(process)
    await finish(process, 0.1)
    return code, process.stderr.text()


@pytest.mark.parametrize("flags", [(), ("-u",), ("-m",), ("-u", "-m")])
def test_a_forked_rank_is_like_a_plain_one(
    run: Run, env: dict[str, str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "portrait.py").write_text(PORTRAIT)
    env["ODD"] = "a=b \udcff\n"
    command = [sys.executable, *flags, "sub.portrait" if "-m" in flags else "sub/portrait.py", "--flag", "ü"]

    async def main() -> None:
        here = os.getcwd()
        os.chdir(tmp_path)
        try:
            async with serving(env, print, cwd=tmp_path) as server:
                env["MASTER_ADDR"] = "late"
                forked = await end_of(command, env, server, 1)
                plain = await end_of(command, env, None, 2)
        finally:
            os.chdir(here)
        assert plain[0] == 0, plain[1]
        assert json.loads(forked[1]) == json.loads(plain[1])

    run(main)


ENDINGS = {
    "returns": "print('out')",
    "raises": "def f():\n    raise ValueError('boo')\nf()",
    "chained": "try:\n    1/0\nexcept Exception as e:\n    raise RuntimeError('x') from e",
    "exit code": "import sys; sys.exit(300)",
    "exit words": "import sys; sys.exit('words')",
    "exit none": "raise SystemExit",
    "os._exit": "import os; os._exit(77)",
    "abort": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "syntax": "def f(:\n",
    "hook": "import sys\nsys.excepthook = lambda *a: sys.stderr.write('hooked')\n1/0",
    "atexit": "import atexit, sys\natexit.register(lambda: sys.stderr.write('at exit'))\n1/0",
    "thread": (
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), sys.stderr.write('thread'))).start()"
    ),
    "pickle": "import pickle, sys\nclass A: pass\nsys.stderr.write(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "spawn": (
        "import multiprocessing, sys\ndef f(): sys.stderr.write('spawned')\n"
        "if __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=f); p.start(); p.join()"
    ),
}


def test_every_ending_is_like_that_of_a_plain_rank(run: Run, env: dict[str, str], tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(env, print, cwd=tmp_path) as server:
            for name, source in ENDINGS.items():
                path = tmp_path / "ending.py"
                path.write_text(source)
                command = [sys.executable, str(path)]
                forked, plain = await end_of(command, env, server), await end_of(command, env, None)
                assert (name, *forked) == (name, *plain)

    run(main)


def test_ctrl_c_ends_a_forked_rank_by_the_signal(run: Run, env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "wait.py"
    path.write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")

    async def main() -> None:
        async with serving(env, print, cwd=tmp_path) as server:
            code, text = await end_of([sys.executable, str(path)], env, server)
        assert code == -signal.SIGINT
        assert text.endswith("KeyboardInterrupt")

    run(main)


def test_only_this_interpreter_with_a_script_or_module_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    cwd = str(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + ":/usr/bin:/bin")
    for command in ([sys.executable, "a.py"], ["python", "-u", "a.py", "-c"], ["python3", "-m", "json.tool", "-u"]):
        assert target_of(command, cwd) is not None
    for line in (
        "",
        "bash a.py",
        "python",
        "python -c pass",
        "python -O a.py",
        "python -X dev a.py",
        "python -m",
        "python b.py",
    ):
        assert target_of(line.split(), cwd) is None
    # Another folder is another virtual environment.
    assert target_of([str(other), "a.py"], cwd) is None


def test_a_differing_environment_is_started_the_plain_way(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    server = ForkServer(env, print, (), str(tmp_path))
    command = [sys.executable, "a.py"]
    assert not trio.run(server.wait_ready)  # nobody serves
    server.ready.set()
    assert server.can_fork(command, {**env, "PERDURE_SLOT": "x", "RANK": "1"})
    assert not server.can_fork(command, {**env, "OMP_NUM_THREADS": "3"})
    assert not server.can_fork(command, {k: v for k, v in env.items() if k != "PATH"})


def test_a_script_beside_a_file_that_shadows_a_library_is_started_the_plain_way(
    run: Run, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "decimal.py").write_text("where = 'mine'")
    (tmp_path / "a.py").write_text("import decimal, sys; sys.stderr.write(decimal.where)")
    lines: list[str] = []

    async def main() -> None:
        async with serving(env, lines.append, "decimal", cwd=tmp_path) as server:
            process = await spawn([sys.executable, "a.py"], SLOT, 1, env, fork_server=server)
            assert not process.forked
            await kill(process, 0)
            await wait_exit(process)
            await finish(process, 0)

    run(main)
    assert "decimal" in lines[0]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_server_costs_only_its_speed(
    run: Run, env: dict[str, str], tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(fork_server, "REPLY_S", 0.2)
    (tmp_path / "a.py").write_text("raise SystemExit(4)")
    command = [sys.executable, str(tmp_path / "a.py")]
    lines: list[str] = []

    async def main() -> None:
        async with serving(env, lines.append, cwd=tmp_path) as server:
            first = server.pid
            os.kill(first, how)
            process = await spawn(command, SLOT, 1, env, fork_server=server)
            assert not process.forked
            assert await wait_exit(process) == 4
            await finish(process, 0)
            await until(lambda: server.pid not in (0, first) and server.ready.is_set())
            assert await end_of(command, env, server) == (4, "")

    run(main)
    assert any("plain way" in line for line in lines)


def test_a_module_that_cannot_be_imported_is_named(run: Run, env: dict[str, str], tmp_path: Path) -> None:
    lines: list[str] = []

    async def main() -> None:
        async with serving(env, lines.append, "no_such_module", cwd=tmp_path):
            pass

    run(main)
    assert "no_such_module" in lines[0]


def test_a_cancelled_fork_leaves_no_process(run: Run, env: dict[str, str], tmp_path: Path, until: Until) -> None:
    (tmp_path / "a.py").write_text("import time; time.sleep(60)")
    command = [sys.executable, str(tmp_path / "a.py")]

    async def main() -> None:
        async with serving(env, print, cwd=tmp_path) as server:
            for micros in range(0, 10_000, 200):
                with trio.move_on_after(micros / 1e6):
                    process = await spawn(command, SLOT, 1, env, fork_server=server)
                    await finish(process, 0)
            await until(lambda: children() == [server.pid])
            process = await spawn(command, SLOT, 1, env, fork_server=server)
            assert process.forked
            await finish(process, 0)

    run(main)


def test_the_orphans_of_a_forked_rank_are_found(run: Run, env: dict[str, str], tmp_path: Path, until: Until) -> None:
    """They never called exec, so they show the server's environment unless the rank wrote its marks there."""
    path = tmp_path / "orphans.py"
    path.write_text(
        "import os, socket, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "socket.socket(fileno=int(os.environ['PERDURE_RANK_FD'])).send(b'up'); time.sleep(60)"
    )

    async def main() -> None:
        async with serving(env, print, cwd=tmp_path) as server:
            ranks = [await spawn([sys.executable, str(path)], SLOT, life, env, fork_server=server) for life in (1, 2)]
            for process in ranks:
                for _ in range(2):
                    await trio.lowlevel.wait_readable(process.sock)
                    process.sock.recv(10)
            await until(lambda: [len(process.family()) for process in ranks] == [2, 2])
            await kill(ranks[0], 0)
            assert [len(process.family()) for process in ranks] == [0, 2]
            title = Path(f"/proc/{ranks[1].pid}/cmdline").read_bytes().split(b"\0")[0]
            assert title.decode() == f"{sys.executable} {path}"
            for process in ranks:
                await finish(process, 0)

    run(main)


def test_with_torch(run: Run, env: dict[str, str], tmp_path: Path) -> None:
    """The real thing: torch and numpy work in a fork, are seeded apart, and are there in a moment."""
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, time; started = time.monotonic()\n"
        "import numpy, torch, torch.distributed as dist\n"
        "imported = time.monotonic() - started\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "x = torch.ones(400, 400, requires_grad=True); (x @ x).sum().backward(); dist.all_reduce(x.grad)\n"
        "numpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
        "loader = torch.utils.data.DataLoader(torch.arange(8), num_workers=1)\n"
        "assert sum(int(b) for b in loader) == 28\n"
        "sys.stderr.write(f'{started} {imported} {x.grad[0, 0]} {torch.rand(1).item()} {numpy.random.rand()}')\n"
        "dist.destroy_process_group()\n"
    )
    env["PYTHONWARNINGS"] = "ignore"

    async def main() -> None:
        async with serving(env, print, "numpy", "torch", "torch.distributed", cwd=tmp_path) as server:
            told: list[list[float]] = []
            for life in (1, 2):
                asked = time.monotonic()
                code, text = await end_of([sys.executable, str(path)], env, server, life)
                assert code == 0, text
                told.append([float(word) for word in text.split()])
                print(f"spawn -> user code {1000 * (told[-1][0] - asked):.1f} ms, imports {1000 * told[-1][1]:.1f} ms")
                assert told[-1][1] < 0.5
        assert told[0][2] == 800
        assert told[0][3] == told[1][3]  # torch seeds itself with a constant, forked or not.
        assert told[0][4] != told[1][4]  # numpy does not.

    run(main)
