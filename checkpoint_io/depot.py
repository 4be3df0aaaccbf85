"""The depot: the process beside each agent that touches the file systems of checkpoints.

    main ── run ─┬─ _listen     orders of the agent, over their socket
                 ├─ _speak      what became of them, and what is here
                 ├─ DepotServer serves this node's shards, if there is a local tier
                 ├─ Work        a thread for each order
                 └─ _take_stock what is here, for each new session of the agent with a controller

A file system that stands still, for minutes or for ever, holds up threads of this process and nothing else: the agent
goes on, and so does whatever here does not need that file system. The depot imports no torch, runs at a lower priority
than training, and ignores the signals that end a job: it ends when the agent says so, or when the agent's end of the
socket closes; in both cases soon, whatever its threads do.
"""

import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import trio

from ..protocol.checkpoints import Fact
from ..protocol.wire import WireError
from .depot_messages import (
    BadFrame,
    Begin,
    Done,
    Finish,
    Found,
    FromDepot,
    Line,
    Order,
    decode_to_depot,
    encode,
    in_parts,
)
from .depot_server import DepotServer
from .depot_stream import Frames, send_frame
from .depot_work import Stock, Work, durable_stock, local_stock

NICENESS = 10
BEGIN_S = 60.0
"""How long the agent may take for its first word."""

ORPHAN_S = 0.5
"""How long what is being published may take when the agent is gone. After its guard's grace we would be killed."""

FLUSH_S = 1.0
LOOK_S = 20.0
"""How long a folder may take to be looked through before the log says so."""
LOOK_AGAIN_S = 2.0
LOOKERS = 8
"""Threads that look through folders; those that were given up count as long as they live."""


class _Look:
    """One look through one tier. where: the folder, None if the job has no such tier."""

    def __init__(self, where: str | None, function: Callable[[Begin], Stock]) -> None:
        self.where = where
        self.function = function
        self.stock = Stock()
        self.done = trio.Event()


class Depot:
    """One depot, from its agent's first word to the end."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._frames = Frames(stream)
        self._outgoing: deque[FromDepot] = deque()
        self._bell = trio.Event()
        self._flushed = trio.Event()
        self._address = ""
        self._session = 0
        self._said = self._remarked = ""
        self._looking = trio.CancelScope()
        self._lookers = trio.CapacityLimiter(LOOKERS)

    async def run(self) -> None:
        with trio.fail_after(BEGIN_S):
            frame = await self._frames.next()
        if frame is None:
            return
        begin = decode_to_depot(frame)
        if not isinstance(begin, Begin):
            raise BadFrame(f"the agent's first word is {type(begin).__name__}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._speak)
            await self._start_server(begin, nursery)
            work = Work(begin, nursery, self._done, self._log)
            within_s = await self._listen(begin, work, nursery)
            with trio.move_on_after(within_s):
                await work.finish()
            with trio.move_on_after(FLUSH_S):
                await self._flushed.wait()
            nursery.cancel_scope.cancel()

    async def _start_server(self, begin: Begin, nursery: trio.Nursery) -> None:
        if begin.local is None:
            return
        server = DepotServer(Path(begin.local) / begin.node, begin.keys, begin.host, self._log)
        try:
            await server.wire.bind()
        except WireError as error:
            self._log("error", f"depot: other nodes cannot read from here: {error}")
            return
        await nursery.start(server.wire.run)
        nursery.start_soon(server.serve)
        self._address = server.wire.address

    async def _listen(self, begin: Begin, work: Work, nursery: trio.Nursery) -> float:
        """Obey until the agent says that the job is over, or is gone; how long the end may take."""
        while (frame := await self._frames.next()) is not None:
            message = decode_to_depot(frame)
            if isinstance(message, Finish):
                return message.within_s
            if isinstance(message, Order):
                if message.session != self._session:
                    self._session = message.session
                    nursery.start_soon(self._take_stock, begin)
                work.order(message.session, message.orders)
        return ORPHAN_S

    async def _take_stock(self, begin: Begin) -> None:
        """Tell what is here. Not before the durable tier has been looked through: a job that is told of nothing begins
        anew. A node's own disk is not waited for so long: what it holds may be told later, or be elsewhere too."""
        self._looking.cancel()
        with trio.CancelScope() as self._looking:
            async with trio.open_nursery() as nursery:
                local, durable = _Look(begin.local, local_stock), _Look(begin.save, durable_stock)
                nursery.start_soon(self._look, local, begin)
                if begin.durable:
                    nursery.start_soon(self._look, durable, begin)
                    await durable.done.wait()
                with trio.move_on_after(LOOK_S):
                    await local.done.wait()
                self._remark(durable.stock.remark)
                self._found((*durable.stock.facts, *local.stock.facts))
                if not local.done.is_set():
                    await local.done.wait()
                    self._found(local.stock.facts)

    async def _look(self, look: "_Look", begin: Begin) -> None:
        """Until it succeeds: an error may be gone a little later, and a file system that stands still may go on."""
        while not look.done.is_set():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._lose_patience, look)
                    look.stock = await trio.to_thread.run_sync(
                        look.function, begin, abandon_on_cancel=True, limiter=self._lookers
                    )
                    look.done.set()
                    nursery.cancel_scope.cancel()
            except* OSError as errors:
                error = errors.exceptions[0]
                self._log("error", f"depot: cannot look through {look.where}: {error}; it is tried again and again")
                await trio.sleep(LOOK_AGAIN_S)

    async def _lose_patience(self, look: "_Look") -> None:
        await trio.sleep(LOOK_S)
        self._log("error", f"depot: {look.where} has not answered for {LOOK_S:g} s; which checkpoints are there?")

    # ---- what is said -----------------------------------------------------------------------------------------

    def _found(self, facts: tuple[Fact, ...]) -> None:
        newest_first = sorted(facts, key=lambda fact: fact.save, reverse=True)
        for part in in_parts(newest_first) if facts else [()]:
            self._say(Found(self._address, part))

    def _remark(self, remark: str) -> None:
        """Once, however often a controller comes back."""
        if remark and remark != self._remarked:
            self._log("warning", remark)
        self._remarked = remark

    def _done(self, facts: tuple[Fact, ...]) -> None:
        self._say(Done(facts))

    def _log(self, level: str, text: str) -> None:
        """Each line once, until another one comes: a peer that asks nonsense must not fill the log."""
        if text != self._said:
            self._said = text
            self._say(Line(level, text))

    def _say(self, message: FromDepot) -> None:
        self._outgoing.append(message)
        self._flushed = trio.Event()
        self._bell.set()

    async def _speak(self) -> None:
        with suppress(trio.BrokenResourceError):  # the agent is gone, which `_listen` notices
            while True:
                self._bell = trio.Event()
                while self._outgoing:
                    await send_frame(self._stream, encode(self._outgoing.popleft()))
                self._flushed.set()
                await self._bell.wait()


async def _main(descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    await Depot(trio.SocketStream(trio.socket.from_stdlib_socket(sock))).run()


def main() -> None:
    """The program: its argument is the descriptor of the socket to the agent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Whoever ends the whole job signals the depot too; it has to outlive the ranks. The end of its socket ends it.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    try:
        trio.run(_main, int(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads that wait for a file system must not hold up the end


if __name__ == "__main__":
    main()
