"""One writer process, as the trainer sees it: how it is started, told, heard, killed and buried.

It is a plain child: it descends from the rank, so whoever kills the rank's tree kills it too. The trainer's own end of
the socket is the only thing that keeps it alive.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from math import inf
from time import monotonic

import msgspec

from ..protocol.checkpoints import SaveId, Tier
from .children import collect
from .writer_messages import (
    Abandon,
    Damaged,
    Drop,
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


FREE_DEATHS = 3
"""In a row, after which the next start is put off: by FIRST_PAUSE_S, and twice as long each time."""
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0


class Starts:
    """When the next process may be started: at once, if they do not die again and again without a success."""

    def __init__(self) -> None:
        self._deaths = 0
        """In a row."""
        self._next = 0.0

    def succeeded(self) -> None:
        self._deaths = 0

    def failed(self, now: float) -> None:
        self._deaths += 1
        beyond = self._deaths - FREE_DEATHS
        if beyond >= 0:
            self._next = now + min(FIRST_PAUSE_S * 2**beyond, LONGEST_PAUSE_S)

    def refusal(self, now: float) -> str:
        """Why none is started now; empty if one may be."""
        pause = self._next - now
        return f"it died {self._deaths} times in a row; another is started {pause:.0f} s from now" if pause > 0 else ""


class Flight:
    """A save that a writer process has been given. left: tiers of which an outcome has still to be told.

    silent: tiers of which the process has not said its last word, whether anybody waits for that or not. reads: it may
    still read the image. due: when the process is taken for stuck. abandoned: nobody waits.
    """

    __slots__ = ("abandoned", "due", "left", "order", "reads", "silent")

    def __init__(self, order: Write, due: float) -> None:
        self.order = msgspec.structs.replace(order, values=())  # they may be large, and are the process's by now
        self.left = list(order.tiers)
        self.silent = set(order.tiers)
        self.reads = True
        self.due = due
        self.abandoned = False

    @property
    def awaited(self) -> bool:
        """Whether anything waits for the process to get on with it."""
        return bool(self.left) or self.reads

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
            flight.silent.discard(reply.tier)
        if not flight.silent and not flight.reads:
            del self.flights[reply.save]
        return reply if told else None

    def abandon(self, epoch: int, round: int, limit: float) -> None:
        """Forget what is not of this round. The images must be released by `limit`."""
        for save, flight in self.flights.items():
            if (save.epoch, save.round) != (epoch, round):
                flight.abandoned = True
                flight.left = []
                flight.due = min(flight.due, limit)
        self._pass_on(Abandon(epoch, round))

    def drop(self, save: SaveId) -> None:
        """What is missing of `save` is not wanted any more. The process answers for it, when nothing is left of it."""
        flight = self.flights.get(save)
        if flight is not None and flight.left:
            self._pass_on(Drop(save))

    def _pass_on(self, order: Abandon | Drop) -> None:
        with suppress(OSError):  # it is dead, or stuck and known by its deadlines
            self.send(encode(order))

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
        if self.lost:
            return self.ends
        return min((flight.due for flight in self.flights.values() if flight.awaited), default=inf)

    def stuck(self, now: float) -> str:
        """Where it is stuck, empty if it is not known to be."""
        for save, flight in self.flights.items():
            if flight.awaited and now >= flight.due:
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
        how = collect(self.pidfd) or "ended"
        self.close()
        return how

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
