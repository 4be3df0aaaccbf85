"""Serves the shards of this node's local tier to depots and restoring ranks of other nodes.

Rules. Whoever asks has the job's key (the transport sees to that). A request names a save, a rank and the number of a
file; what is opened is what such a file would be called, in the local folder, never through a symbolic link, and only
if it is a regular file. Each client has at most WINDOW requests unanswered, so what waits here is bounded. Reads run in
threads with a deadline: a disk that stands still costs its readers, and nobody else.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import trio

from ..protocol.controller_socket import ControllerSocket
from ..protocol.keys import JobKeys
from ..protocol.socket import UnknownPeer
from ..protocol.wire import Disconnected, Received
from .depot_messages import SIDECAR, WINDOW, BadFrame, No, Piece, Read, decode_read, encode
from .names import data_name, local_name, local_save, sidecar_name

READERS = 4
"""Threads that read."""

READ_S = 15.0
"""How long the disk may take for one piece, waiting for a thread included."""

CLIENTS = 256
"""Connections that may be open at once."""

HEARTBEAT_S = 20.0


class CannotRead(Exception):
    """A piece cannot be had; the text says why."""


class DepotServer:
    """`async with server.wire.listening():`, then `serve()`. `wire.address` is where clients connect."""

    def __init__(self, folder: Path, keys: JobKeys | None, host: str, log: Callable[[str, str], None]) -> None:
        """folder: the local tier of this node. host: where others reach it; empty: found out."""
        self.wire = ControllerSocket(keys, advertise=host, heartbeat_timeout_s=HEARTBEAT_S, expected_agents=CLIENTS)
        self._folder = folder
        self._log = log
        self._limiter = trio.CapacityLimiter(READERS)
        self._unanswered: Counter[bytes] = Counter()

    async def serve(self) -> None:
        """Answer, for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                for event in await self.wire.events():
                    if isinstance(event, Disconnected):
                        continue  # what is being read for it comes to its end, and finds nobody
                    self._take(event, nursery)

    def _take(self, event: Received, nursery: trio.Nursery) -> None:
        try:
            read = decode_read(event.frame)
        except BadFrame as error:
            self._log("warning", f"depot: refused {error}")
            self._send(event.peer, No(-1, str(error)))
            return
        if self._unanswered[event.peer] >= WINDOW:
            self._send(event.peer, No(read.id, f"more than {WINDOW} requests at once"))
            return
        self._unanswered[event.peer] += 1
        nursery.start_soon(self._answer, event.peer, read)

    async def _answer(self, peer: bytes, read: Read) -> None:
        try:
            reply = await self._reply(read)
        finally:
            self._unanswered[peer] -= 1
            if not self._unanswered[peer]:
                del self._unanswered[peer]
        self._send(peer, reply)

    async def _reply(self, read: Read) -> Piece | No:
        try:
            with trio.move_on_after(READ_S):
                size, data = await trio.to_thread.run_sync(
                    read_piece, self._folder, read, abandon_on_cancel=True, limiter=self._limiter
                )
                return Piece(read.id, size, data)
        except CannotRead as error:
            return No(read.id, str(error))
        return No(read.id, f"the disk of {self._folder} did not answer within {READ_S:g} s")

    def _send(self, peer: bytes, reply: Piece | No) -> None:
        try:
            self.wire.send(peer, encode(reply))
        except UnknownPeer:
            pass  # it has gone meanwhile


def read_piece(folder: Path, read: Read) -> tuple[int, bytes]:
    """The size of the file that `read` names, and the bytes that it asks for. Raises CannotRead."""
    name = local_name(read.save)
    file = sidecar_name(read.rank) if read.number == SIDECAR else data_name(read.rank, read.number)
    if local_save(name) != read.save:
        raise CannotRead(f"no save can be called {name!r}")
    try:
        return _read(str(folder), name, file, read.offset, read.length)
    except OSError as error:
        raise CannotRead(f"{file} of {read.save} in {folder}: {error.strerror}") from None


def _read(folder: str, save: str, file: str, offset: int, length: int) -> tuple[int, bytes]:
    kind = os.O_RDONLY | os.O_CLOEXEC
    root = os.open(folder, kind | os.O_DIRECTORY)
    try:
        inner = os.open(save, kind | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    finally:
        os.close(root)
    try:
        # Without NONBLOCK, opening a pipe that somebody has put there would wait for ever.
        descriptor = os.open(file, kind | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inner)
    finally:
        os.close(inner)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CannotRead(f"{file} of {save} is not a regular file")
        return status.st_size, os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
