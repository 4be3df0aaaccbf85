"""The rank's end of the private socket to its agent, and the one runtime thread that listens on it.

Rules: the thread never blocks on anything but its poll, so that an interrupt, the agent's death and the automatic stamp
are never behind something slow. Sending is allowed from every thread: one packet is one message, and the kernel keeps
packets whole. When the agent is gone, so is the job's knowledge of this process: it ends.

The automatic stamp shows that the interpreter moves. Every interval one call is queued that the main thread makes
between two bytecodes (a C function that raises a semaphore: no Python runs in odd places); the stamp is the time at
which the newest such call was queued while the earlier one had been made. So a main thread that is stuck in C is known
by the age of the stamp, and never judged early. At most one call is queued at a time.
"""

import contextlib
import ctypes
import os
import queue
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Union

import msgspec

from ..protocol.checkpoints import SaveId
from ..protocol.exit_codes import ExitCode
from ..protocol.names import RESERVE
from ..protocol.rank_messages import (
    RANK_MESSAGE_LIMIT,
    Drop,
    Enter,
    Finish,
    FromRank,
    Hold,
    Interrupt,
    Note,
    Passed,
    StopAt,
    ToRank,
)
from .beats import W_AUTO
from .evidence import clean
from .interrupt import Interrupter
from .supervision import Supervision

if TYPE_CHECKING:
    from .attempt import Attempt

SEND_LIMIT_S = 60.0
FLUSH_LIMIT_S = 0.5
NOTE_LIMIT = 2_000

Order = Union["Attempt", Enter, Interrupt, Finish]
"""What the main thread reads: an attempt to run a round, a reserve's seat, the end of a round, the end of the job."""

_libc = ctypes.CDLL(None)
_semaphore = (ctypes.c_long * 8)()
"""A sem_t of this process, for ever: a queued call may be made after the runtime has gone."""
_libc.sem_init(ctypes.byref(_semaphore), 0, 0)
_SEM_POST = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_queued = False


def _queue_call() -> bool:
    """Queue one call for the main thread, if the last one has been made; whether that was so."""
    global _queued
    if _queued and _libc.sem_trywait(ctypes.byref(_semaphore)) != 0:
        return False
    _queued = ctypes.pythonapi.Py_AddPendingCall(_SEM_POST, ctypes.byref(_semaphore)) == 0
    return True


class Link:
    """Socket, thread, inbox. `orders` is what the main thread reads at the gate."""

    def __init__(self, supervised: Supervision, new_attempt: "Callable[[Enter], Attempt]") -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.interrupter = Interrupter(self.wake, self.note)
        self.on_drop: Callable[[tuple[SaveId, ...]], None] = lambda saves: None
        """Is told, in the runtime thread, of saves that cannot be complete any more; it must not wait for anything."""
        self._supervised = supervised
        self._new_attempt = new_attempt
        self._socket = socket.socket(fileno=supervised.socket_fd)
        self._page = supervised.page
        self._interval_s = supervised.stamp_interval_s
        self._bell = -1
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="perdure-runtime", daemon=True)
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()

    def open(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket.setblocking(False)
        self._supervised.on_fork = self._after_fork
        self._thread.start()

    def close(self) -> None:
        """End the thread. The socket was there before us and stays."""
        self._closing = True
        self.wake()
        self._thread.join()
        self._supervised.on_fork = None
        bell, self._bell = self._bell, -1
        os.close(bell)
        self._socket.detach()

    def _after_fork(self) -> None:
        """In a forked child: the parent's link is none of its business. Says nothing, since nothing is sent."""
        self._socket.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        self.interrupter.after_fork()

    def wake(self) -> None:
        if self._bell >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._bell, 1)

    # ---- sending, from any thread ---------------------------------------------------------------------------

    def send(self, message: FromRank) -> None:
        """Send now. If the agent is gone the message is dropped: the runtime thread then ends this process."""
        packet = self._encoder.encode(message)
        deadline = monotonic() + SEND_LIMIT_S
        while True:
            try:
                self._socket.send(packet)
                return
            except BlockingIOError:
                self._wait_writable(deadline)
            except OSError:
                return

    def _wait_writable(self, deadline: float) -> None:
        waiter = select.poll()
        waiter.register(self._socket, select.POLLOUT)
        if not waiter.poll(max(deadline - monotonic(), 0) * 1000):
            self._leave(f"the agent has read nothing for {SEND_LIMIT_S:g} s")

    def note(self, level: str, text: str) -> None:
        """A line for the job's log. Dropped, except for stderr, if the agent is too slow to read it."""
        text = clean(text)[:NOTE_LIMIT]
        try:
            self._socket.send(self._encoder.encode(Note(level, text)))
        except OSError:
            say(text)

    # ---- the runtime thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # Without this thread the rank would hear nothing any more, and wait for ever.
            self.note("error", f"the runtime's thread failed, a defect of perdure: {traceback.format_exc()}")
            self._leave(f"the runtime's thread failed: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        stamp_due = monotonic()
        while not self._closing:
            now = monotonic()
            if now >= stamp_due:
                self._stamp()
                stamp_due = now + self._interval_s
            self.interrupter.tick()
            due = self.interrupter.due
            until = stamp_due if due is None else min(stamp_due, due)
            for fd, _ in poll.poll(max(until - monotonic(), 0) * 1000):
                if fd == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                else:
                    self._receive()

    def _stamp(self) -> None:
        if _queue_call():
            self._page.words[W_AUTO] = monotonic_ns()

    def _receive(self) -> None:
        while True:
            try:
                packet = self._socket.recv(RANK_MESSAGE_LIMIT)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._leave("the agent is gone")
                return
            try:
                order = self._decoder.decode(packet)
            except msgspec.DecodeError as error:
                self.note("error", f"a message of {len(packet)} bytes from the agent cannot be read: {error}")
                continue
            self._obey(order)

    def _obey(self, order: ToRank) -> None:
        if isinstance(order, Interrupt):
            # Not in the function: then the main thread learns of it where it waits.
            if self.interrupter.request(order.round, order.cause):
                return
        elif isinstance(order, Finish):
            self.interrupter.request(None, order.reason)
        elif isinstance(order, Hold | StopAt):
            self._stop(order)
            return
        elif isinstance(order, Drop):
            self.on_drop(order.saves)
            return
        elif order.rank != RESERVE:
            # Here and not in the main thread: an Interrupt right behind it must find the flight.
            attempt = self._new_attempt(order)
            self.interrupter.begin(attempt.flight)
            self.orders.put(attempt)
            return
        self.orders.put(order)

    def _stop(self, order: Hold | StopAt) -> None:
        if isinstance(order, StopAt):
            self.interrupter.stop_at(order.round, order.step)
            return
        passed = self.interrupter.hold(order.round)
        if passed is not None:
            self.send(Passed(order.round, passed))

    def _leave(self, why: str) -> None:
        if self._closing:
            return
        say(f"{why}: this process (pid {os.getpid()}) leaves with code {int(ExitCode.CONTROLLER_LOST)}")
        # The main thread may be stuck, with a stream locked: flushing gets a moment, not more.
        flush = threading.Thread(target=_flush, name="perdure-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_LIMIT_S)
        os._exit(ExitCode.CONTROLLER_LOST)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """One line on stderr, in one write, past Python's buffers and locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"perdure: {clean(text)}\n".encode())
