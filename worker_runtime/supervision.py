"""Whether an agent supervises this process, and what it handed down: a socket, a beat page, names in the environment.

A forked child (a DataLoader worker, say) is no rank: it must neither speak to the agent nor beat in the rank's stead.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

from ..protocol.names import Slot
from . import last_breath
from .beats import BeatPage

AUTO_STAMP_S = 0.25
FIX = "start it with `perdure run -- python YOUR_SCRIPT`"


class NotSupervised(RuntimeError):
    """No agent supervises this process, so nothing would restart it."""


class Supervision:
    """What the agent handed down. The fds were there before the runtime, and stay when it has gone."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            self.socket_fd = int(environ["PERDURE_RANK_FD"])
            page_fd = int(environ["PERDURE_BEAT_FD"])
            self.slot = Slot(environ["PERDURE_SLOT"])
            self.life = int(environ["PERDURE_LIFE"])
        except KeyError as missing:
            raise NotSupervised(f"{missing.args[0]} is not set; {FIX}") from None
        except ValueError as error:
            raise NotSupervised(f"the environment of perdure is damaged ({error}); {FIX}") from None
        self.stamp_interval_s = float(environ.get("PERDURE_AUTO_STAMP_S", AUTO_STAMP_S))
        self.gloo_limit_s = float(environ.get("PERDURE_GLOO_LIMIT_S", "inf"))
        self.hard_s = float(environ.get("PERDURE_HARD_LIMIT_S", "inf"))
        self._check_socket()
        try:
            self.page = BeatPage.attach(page_fd)
        except (OSError, ValueError) as error:
            raise NotSupervised(f"this is not the process that the agent started ({error}); {FIX}") from None
        if threading.current_thread() is threading.main_thread():
            last_breath.hold(page_fd)
        self.on_fork: Callable[[], None] | None = None
        """Called in a forked child; closes the socket. The caller who has the socket open sets it."""
        os.set_inheritable(self.socket_fd, False)
        os.set_inheritable(page_fd, False)

    def let_go(self) -> None:
        """In a forked child."""
        self.page.detach_after_fork()
        if self.on_fork is not None:
            self.on_fork()
        else:
            os.close(self.socket_fd)

    def _check_socket(self) -> None:
        # A child that was spawned (not forked) has the environment, but under that number another fd or none.
        try:
            probe = socket.socket(fileno=os.dup(self.socket_fd))
        except OSError:
            raise NotSupervised(f"this process was started by a trainer, not by an agent; {FIX}") from None
        with probe:
            if probe.family != socket.AF_UNIX or probe.type != socket.SOCK_SEQPACKET:
                raise NotSupervised(f"fd {self.socket_fd} is not an agent's socket; {FIX}")


class _Process:
    """The page is mapped once in a process and never unmapped: a trainer may hold a `Round` for ever."""

    supervision: Supervision | None = None
    forked = False


def _after_fork() -> None:
    if _Process.supervision is not None and not _Process.forked:
        _Process.forked = True
        _Process.supervision.let_go()


def supervision() -> Supervision:
    """Who supervises this process; NotSupervised if nobody does."""
    if _Process.supervision is None:
        _Process.supervision = Supervision(os.environ)
        os.register_at_fork(after_in_child=_after_fork)
    elif _Process.forked:
        raise NotSupervised(f"this process was forked by a trainer, not started by an agent; {FIX}")
    return _Process.supervision


def require() -> None:
    """Refuse to go on without supervision: raises NotSupervised, which names the fix."""
    supervision()


def refuse_thread() -> NoReturn:
    where = "a function decorated with perdure.resilient runs in the main thread only"
    raise RuntimeError(f"{where}: an interrupt cannot reach another thread; call it from {sys.argv[0]}'s main thread")
