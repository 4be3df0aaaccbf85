"""Real depot processes, spoken to as an agent does."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeVar

from perdure.checkpoint_io.depot_messages import (
    Begin,
    Done,
    Finish,
    Found,
    FromDepot,
    Line,
    Order,
    ToDepot,
    decode_from_depot,
    encode,
)
from perdure.protocol.checkpoints import NO_ORDERS, DepotOrders, Fact
from perdure.protocol.keys import JobKeys

LENGTH = struct.Struct("!I")
END_S = 10.0
M = TypeVar("M", Found, Done, Line)


class DepotProcess:
    """One depot. `with` ends it, and finds that it has ended."""

    def __init__(
        self,
        node: str,
        keys: JobKeys | None,
        *,
        save: Path | None = None,
        local: Path | None = None,
        limit_s: float = 20.0,
        durable: bool = True,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock = ours
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "perdure.checkpoint_io.depot", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.lines: list[str] = []
        self._address = ""
        self._waiting: list[FromDepot] = []
        folders = (None if save is None else str(save), None if local is None else str(local))
        self.tell(Begin(node, "127.0.0.1", *folders, limit_s, keys, durable))

    def __enter__(self) -> "DepotProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()

    def tell(self, message: ToDepot) -> None:
        data = encode(message)
        self.sock.sendall(LENGTH.pack(len(data)) + data)

    def order(self, orders: DepotOrders = NO_ORDERS, session: int = 1) -> None:
        self.tell(Order(session, orders))

    def finish(self, within_s: float) -> int:
        """Let it end; its exit code."""
        self.tell(Finish(within_s))
        return self.process.wait(END_S + within_s)

    def hear(self, kind: type[M], within_s: float = 20.0) -> M:
        """The next message of a kind; others before it are kept."""
        until = time.monotonic() + within_s
        at = 0
        while True:
            while at == len(self._waiting):
                self._waiting.append(self._receive(until))
            message = self._waiting[at]
            if isinstance(message, kind):
                del self._waiting[at]
                return message
            at += 1

    def facts(self, within_s: float = 20.0) -> tuple[Fact, ...]:
        """What became of an order."""
        return self.hear(Done, within_s).facts

    @property
    def address(self) -> str:
        """Where it serves; begins a first session if none has begun."""
        if not self._address:
            self.order()
            self._address = self.hear(Found).address
        return self._address

    def _receive(self, until: float) -> FromDepot:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size, until))
        message = decode_from_depot(self._exactly(length, until))
        if isinstance(message, Line):
            self.lines.append(message.text)
        return message

    def _exactly(self, length: int, until: float) -> bytes:
        data = b""
        while len(data) < length:
            self.sock.settimeout(max(until - time.monotonic(), 0.001))
            chunk = self.sock.recv(length - len(data))
            if not chunk:
                raise EOFError(f"the depot has ended with {self.process.poll()}")
            data += chunk
        return data

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
