"""One writer process, as the trainer sees it: how it is started, told, heard, killed and buried.

It is a plain child: it descends from the rank, so whoever kills the rank's tree kills it too. The trainer's own end of
the socket is the only thing that keeps it alive.
"""

import os
import select
import signal
import subprocess
import sys
from math import inf
from time import monotonic

from ..protocol.checkpoints import SaveId, Tier
from .writer_messages import (
    Abandon,
    Damaged,
    Failed,
    FromWriter,
    Ready,
    Released,
    Remark,
    Write,
    Written,
    encode,
    receive_reply,
    send,
    socket_pair,
)

Outcome = Written | Failed | Damaged | Released
"""What became of a save, and of its image."""

MODULE = "perdure.checkpoint_io.writer"


class Flight:
    """A save that a writer process has been given. left: tiers of which nothing was heard yet.

    reads: the process may still read its image. due: when the process is taken for stuck. abandoned: nobody waits.
    """

    __slots__ = ("abandoned", "due", "left", "order", "reads")

    def __init__(self, order: Write, due: float) -> None:
        self.order = order
        self.left = list(order.tiers)
        self.reads = True
        self.due = due
        self.abandoned = False

    def where(self) -> str:
        """The path from which an answer is missing."""
        tier = self.left[0] if self.left else self.order.tiers[-1]
        return str(self.order.local_dir if tier is Tier.LOCAL else self.order.durable_dir)


class Child:
    """One process. Not thread-safe: `Writer` holds its lock around every use, but for `poll`'s waiting."""

    def __init__(self) -> None:
        ours, theirs = socket_pair()
        try:
            with theirs:
                self._popen = _launch(theirs.fileno())
            self.pid = self._popen.pid
            # We collect the status ourselves; the object must not look for a process that is buried.
            self._popen.returncode = 0
            self.pidfd = os.pidfd_open(self.pid)
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._socket = ours
        self.flights: dict[SaveId, Flight] = {}
        self.layouts: set[int] = set()
        self.images: set[int] = set()
        """What was sent to it."""
        self.ready = False
        self.lost = ""
        """Why it gets no more work, and what is reported of the work it had."""
        self.ends = inf
        """When it must be gone, once it was asked to end."""

    def fileno(self) -> int:
        """Of the socket, -1 when it is closed."""
        return self._socket.fileno()

    def send(self, data: bytes, descriptor: int = -1) -> None:
        send(self._socket, data, descriptor)

    def receive(self) -> FromWriter | None:
        """Raises BlockingIOError where there is nothing to hear yet; None when it has closed its end."""
        try:
            return receive_reply(self._socket)
        except ConnectionError:
            return None

    # ---- its saves ------------------------------------------------------------------------------------------

    def take(self, reply: FromWriter) -> Outcome | Remark | None:
        """What is to be told of a reply."""
        if isinstance(reply, Ready):
            self.ready = True
            return None
        if isinstance(reply, Remark):
            return reply
        flight = self.flights.get(reply.save)
        if flight is None or isinstance(reply, Damaged):
            return reply if isinstance(reply, Damaged) else None
        if isinstance(reply, Released):
            told, flight.reads = flight.reads, False
        else:
            # A shard that is there is worth to be known even when nobody waits for it any more.
            told = reply.tier in flight.left or (flight.abandoned and isinstance(reply, Written))
            flight.left = [tier for tier in flight.left if tier is not reply.tier]
        if not flight.left and isinstance(reply, Released):
            del self.flights[reply.save]
        return reply if told else None

    def abandon(self, epoch: int, round: int, limit: float) -> None:
        """Forget what is not of this round. The images must be released by `limit`."""
        for save, flight in self.flights.items():
            if (save.epoch, save.round) != (epoch, round):
                flight.abandoned = True
                flight.left = []
                flight.due = min(flight.due, limit)
        try:
            self.send(encode(Abandon(epoch, round)))
        except OSError:
            # It is dead, or stuck and known by its deadlines.
            pass

    def forget_image(self, image: int) -> None:
        """Another memory is known by this number now: nothing is said of the former one's release."""
        self.images.discard(image)
        for flight in self.flights.values():
            if flight.order.image == image:
                flight.reads = False

    def fail(self, why: str) -> list[Outcome]:
        """Give up what is missing."""
        told: list[Outcome] = [Failed(save, tier, why) for save, flight in self.flights.items() for tier in flight.left]
        for flight in self.flights.values():
            flight.left = []
        return told

    def release(self) -> list[Outcome]:
        """It is gone: nobody reads its images any more."""
        told: list[Outcome] = [
            Released(save, flight.order.image) for save, flight in self.flights.items() if flight.reads
        ]
        self.flights.clear()
        return told

    def next_due(self) -> float:
        """When to look at it again if it does not come forward."""
        return self.ends if self.lost else min((flight.due for flight in self.flights.values()), default=inf)

    def stuck(self, now: float) -> str:
        """Where it is stuck, empty if it is not known to be."""
        for save, flight in self.flights.items():
            if now >= flight.due:
                return f"no answer from {flight.where()} for {now - flight.order.began:.1f} s about {save}"
        return ""

    # ---- its end --------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        self._socket.close()

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, until: float) -> bool:
        """Whether it is gone by then."""
        waiter = select.poll()
        waiter.register(self.pidfd, select.POLLIN)
        return bool(waiter.poll(max(until - monotonic(), 0) * 1000))

    def bury(self) -> str:
        """Collect a process that is gone; how it ended."""
        try:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            # Somebody else in this process waits for any child.
            result = None
        self.close()
        if result is None:
            return "ended"
        if result.si_code == os.CLD_EXITED:
            return f"ended with exit code {result.si_status}"
        return f"was killed by {signal.Signals(result.si_status).name}"

    def close(self) -> None:
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _launch(descriptor: int) -> "subprocess.Popen[bytes]":
    # The mask is inherited: until the process ignores what asks a job to stop, it is kept from it. And no interrupt of
    # the round comes between the start of the process and our knowledge of it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
