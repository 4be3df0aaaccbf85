"""The processes of ranks: how one is started, how its end is learned, how it is ended.

Rules. A rank is a session of its own. It inherits its socket, its beat page and the standard streams, nothing else. It
is started from the agent's main thread (some of what a process inherits is per thread). Its end is told by a pidfd,
never looked for. A dead rank stays a zombie until `finish`: while it is one, its pid and its session's number cannot be
given to a stranger, so its orphans can be found safely. Every wait is bounded.
"""

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import trio

from ...protocol.names import ProcessId, Slot, boot_id
from ..beats import BeatPage
from ..last_breath import LastBreath
from .fork_server import ForkRefused, ForkServer
from .oom import OomWatch
from .reaper import claim_child, exit_code, release_child
from .stderr_tail import Outlet, StderrTail
from .tree import Entry, family, is_exiting, is_living, kill_all, open_process, rank_marks, read_entry, send

DRAIN_S = 0.25
"""How long the last stderr lines of a dead rank are waited for. Grandchildren may hold the pipe open for ever."""
KILL_WAIT_S = 10.0
"""How long SIGKILL may take to begin to work. A process that ignores it longer sits in the kernel (dead file server,
driver).
"""
TEARDOWN_WAIT_S = 60.0
"""How long a dying process may take to give back its memory."""
DYING_WAIT_S = 1.0
"""How long all threads of a process may take to begin to die after its main thread did."""
SOCKET_BUFFER = 1 << 20
"""Bytes of messages that a rank that does not read may leave with us, and we with it."""

TERMINATED = "terminated"
KILLED = "killed"
UNKILLABLE = "unkillable"


class SpawnError(Exception):
    """A rank could not be started, and trying again would not help."""


@dataclass
class RankProcess:
    """One process in one slot. The owner calls `wait_exit` in a task of its own, and `finish` when done with it.

    sock: our end of its socket, non-blocking. started: monotonic time. pidfd: readable once it is dead. dying: set when
    it begins to die, long before `wait_exit` returns if its memory is large (if its runtime holds the beat page's
    mutex; else when it is finished). marks: what the environment of every process of its tree holds. forked: it came
    from the fork server. code: its exit code or minus the signal, once known. finished: nothing is held for it any
    more.
    """

    slot: Slot
    life: int
    identity: ProcessId
    sock: socket.socket
    beats: BeatPage
    stderr: StderrTail
    started: float
    pidfd: int
    marks: tuple[bytes, ...]
    oom: OomWatch
    dying: trio.Event
    breath: LastBreath
    forked: bool = False
    code: int | None = None
    finished: bool = False

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def key(self) -> tuple[int, int]:
        return self.identity.pid, self.identity.start

    def is_exiting(self) -> bool:
        """Whether it will never run user code again; true long before its pidfd tells, if its memory is large."""
        return self.code is not None or is_exiting(self.pid)

    def kill_at_once(self) -> list[tuple[int, int]]:
        """SIGKILL for its whole tree, without waiting; who got it."""
        return kill_all(self.family, 0 if self.finished else self.pid)

    def family(self) -> list[Entry]:
        """The living processes of its tree, itself included."""
        return family(self.key, self.marks)


async def spawn(
    command: Sequence[str],
    slot: Slot,
    life: int,
    env: Mapping[str, str],
    *,
    outlets: tuple[Outlet, ...] = (),
    fork_server: ForkServer | None = None,
) -> RankProcess:
    """Start `command` as `life` of `slot`. `env` is the whole environment and names PERDURE_TOKEN; ours are added.

    A command that a `fork_server` can run comes from there, in milliseconds; if that fails it is started the plain way.
    """
    await trio.lowlevel.checkpoint()
    if "PERDURE_TOKEN" not in env:
        raise ValueError(f"the environment of rank {slot} has no PERDURE_TOKEN, so its process tree could not be found")
    full = {**env, "PERDURE_SLOT": slot, "PERDURE_LIFE": str(life)}
    with ExitStack() as always, ExitStack() as unless_done:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unless_done.callback(ours.close)
        always.callback(theirs.close)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        ours.setblocking(False)
        beats = BeatPage.create()
        unless_done.callback(beats.close)
        error_read, error_write = os.pipe()
        always.callback(os.close, error_write)
        tail = StderrTail(error_read, f"{slot.replace('/', '-')}.{life}.stderr", outlets)
        unless_done.callback(tail.close)
        pid, forked = await _start(command, slot, full, (theirs.fileno(), beats.fd, error_write), fork_server)
        unless_done.callback(_abandon, pid)
        process = _adopt(pid, slot, life, full, ours, beats, tail, forked)
        unless_done.pop_all()
    return process


def _abandon(pid: int) -> None:
    """Of a child that we cannot keep (no descriptor is free, say); the reaper buries it."""
    os.kill(pid, signal.SIGKILL)
    release_child(pid)


async def _start(
    command: Sequence[str],
    slot: Slot,
    env: dict[str, str],
    descriptors: tuple[int, int, int],
    fork_server: ForkServer | None,
) -> tuple[int, bool]:
    """Start the process from the fork server or the plain way; its pid, claimed, and whether it was forked."""
    if fork_server is not None and fork_server.can_fork(command, env) and await fork_server.wait_ready():
        with suppress(ForkRefused):  # The server has logged why.
            return await fork_server.fork(command, env, descriptors), True
    return _execute(command, slot, env, descriptors), False


def _execute(command: Sequence[str], slot: Slot, env: dict[str, str], descriptors: tuple[int, int, int]) -> int:
    rank_socket, beat_page, error_write = descriptors
    try:
        process = subprocess.Popen(
            list(command),
            env={**env, "PERDURE_RANK_FD": str(rank_socket), "PERDURE_BEAT_FD": str(beat_page)},
            stdin=subprocess.DEVNULL,
            stderr=error_write,
            pass_fds=(rank_socket, beat_page),
            start_new_session=True,
        )
    except OSError as error:
        raise SpawnError(_explain(error, command, slot, env)) from None
    claim_child(process.pid)
    # We collect the exit status ourselves; without this the object would want to, whenever it is garbage collected.
    process.returncode = 0
    return process.pid


def _explain(error: OSError, command: Sequence[str], slot: Slot, env: Mapping[str, str]) -> str:
    program = command[0]
    match error.errno:
        case errno.ENOENT:
            fix = "there is no such program" if "/" in program else f"it is not on PATH ({env.get('PATH', 'not set')})"
        case errno.EACCES:
            fix = f"it is not executable; `chmod +x {program}`, or put its interpreter before it"
        case errno.ENOEXEC:
            fix = "it is not a program for this machine, or a script without a `#!` line; put its interpreter before it"
        case errno.E2BIG:
            fix = "the command and the environment together are too long"
        case errno.EAGAIN | errno.ENOMEM:
            fix = "the host is out of processes or memory (`ulimit -u`, the cgroup's pids.max)"
        case _:
            fix = "see the reason before"
    return f"cannot start rank {slot}: {program!r}: {error.strerror or error}: {fix}"


def _adopt(
    pid: int,
    slot: Slot,
    life: int,
    env: Mapping[str, str],
    ours: socket.socket,
    beats: BeatPage,
    tail: StderrTail,
    forked: bool,
) -> RankProcess:
    """Everything we keep of a child that was just started (and cannot vanish, since only we reap it)."""
    entry = read_entry(pid)
    dying = trio.Event()
    return RankProcess(
        slot=slot,
        life=life,
        identity=ProcessId(boot_id(), pid, entry.start if entry else 0),
        sock=ours,
        beats=beats,
        stderr=tail,
        started=time.monotonic(),
        pidfd=os.pidfd_open(pid),
        marks=rank_marks(env["PERDURE_TOKEN"], slot, life),
        oom=OomWatch(pid),
        dying=dying,
        breath=LastBreath(beats.fd, _teller(pid, dying)),
        forked=forked,
    )


def _teller(pid: int, dying: trio.Event) -> Callable[[], None]:
    """Sets `dying` from another thread, if `pid` is. (The same is told of a process that calls exec: it is not.)"""
    token = trio.lowlevel.current_trio_token()

    def told() -> None:
        # The main thread dies first or last of many; the others follow as soon as the scheduler lets them.
        until = time.monotonic() + DYING_WAIT_S
        while not (gone := is_exiting(pid)) and time.monotonic() < until:
            time.sleep(0.001)
        if gone:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(dying.set)

    return told


async def wait_exit(process: RankProcess) -> int:
    """Wait for the end of `process`, passing on its stderr; its exit code, or minus the signal. One task at a time.

    The rest of its tree may still live, and it is still a zombie: `finish` ends both, after this returned or was
    cancelled.
    """
    if process.code is not None:
        return process.code
    async with trio.open_nursery() as nursery:
        drained = trio.Event()
        nursery.start_soon(_pump, process.stderr, drained)
        await trio.lowlevel.wait_readable(process.pidfd)
        process.code = _known(exit_code(process.pidfd, os.WNOWAIT))
        with trio.move_on_after(DRAIN_S):
            await drained.wait()
        nursery.cancel_scope.cancel()
    return process.code


def _known(code: int | None) -> int:
    if code is None:
        raise RuntimeError("a process whose pidfd is readable is not dead")
    return code


async def _pump(tail: StderrTail, drained: trio.Event) -> None:
    await tail.pump()
    drained.set()


async def kill(process: RankProcess, grace_s: float) -> str:
    """End the whole tree of `process`, dead or alive: SIGTERM, `grace_s`, SIGKILL.

    TERMINATED: nobody needed SIGKILL. KILLED: somebody did. UNKILLABLE: somebody outlived it; the node is not to be
    trusted. If it is cancelled while it waits, the tree gets SIGKILL at once.
    """
    try:
        # The rank first: it should die of our signal, not of what its children do when they get theirs.
        members = sorted((entry.key for entry in process.family()), key=lambda key: key != process.key)
        for key in members:
            # SIGTERM before SIGCONT: a stopped process then runs its handler first, and nothing else.
            send(key, signal.SIGTERM)
            send(key, signal.SIGCONT)
        await _wait_gone(members, grace_s)
        if not process.family():
            return TERMINATED
        return await kill_tree_now(process)
    except trio.Cancelled:
        process.kill_at_once()
        raise


async def kill_tree_now(process: RankProcess) -> str:
    """SIGKILL for the whole tree of `process`; waits until it is gone. KILLED or UNKILLABLE."""
    killed = process.kill_at_once()
    left = await _wait_gone(killed, KILL_WAIT_S)
    if left and all(is_exiting(pid) for pid, _ in left):
        left = [key for key in await _wait_gone(left, TEARDOWN_WAIT_S) if not is_exiting(key[0])]
    return UNKILLABLE if left else KILLED


async def _wait_gone(keys: Sequence[tuple[int, int]], within_s: float) -> list[tuple[int, int]]:
    """Wait until the processes `keys` are dead; those that still live after `within_s`."""
    with trio.move_on_after(within_s):
        for key in keys:
            handle = open_process(key)
            if handle is None:
                continue
            try:
                await trio.lowlevel.wait_readable(handle)
            finally:
                os.close(handle)
    return [key for key in keys if is_living(key)]


async def finish(process: RankProcess, grace_s: float) -> str:
    """End what is left of the tree of `process`, reap it and let go of all that is held for it. Says what `kill` says.

    Meanwhile stderr is still passed on. May be called twice. When it is cancelled it kills at once and lets go all the
    same.
    """
    if process.finished:
        return TERMINATED
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.stderr.pump)
            result = await kill(process, grace_s)
            nursery.cancel_scope.cancel()
        return result
    finally:
        _let_go(process)


def _let_go(process: RankProcess) -> None:
    process.finished = True
    process.breath.stop()
    with suppress(ChildProcessError):
        code = exit_code(process.pidfd)
        process.code = code if process.code is None else process.code
    # A child that is not dead yet (unkillable, or we were cancelled) is left to the reaper.
    release_child(process.pid)
    trio.lowlevel.notify_closing(process.pidfd)
    os.close(process.pidfd)
    process.stderr.close()
    if process.sock.fileno() >= 0:
        trio.lowlevel.notify_closing(process.sock)  # Whoever still waits for a message learns that none will come.
        process.sock.close()
    process.beats.close()
