"""The agent's side of its depot: keeps one running, passes orders to it, and on what it says.

The depot (`checkpoint_io/depot.py`) is the process that touches the file systems of checkpoints, so that one that
stands still never holds up the agent. It is started once a controller has accepted this agent, if the job keeps
checkpoints. It is a session of its own, carries the agent's token, so that the guard finds it, and ends when its socket
closes.

Rules. Nothing here waits for the depot: what it should do is one state, and it is sent when it can take it. A depot
that dies is replaced and told again. One that dies too often is done without for a while: then all that is ordered is
answered as failed, so that nobody waits.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from ...checkpoint_io.depot_messages import (
    BadFrame,
    Begin,
    Done,
    Finish,
    Found,
    Line,
    Order,
    decode_from_depot,
    encode,
    failures,
)
from ...checkpoint_io.depot_stream import Frames, send_frame
from ...protocol.checkpoints import NO_ORDERS, DepotOrders, Fact, Publish, Replicate, What
from ...protocol.keys import JobKeys
from ...protocol.settings import Settings
from .options import Options
from .reaper import bury, claim_child, exit_code

RESTARTS = 5
"""How often a depot may die within RESTART_WINDOW_S."""

RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.2
WITHOUT_S = 60.0
"""How long none is started when one has died too often."""

FINISH_S = 5.0
"""How long the depot may take, at the end of the job, to publish what is ordered."""

FAREWELL_S = 1.0
"""How long it may take to end after that, or if there is nothing to publish."""


STOCKTAKERS = 4
"""The first agents of the job, so many of them, look through the durable tier: all see the same there, thousands need
not read it, and the loss of one must not leave nobody who does. The controller need not choose, or ask again."""


@dataclass(frozen=True, slots=True)
class DepotHandlers:
    """What is done with what the depot says; all are called in the agent's trio thread and return at once."""

    saved: Callable[[tuple[Fact, ...]], None]
    found: Callable[[str, tuple[Fact, ...], bool], None]
    """What a `Stock` says."""
    write: Callable[[str, str], None]
    """Level and text of a line for the log."""


class DepotLink:
    """One agent's depot, whichever process it is."""

    def __init__(self, environ: Mapping[str, str], handlers: DepotHandlers) -> None:
        """environ: the depot's whole environment; it names PERDURE_TOKEN."""
        self._environ = dict(environ)
        self._on = handlers
        self._begin: Begin | None = None
        self._session = 0
        self._orders = NO_ORDERS
        self._publishing: set[Publish] = set()
        self._finishing = False
        self._bell = trio.Event()
        self._listened = trio.Event()
        self._over = trio.Event()
        self.pid = 0
        """Of the present depot, 0 if there is none."""

    # ---- what the agent calls ---------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return self._begin is not None

    def order(self, orders: DepotOrders) -> None:
        """From now on this is what should be done."""
        self._orders = orders
        self._publishing = set(orders.publish)
        self._ring()

    def begin_session(self) -> None:
        """A controller has just accepted this agent: it wants to be told what is here."""
        self._session += 1
        self._ring()

    async def serve(self, begin: Begin) -> None:
        """Keep a depot running until `finish`, or for ever."""
        self._begin = begin
        try:
            await self._keep_serving(begin)
        finally:
            self._over.set()

    async def finish(self) -> None:
        """The job is over: what is ordered is published, within bounds, and the depot ends."""
        if self._begin is None:
            return
        self._finishing = True
        self._ring()
        with trio.move_on_after(FAREWELL_S + (FINISH_S if self._publishing else 0.0)):
            await self._over.wait()
            return
        left = ", ".join(str(order.save) for order in self._publishing)
        self._on.write("error", f"depot: not ended in time{f'; not published: {left}' if left else ''}")

    # ---- a process --------------------------------------------------------------------------------------------

    async def _keep_serving(self, begin: Begin) -> None:
        deaths: list[float] = []
        while not self._finishing:
            why = await self._serve_once(begin)
            if self._finishing:
                return
            now = trio.current_time()
            deaths = [at for at in deaths if now - at < RESTART_WINDOW_S] + [now]
            if len(deaths) > RESTARTS:
                await self._do_without(f"the depot {why}, the {len(deaths)}th time within {RESTART_WINDOW_S:g} s")
                continue
            self._on.write("warning", f"depot: {why}; another one is started")
            await trio.sleep(RESTART_PAUSE_S)

    async def _do_without(self, why: str) -> None:
        """For a while no depot can live here: every order is answered, so that nobody waits for one."""
        pause = f"another one is started in {WITHOUT_S:g} s, until then this agent publishes and copies no checkpoint"
        self._on.write("error", f"depot: {why}; {pause}")
        assert self._begin is not None
        told: frozenset[Publish | Replicate] = frozenset()
        until = trio.current_time() + WITHOUT_S
        while not self._finishing and trio.current_time() < until:
            orders = (*self._orders.publish, *self._orders.replicate)
            facts = failures([order for order in orders if order not in told], self._begin.node, why)
            told = frozenset(orders)
            if facts:
                self._said_done(facts)
            self._bell = trio.Event()
            with trio.move_on_at(until):
                await self._bell.wait()

    async def _serve_once(self, begin: Begin) -> str:
        """Run one depot until it ends; how it ended."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listened = trio.Event()
        try:
            self.pid = self._launch(theirs.fileno())
        except OSError as error:
            ours.close()
            return f"cannot be started: {error}"
        finally:
            theirs.close()
        pidfd = os.pidfd_open(self.pid)
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        code: int | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._speak, stream, begin)
                nursery.start_soon(self._listen, stream)
                await trio.lowlevel.wait_readable(pidfd)
                code = exit_code(pidfd, os.WNOWAIT)
                with trio.move_on_after(FAREWELL_S):
                    await self._listened.wait()
                nursery.cancel_scope.cancel()
        finally:
            stream.socket.close()
            await bury(self.pid, pidfd)
            self.pid = 0
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"

    def _launch(self, descriptor: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "perdure.checkpoint_io.depot", str(descriptor)],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            start_new_session=True,
        )
        claim_child(process.pid)
        process.returncode = 0  # we collect its status ourselves
        return process.pid

    async def _speak(self, stream: trio.SocketStream, begin: Begin) -> None:
        """Send what should be done whenever it has changed."""
        sent: Order | None = None
        try:
            await send_frame(stream, encode(begin))
            while not self._finishing:
                self._bell = trio.Event()
                order = Order(self._session, self._orders)
                if order != sent:
                    await send_frame(stream, encode(order))
                    sent = order
                    continue  # it may have changed meanwhile
                await self._bell.wait()
            await send_frame(stream, encode(Finish(FINISH_S)))
        except trio.BrokenResourceError:
            pass  # it is dead, which its pidfd tells

    async def _listen(self, stream: trio.SocketStream) -> None:
        frames = Frames(stream)
        try:
            while (frame := await frames.next()) is not None:
                self._hear(frame)
        except BadFrame as error:
            self._on.write("error", f"depot: said what cannot be read, and is killed: {error}")
            os.kill(self.pid, signal.SIGKILL)
        self._listened.set()

    def _hear(self, frame: bytes) -> None:
        message = decode_from_depot(frame)
        match message:
            case Found():
                self._on.found(message.address, message.facts, self._begin is not None and self._begin.durable)
            case Done():
                self._said_done(message.facts)
            case Line():
                self._on.write(message.level, message.text)

    def _said_done(self, facts: tuple[Fact, ...]) -> None:
        answered = {fact.save for fact in facts if fact.what in (What.PUBLISHED, What.UNPUBLISHED)}
        self._publishing = {order for order in self._publishing if order.save not in answered}
        self._on.saved(facts)

    def _ring(self) -> None:
        self._bell.set()


def begin_of(options: Options, settings: Settings, host: str, keys: JobKeys | None) -> Begin | None:
    """What a depot of this agent must know; None if the job keeps no checkpoints."""
    save, local = settings.save, settings.non_persistent_local_ckpt_dir
    if save is None and local is None:
        return None
    durable = options.order < STOCKTAKERS
    return Begin(options.node, host, save, local, settings.save_timeout, keys, durable)
