"""Ranks from a process that has torch imported already: the cost of a restart is imports, and this one has paid it.

The server (`fork_child.py`) is a child of the agent. For each rank it forks twice, so that the new process is an
orphan, and orphans come to the agent, which must be a subreaper: it waits for it as for any child. The fork waits for
our word before it becomes the rank, so that none gets away if we are cancelled or die in between.

A rank from here must be the same as one that was started the plain way. So only `python script.py ...` and `python -m
module ...` of this very interpreter come from here, and only with an environment that differs from the server's in
nothing that is read at import. Any doubt, refusal, death or silence of the server means: plain start.
"""

import array
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from .fork_child import BOOT, LIMIT, MARK_NAME, MARK_ROOM, TITLE_ROOM, target_of
from .reaper import bury, claim_child
from .tree import read_entry, send

LIGHT_MODULES = ("perdure.worker_runtime",)
"""What is imported for ranks that do not use torch."""
MODULES = ("numpy", "torch", "torch.distributed", "torch._dynamo", "perdure.worker_runtime")
"""What is imported for those that do. torch._dynamo: every optimizer imports it on first use, with 800 more modules."""
READY_S = 300.0
"""How long the imports may take."""
PATIENCE_S = 10.0
"""How long a rank waits for the imports before it is started the plain way."""
REPLY_S = 5.0
"""How long a fork may take."""
RESTARTS = 3
"""How often a server that died is replaced."""

LATE_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    }
)
"""Variables, besides PERDURE_*, in which a rank may differ from the server: nothing reads them at import."""


class ForkRefused(Exception):
    """The fork server did not make the rank."""


class ForkServer:
    """The agent's side. `serve` runs as a task; a rank comes from here if `can_fork` and `wait_ready` both say so."""

    def __init__(
        self,
        env: Mapping[str, str],
        log: Callable[[str], None],
        modules: Sequence[str] = MODULES,
        cwd: str | None = None,
    ) -> None:
        self._env = dict(env)
        self._log = log
        self._modules = tuple(modules)
        self._cwd = cwd or os.getcwd()
        self._sock: trio.socket.SocketType | None = None
        self._lock = trio.Lock()
        self._request = 0
        self.ready = trio.Event()
        """Set while it can fork."""
        self._serving = False
        self.pid = 0
        self._start = 0

    def can_fork(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether `command` may come from here at all, now or when the imports are done."""
        return target_of(command, self._cwd) is not None and not self._differs(env)

    def _differs(self, env: Mapping[str, str]) -> bool:
        names = (set(env) | set(self._env)) - LATE_NAMES
        return any(env.get(name) != self._env.get(name) for name in names if not name.startswith("PERDURE_"))

    async def wait_ready(self) -> bool:
        """Wait for imports that are under way: whoever started the plain way instead would begin them anew."""
        with trio.move_on_after(PATIENCE_S if self._serving else 0):
            await self.ready.wait()
        return self.ready.is_set()

    def _not_ready(self) -> None:
        """Whoever waits looks again."""
        former, self.ready = self.ready, trio.Event()
        former.set()

    async def serve(self) -> None:
        """Keep a server running; replaces one that died, RESTARTS times."""
        self._serving = True
        try:
            await self._keep_serving()
        finally:
            self._serving = False
            self._not_ready()

    async def _keep_serving(self) -> None:
        for _ in range(RESTARTS + 1):
            try:
                await self._serve_once()
            except (OSError, ForkRefused) as error:
                self._log(f"fork server: {error}; ranks are started the plain way meanwhile")
        self._log(f"fork server: gave up after {RESTARTS + 1} attempts; ranks are started the plain way")

    async def _serve_once(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
            self._sock = trio.socket.from_stdlib_socket(ours)
            self.pid = self._launch(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        entry = read_entry(self.pid)
        self._start = entry.start if entry else 0
        pidfd = os.pidfd_open(self.pid)
        try:
            await self._greet()
            await trio.lowlevel.wait_readable(pidfd)
            raise ForkRefused(f"process {self.pid} died")
        finally:
            self._not_ready()
            self._sock.close()
            await bury(self.pid, pidfd)

    def _launch(self, descriptor: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(descriptor), *self._modules, " " * TITLE_ROOM],
            env={**self._env, MARK_NAME: "_" * MARK_ROOM},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        claim_child(process.pid)
        # As for ranks: we collect the status ourselves.
        process.returncode = 0
        return process.pid

    async def _greet(self) -> None:
        """Wait for the end of the imports."""
        with trio.move_on_after(READY_S):
            greeting = await self._receive()
            for name, error in greeting["missing"].items():
                self._log(f"fork server: {name} could not be imported ({error}); ranks import it themselves")
            self.ready.set()
            return
        raise ForkRefused(f"its imports took longer than {READY_S:.0f} s")

    async def _receive(self) -> Any:
        assert self._sock is not None
        data = await self._sock.recv(LIMIT)
        if not data:
            raise ForkRefused("it died")
        return json.loads(data)

    async def fork(self, command: Sequence[str], env: Mapping[str, str], descriptors: tuple[int, int, int]) -> int:
        """A new process that runs `command`, claimed; its pid. `descriptors`: rank socket, beat page, stderr.

        After a timeout the server is killed, and `serve` starts another.
        """
        async with self._lock:
            if not self.ready.is_set():
                raise ForkRefused("it is not ready")
            go_read, go_write = os.pipe()
            try:
                return await self._ask(command, env, (*descriptors, go_read), go_write)
            except (OSError, ForkRefused) as error:
                self._log(f"fork server: {error}; this rank is started the plain way")
                raise ForkRefused(str(error)) from None
            finally:
                os.close(go_read)
                os.close(go_write)

    async def _ask(self, command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int], go: int) -> int:
        assert self._sock is not None
        self._request += 1
        request = {"id": self._request, "command": list(command), "env": dict(env), "cwd": self._cwd}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        with trio.move_on_after(REPLY_S):
            await self._sock.sendmsg([json.dumps(request).encode()], rights)
            reply = await self._receive()
            while reply["id"] != self._request:  # The answer to a request that was cancelled.
                reply = await self._receive()
            if reply["error"]:
                raise ForkRefused(reply["error"])
            pid: int = reply["pid"]
            entry = read_entry(pid)
            if entry is None or entry.parent != os.getpid():
                raise ForkRefused(f"process {pid} did not become a child of this one, which must be a subreaper")
            claim_child(pid)
            # From here to the end nothing awaits: the child is claimed, and it starts.
            os.write(go, b"g")
            return pid
        self._not_ready()
        send((self.pid, self._start), signal.SIGKILL)
        raise ForkRefused(f"no answer in {REPLY_S:.0f} s")
