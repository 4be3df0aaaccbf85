"""An abort for gloo, which has none: shut down the TCP connections that gloo itself opened, and the store's clients.

A collective that waits on a silent peer then fails at once, here and at the peers; the listening sockets stay, because
gloo ends the process when its listener breaks.

Which sockets are gloo's is known from the kernel, not guessed: each gloo device has one epoll instance, and in it its
listener and every connection, also those that are opened later. A listener that came into being while torch made a
process group, and that sits in an epoll instance, marks that instance. The user's own sockets are in no such instance.

The fds of a process may be closed and reused at any moment: a connection is shut down only through a duplicate of its
fd whose inode is the one that the epoll instance has.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Generator

KNOCKS = 4096
KNOCK_LIMIT_S = 0.2

_FDS = "/proc/self/fd"
_EPOLL = "anon_inode:[eventpoll]"


class _Known:
    """Inodes of the listeners of all gloo devices in this process: a device may outlive the round that opened it."""

    listeners: set[int] = set()


class Connections:
    """The connections of one round that an abort shuts down."""

    def __init__(self, store_port: int, world_size: int) -> None:
        self._store_port = store_port
        self._world_size = world_size
        self._knocked: set[int] = set()
        self._opening: list[set[int]] = []
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opening(self) -> Generator[None]:
        """While torch makes a process group. An abort during it counts what has been opened since."""
        before = _socket_inodes()
        self._opening.append(before)
        try:
            yield
        finally:
            _Known.listeners |= _listening(_socket_inodes() - before)
            self._opening.remove(before)

    def close(self) -> None:
        """The round is over: from here on its fds may belong to the next one."""
        with self._lock:
            self._closed = True

    def shut_down(self) -> int:
        """Shut down every connection of this round; how many there were."""
        with self._lock:
            if self._closed:
                return 0
            fds = _fds()
            now = {inode for _, inode in fds.sockets}
            fresh: set[int] = set()
            for before in list(self._opening):
                fresh |= _listening(now - before)
            marks = _Known.listeners | fresh
            count = 0
            for epoll in fds.epolls:
                watched = _watched_by(epoll)
                if marks.intersection(watched.values()):
                    count += sum(_shut_down(fd, inode, None) for fd, inode in watched.items())
            for fd, inode in fds.sockets:
                if inode in fresh and inode not in self._knocked:
                    self._knocked.add(inode)
                    _knock(fd, self._world_size)
            if self._store_port:
                count += sum(_shut_down(fd, inode, self._store_port) for fd, inode in fds.sockets)
            return count


def _knock(listener: int, world_size: int) -> None:
    """Play the peers for which a gloo device that is being connected still waits, and hang up on it.

    gloo connects each pair of ranks once: one side waits for a connection that starts with the pair's number, 8 bytes,
    counted from 0 by the waiting device. There is no socket to shut down until the peer has come, and it may never
    come.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener)) as copy:
        address = copy.getsockname()
        for number in range(min(world_size + 1, KNOCKS)):
            with socket.socket(copy.family, socket.SOCK_STREAM) as peer:
                peer.settimeout(KNOCK_LIMIT_S)
                peer.connect(address)
                peer.sendall(number.to_bytes(8, sys.byteorder))


class _Fds:
    """The sockets (fd, inode) and the epoll instances of this process."""

    def __init__(self) -> None:
        self.sockets: list[tuple[int, int]] = []
        self.epolls: list[int] = []


def _fds() -> _Fds:
    found = _Fds()
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.sockets.append((int(name), int(target[8:-1])))
        elif target == _EPOLL:
            found.epolls.append(int(name))
    return found


def _socket_inodes() -> set[int]:
    return {inode for _, inode in _fds().sockets}


def _listening(inodes: set[int]) -> set[int]:
    """Those of `inodes` that are listening sockets. A process has few new sockets at a time, so each is asked."""
    found: set[int] = set()
    for fd, inode in _fds().sockets:
        if inode not in inodes:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(inode)
    return found


def _watched_by(epoll: int) -> dict[int, int]:
    """fd -> inode of everything in an epoll instance, from the kernel's description of it."""
    watched: dict[int, int] = {}
    try:
        with open(f"/proc/self/fdinfo/{epoll}") as file:
            lines = file.read().splitlines()
    except OSError:
        return watched
    for line in lines:
        words = line.replace(":", ": ").split()
        if words and words[0] == "tfd:" and "ino:" in words:
            watched[int(words[1])] = int(words[words.index("ino:") + 1], 16)
    return watched


def _shut_down(fd: int, inode: int, peer_port: int | None) -> bool:
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    try:
        if os.fstat(copy).st_ino != inode:
            return False
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return False
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            if peer_port is not None and connection.getpeername()[1] != peer_port:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
