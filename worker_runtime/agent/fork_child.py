"""The fork server's process, and what a fork of it does to become a rank.

It imports what ranks import, then answers requests until the agent is gone. Imports run in a thread of low priority,
which is over before the first fork: priority is per thread on Linux, so ranks have the normal one though nobody may
raise it again. Nothing of the server may show in a rank: environment, arguments, directory, streams, `__main__` and the
first entry of `sys.path` are those of a fresh interpreter, and uncaught exceptions end it as they end one.

The agent imports this file for its constants: standard library only.
"""

import builtins
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import shutil
import socket
import sys
import types
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

BOOT = (
    "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; "
    "from perdure.worker_runtime.agent.fork_child import main; main()"
)
"""The server's program. The current directory must not come first in sys.path: a trainer's files would shadow
libraries.
"""
LIMIT = 1 << 20
"""Bytes of the largest request: a command and an environment."""
MARK_NAME = "PERDURE_MARK"
MARK_ROOM = 240
"""Bytes kept free in the server's initial environment for a rank's marks (see `_show_marks`)."""
TITLE_ROOM = 600
"""Bytes kept free in the server's initial arguments for a rank's command line."""
RANK_NAMES = ("PERDURE_SLOT", "PERDURE_LIFE")


class Target(NamedTuple):
    """What a Python command runs: a module, or a script with its absolute path."""

    name: str
    is_module: bool
    unbuffered: bool
    arguments: tuple[str, ...]


def target_of(command: Sequence[str], cwd: str) -> Target | None:
    """What `command` runs, if it is this interpreter with a plain script or module; None for all else."""
    if not command or not _is_this_interpreter(command[0]):
        return None
    rest = list(command[1:])
    unbuffered = False
    while rest[:1] == ["-u"]:
        unbuffered = True
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Target(rest[1], True, unbuffered, tuple(rest[2:]))
    if not rest or rest[0].startswith("-") or not rest[0].endswith(".py"):
        return None
    if not os.path.isfile(os.path.join(cwd, rest[0])):
        return None
    return Target(rest[0], False, unbuffered, tuple(rest[1:]))


def _is_this_interpreter(program: str) -> bool:
    """Same binary in the same folder: a virtual environment is known by its folder only."""
    path = shutil.which(program)
    if path is None or not os.path.basename(path).startswith("python"):
        return False
    mine = sys.executable
    same_folder = os.path.realpath(os.path.dirname(path)) == os.path.realpath(os.path.dirname(mine))
    return same_folder and os.path.realpath(path) == os.path.realpath(mine)


# ---- the server -----------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """One rank to be. descriptors: rank socket, beat page, stderr, and the pipe on which the agent says go."""

    id: int
    command: list[str]
    env: dict[str, str]
    cwd: str
    descriptors: list[int]


def main() -> None:
    """The server; in a fork of it, the rank."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    missing = _import(sys.argv[2:-1])
    # What was imported is never garbage: kept out of collections, its pages stay shared between the forks.
    gc.collect()
    gc.freeze()
    _reply(sock, {"missing": missing})
    request = _serve(sock)
    if request is not None:
        sock.close()
        target = _become(request)
        _execute(target)


def _import(modules: Iterable[str]) -> dict[str, str]:
    """Import `modules`; those that could not be, and why."""
    missing: dict[str, str] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


def _reply(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.send(json.dumps(message).encode())


def _serve(sock: socket.socket) -> Request | None:
    """Answer requests. Returns one only in the process that shall become that rank; None when the agent is gone."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(sock, LIMIT, 4)
        except OSError:
            return None
        if not data:
            return None
        request = Request(**json.loads(data), descriptors=descriptors)
        pid, error = 0, _shadowing(request)
        if not error:
            pid, error = _fork_twice()
            if pid == 0 and not error:
                return request
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            _reply(sock, {"id": request.id, "pid": pid, "error": error})


def _shadowing(request: Request) -> str:
    """Why a fresh interpreter would import something else than what is imported here; empty if it would not."""
    target = target_of(request.command, request.cwd)
    if target is None:
        return "not a command that can be forked"
    folder = _first_path(target, request.cwd)
    with os.scandir(folder) as entries:
        names = {e.name.removesuffix(".py") for e in entries if e.name.endswith(".py") or _is_package(e)}
    for name in names & sys.modules.keys():
        origin = getattr(sys.modules[name], "__file__", None)
        if origin and not os.path.realpath(origin).startswith(os.path.realpath(folder) + os.sep):
            return f"{os.path.join(folder, name)} stands before the library {name!r}"
    return ""


def _is_package(entry: "os.DirEntry[str]") -> bool:
    return os.path.isfile(os.path.join(entry.path, "__init__.py"))


def _fork_twice() -> tuple[int, str]:
    """(0, "") in the new process; in this one its pid, or 0 and an error. The process between is gone, so the agent
    adopts it.
    """
    read, write = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        return 0, f"fork: {error.strerror}"
    if middle == 0:
        _fork_and_leave(write)
        os.close(read)
        os.close(write)
        return 0, ""
    os.close(write)
    text = os.read(read, 32)
    os.close(read)
    os.waitpid(middle, 0)
    return (int(text), "") if text else (0, "fork: out of processes or memory")


def _fork_and_leave(write: int) -> None:
    """In the process between: fork, tell the pid, be gone. Returns in the new process only."""
    try:
        pid = os.fork()
        if pid == 0:
            return
        os.write(write, str(pid).encode())
    except BaseException:
        os._exit(1)
    os._exit(0)


# ---- the rank -------------------------------------------------------------------------------------------------


def _become(request: Request) -> Target:
    """Put on everything of the rank; returns what it runs. Ends here if the agent does not say go."""
    rank_socket, beat_page, error_write, go = request.descriptors
    if os.read(go, 1) != b"g":
        os._exit(0)
    os.close(go)
    os.setsid()
    os.dup2(error_write, 2)
    os.close(error_write)
    for descriptor in (rank_socket, beat_page):
        os.set_inheritable(descriptor, True)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ["PERDURE_RANK_FD"] = str(rank_socket)
    os.environ["PERDURE_BEAT_FD"] = str(beat_page)
    _show_marks(request.env)
    _show_title(request.command)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # A fresh process seeds numpy's global generator from the system; forks would all share the server's seed.
        numpy_random.seed()
    target = target_of(request.command, request.cwd)
    assert target is not None
    if target.unbuffered:
        _unbuffer()
    return target


def _unbuffer() -> None:
    """What `python -u` does to the output streams."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        raw = io.FileIO(descriptor, "wb", closefd=False)
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)  # pyright: ignore[reportArgumentType]
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _initial_memory() -> tuple[int, int, int]:
    """Addresses of this process's initial arguments (start, end) and environment (start); see proc(5), stat."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46]), int(fields[47])


def _show_marks(env: dict[str, str]) -> None:
    """Make /proc/PID/environ tell the rank's slot and life, by which its tree is found.

    The kernel shows the memory that held the environment at exec, which `setenv` never writes. The server was started
    with a variable of MARK_ROOM bytes; nothing points to it any more, so the marks go there.
    """
    with open("/proc/self/environ", "rb") as file:
        offset = (b"\0" + file.read()).find(b"\0" + MARK_NAME.encode() + b"=")
    marks = b"".join(f"{name}={env[name]}".encode() + b"\0" for name in RANK_NAMES if name in env)
    room = len(MARK_NAME) + 1 + MARK_ROOM
    if offset >= 0 and len(marks) <= room:
        ctypes.memmove(_initial_memory()[2] + offset, marks.ljust(room, b"\0"), room)


def _show_title(command: list[str]) -> None:
    """Make `ps` show the rank's command instead of the server's."""
    start, end, _ = _initial_memory()
    room = end - start
    title = " ".join(command).encode("utf-8", "surrogateescape")[: room - 2]
    # A last byte that is not zero tells the kernel that this is a title: it then shows the text up to the first zero.
    ctypes.memmove(start, title.ljust(room - 1, b"\0") + b".", room)


def _first_path(target: Target, cwd: str) -> str:
    """What a fresh interpreter puts first into sys.path."""
    if target.is_module:
        return os.path.realpath(cwd)
    return os.path.dirname(os.path.realpath(os.path.join(cwd, target.name)))


def _execute(target: Target) -> None:
    """Run the rank's program as `__main__`. Returns when it returns; the interpreter then ends as always."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    sys.argv = ["-m" if target.is_module else target.name, *target.arguments]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, _first_path(target, os.getcwd()))
    try:
        if target.is_module:
            runpy._run_module_as_main(target.name)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue]
        else:
            _run_script(os.path.abspath(target.name), main_module)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report(error)
        raise SystemExit(1) from None


def _run_script(path: str, main_module: types.ModuleType) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _report(error: BaseException) -> None:
    """What the interpreter does with an uncaught exception, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
