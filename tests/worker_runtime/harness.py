"""A real trainer process whose agent is the test: the socket, the beat page and the environment are the real ones."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from perdure.protocol.rank_messages import (
    RANK_MESSAGE_LIMIT,
    Enter,
    Entered,
    Finish,
    FromRank,
    Interrupt,
    Note,
    Raised,
    Ready,
    ToRank,
)
from perdure.worker_runtime.beats import BeatPage

M = TypeVar("M")
DEADLINE_S = 30.0


class Rank:
    """One trainer. `source` is its program; it finds `perdure` imported."""

    def __init__(
        self, source: str, *, slot: str = "n0/0", torch: bool = False, head: str = "", env: dict[str, str] | None = None
    ) -> None:
        self.page = BeatPage.create()
        self.notes: list[Note] = []
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        head += "import os, sys, time, threading\nimport perdure\n"
        if torch:
            head += "import torch, torch.distributed as dist\nfrom datetime import timedelta\n"
        environ = {
            **os.environ,
            "PERDURE_RANK_FD": str(theirs.fileno()),
            "PERDURE_BEAT_FD": str(self.page.fd),
            "PERDURE_SLOT": slot,
            "PERDURE_LIFE": "1",
            "PERDURE_JOB": "test",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "fatal",
            "GLOO_SOCKET_IFNAME": "lo",
            **(env or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", head + textwrap.dedent(source)],
            env=environ,
            pass_fds=(theirs.fileno(), self.page.fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()

    def send(self, message: ToRank) -> None:
        self._ours.send(msgspec.msgpack.encode(message))

    def receive(self, deadline_s: float = DEADLINE_S) -> FromRank:
        """The next message that is not a note."""
        end = time.monotonic() + deadline_s
        while True:
            if not select.select([self._ours], [], [], max(end - time.monotonic(), 0))[0]:
                raise AssertionError(f"the rank said nothing for {deadline_s} s; page: {self.page.read()}")
            packet = self._ours.recv(RANK_MESSAGE_LIMIT)
            if not packet:
                _, stderr = self.process.communicate(timeout=10)
                raise AssertionError(f"the rank is gone: code {self.process.returncode}, stderr: {stderr}")
            message = self._decoder.decode(packet)
            if not isinstance(message, Note):
                return message
            self.notes.append(message)

    def expect(self, kind: type[M], deadline_s: float = DEADLINE_S) -> M:
        message = self.receive(deadline_s)
        assert isinstance(message, kind), message
        return message

    def enter(self, index: int = 0, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
        self.send(Enter(index, rank, world_size, rank, world_size, "127.0.0.1", port, "test"))

    def start(self, index: int = 0) -> None:
        """From the gate into a round of one rank."""
        ready = self.expect(Ready)
        self.enter(index, port=ready.port)
        assert self.expect(Entered) == Entered(index)

    def interrupt(self, index: int = 0, deadline_s: float = DEADLINE_S) -> Ready:
        self.send(Interrupt(index, "the test says so"))
        ready = self.expect(Ready, deadline_s)
        assert ready.round == index
        return ready

    def at_gate(self) -> Ready:
        """Ready, after an interrupt that a peer may have had first: then this rank fails by the peer's abort."""
        message = self.receive()
        if isinstance(message, Raised):
            assert message.fault.peer_error, message
            message = self.receive()
        assert isinstance(message, Ready), message
        return message

    def wait_page(self, step: int) -> None:
        """Until the rank has pinged `step`. The page has no wake-up, so this looks at it."""
        end = time.monotonic() + DEADLINE_S
        while self.page.read().step < step:
            assert time.monotonic() < end, f"step {step} was not reached; page: {self.page.read()}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.001)

    def finish(self, code: int = 0, reason: str = "done") -> tuple[int, str, str]:
        self.send(Finish(code, reason))
        return self.end()

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stdout, stderr

    def hang_up(self) -> None:
        """The agent dies."""
        self._ours.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._ours.close()
        self.page.close()


@contextlib.contextmanager
def trainers(*ranks: Rank) -> Iterator[tuple[Rank, ...]]:
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@contextlib.contextmanager
def trainer(source: str, *, torch: bool = False, env: dict[str, str] | None = None) -> Iterator[Rank]:
    rank = Rank(source, torch=torch, env=env)
    with trainers(rank):
        yield rank
