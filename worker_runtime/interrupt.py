"""Leaving the training function from outside: one `Flight` for each life of the function, and the `Interrupter` that
ends it.

Rules:
- `RoundInterrupted` is raised only in the main thread, only while `Flight.inside`, never inside `Round.atomic()`.
  It is raised by the handler of a real-time signal, so that sleeps, locks and waits are left at once.
- Communicators are aborted before the main thread is signalled: a thread that is blocked in a collective runs no
  Python.
- The signal is repeated, ever more slowly, until the main thread has come out. An exception that user code caught
  without letting it go on is found at the next repetition, and the frame that caught it is named.
- An interrupt that comes when the function has already been left is a state (`Flight.wanted`), not an exception.
"""

import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType, TracebackType
from typing import Protocol

from .evidence import frame_in_collective, user_place
from .stopping import Stop
from .swallow import Spot, spots, swallower

FIRST_REPEAT_S = 0.05
LAST_REPEAT_S = 1.0
EAGER_S = 1.0
"""For so long the first pause is kept: a collective may have several waits, to be ended one after the other."""
UNWIND_GRACE_S = 5.0
"""While `finally` and `except` blocks work on the interrupt, it is not raised again for this long."""
ATOMIC_POLL_S = 0.02
"""The end of an atomic section wakes the runtime thread; this bounds the wait if that wake-up was itself
interrupted."""
SWALLOWS_NAMED = 8


class RoundInterrupted(BaseException):
    """The round is over: leave the training function. Never swallow it; clean up in `finally` and let it go on."""


class Abortable(Protocol):
    @property
    def quick(self) -> bool:
        """Whether `run` has nothing to do that may take long."""
        ...

    def run(self) -> None:
        """Run the abort steps once, in order; later callers wait for the first. Does not raise."""

    def again(self) -> None:
        """Repeat what may have missed a communicator that was being opened. Short, does not raise."""


class Flight:
    """One life of the training function in this process. Everything known of it hangs here and is dropped with it."""

    def __init__(self, index: int, abort: Abortable, wake: Callable[[], None]) -> None:
        self.index = index
        self.abort = abort
        self.wanted: str | None = None
        """Why this round is to be left; None while it is not."""
        self.inside = False
        """Whether the main thread is in the training function. Written by the main thread only."""
        self.depth = 0
        """How many `atomic()` sections are open. Written by the main thread only."""
        self.stop = Stop()
        self.where = ""
        self.in_collective = False
        self.swallowed: list[str] = []
        self.wanted_at = 0.0
        self.closed = False
        self._wake = wake
        self._lock = threading.Lock()
        self._stack: list[Spot] = []
        self._raised_at = 0.0

    def request(self, cause: str) -> bool:
        """Ask for this flight to end; False if the main thread has left the function for good already."""
        with self._lock:
            if self.closed:
                return False
            if self.wanted is None:
                self.wanted = cause
                self.wanted_at = monotonic()
                # Before the abort: afterwards a rank that waited in a collective is already on its way out of it.
                self._look(_frame_of_main_thread())
                self.stop.wake()
            return True

    def _look(self, frame: FrameType | None) -> None:
        """Note where the main thread is."""
        if self.inside and frame is not None:
            self.where = user_place(frame)
            self.in_collective = frame_in_collective(frame)

    def close(self) -> str | None:
        """By the main thread, out of the function: from here on requests are refused. Says whether there was one."""
        with self._lock:
            self.closed = True
            return self.wanted

    def enter_atomic(self) -> None:
        self.depth += 1
        if self.wanted is not None and self.depth == 1:
            self.depth = 0
            raise RoundInterrupted(self.wanted)

    def leave_atomic(self) -> None:
        self.depth -= 1
        if self.depth == 0 and self.wanted is not None and self.inside:
            self._wake()
            raise RoundInterrupted(self.wanted)

    def await_stop(self) -> None:
        """Wait until it is agreed after which step all ranks leave. An interrupt ends the wait, too."""
        while self.stop.step is None and self.wanted is None:
            self.stop.sleep()
        self.stop.wake()  # whoever else waits
        in_main = threading.get_ident() == threading.main_thread().ident
        if self.wanted is not None and in_main and self.inside and not self.depth:
            raise RoundInterrupted(self.wanted)

    def deliver(self, frame: FrameType | None) -> None:
        """By the signal handler: raise the interrupt in `frame`, if this is the time for it."""
        if self.wanted is None or not self.inside or self.depth or _is_importing(frame):
            return
        now = monotonic()
        if not self._raised_at:
            if not self.where:
                self._look(frame)
        elif _being_handled(sys.exc_info()[1]):
            if now - self._raised_at < UNWIND_GRACE_S:
                return
        else:
            self._name_swallower(frame)
        self._raised_at = now
        self._stack = spots(frame)
        raise RoundInterrupted(self.wanted)

    def _name_swallower(self, frame: FrameType | None) -> None:
        place = swallower(self._stack, spots(frame))
        if place and place not in self.swallowed and len(self.swallowed) < SWALLOWS_NAMED:
            self.swallowed.append(place)


def _frame_of_main_thread() -> FrameType | None:
    # All frames in a local variable would hold that variable's own frame: a circle, and with it all that the main
    # thread's frames hold would live until the next garbage collection.
    return sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]


def _being_handled(error: BaseException | None) -> bool:
    """Whether an interrupt is in the chain of exceptions that `except` and `finally` blocks are working on."""
    for _ in range(64):
        if error is None:
            return False
        if isinstance(error, RoundInterrupted):
            return True
        error = error.__context__
    return False


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way. One that is cut short cannot always be repeated (torch's cannot); the signal
    is."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class Interrupter:
    """Signals the main thread. `tick` and `due` are the runtime thread's; `install` and `restore` the main thread's."""

    def __init__(self, wake: Callable[[], None], note: Callable[[str, str], None]) -> None:
        self.flight: Flight | None = None
        self._wake = wake
        self._note = note
        self._main = threading.main_thread().ident or 0
        self._signal = 0
        self._lock = threading.Lock()
        self._next: float | None = None
        self._repeat_s = FIRST_REPEAT_S
        self._aborting: Flight | None = None
        self._told = 0

    def __enter__(self) -> "Interrupter":
        """Take the highest real-time signal that nobody uses. By the main thread."""
        for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
                self._signal = number
                return self
        raise RuntimeError("every real-time signal has a handler already; leave one of SIGRTMIN..SIGRTMAX to perdure")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            number, self._signal = self._signal, 0
        # Ignoring first discards a signal that is still on its way: with the default action it would kill the process.
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)

    def after_fork(self) -> None:
        """In a forked child: nothing is pending, and the signal means nothing here."""
        if self._signal:
            signal.signal(self._signal, signal.SIG_DFL)
        self._signal = 0
        if self.flight is not None:
            self.flight.wanted = None
            self.flight.stop.held = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        flight = self.flight
        if flight is not None:
            flight.deliver(frame)

    # ---- the runtime thread ---------------------------------------------------------------------------------

    def begin(self, flight: Flight) -> None:
        self.flight = flight
        self._next = None
        self._told = 0

    def request(self, index: int | None, cause: str) -> bool:
        """End flight `index` (None: whichever there is). False if the main thread is not in it."""
        flight = self.flight
        if flight is None or (index is not None and flight.index != index) or not flight.request(cause):
            return False
        if self._next is None and self._aborting is not flight:
            self._next = monotonic()
            self.tick()
        return True

    def hold(self, index: int) -> int | None:
        """The last step that flight `index` has passed, and it passes no other; None if that is not the flight."""
        flight = self.flight
        return flight.stop.hold() if flight is not None and flight.index == index else None

    def stop_at(self, index: int, step: int) -> None:
        flight = self.flight
        if flight is not None and flight.index == index:
            flight.stop.settle(step)

    @property
    def due(self) -> float | None:
        """When `tick` wants to be called, on the monotonic clock."""
        return self._next

    def tick(self) -> None:
        """Take the next step of ending the flight, if it is due."""
        flight = self.flight
        if self._next is None or flight is None:
            return
        if flight.closed:
            self._next = None
        elif self._aborting is flight:
            self._repeat(flight)
        elif flight.depth:
            self._next = monotonic() + ATOMIC_POLL_S
        else:
            self._aborting = flight
            self._next = None
            if flight.abort.quick:
                self._abort(flight)
                return
            # Other steps may take seconds, and this thread must go on listening.
            threading.Thread(target=self._abort, args=(flight,), name="perdure-abort", daemon=True).start()

    def _abort(self, flight: Flight) -> None:
        flight.abort.run()
        self._kick(flight)
        if self.flight is flight:
            self._repeat_s = FIRST_REPEAT_S
            self._next = monotonic() + FIRST_REPEAT_S
            self._wake()

    def _repeat(self, flight: Flight) -> None:
        now = monotonic()
        if self._next is not None and now < self._next:
            return
        flight.abort.again()
        self._kick(flight)
        self._tell_swallowed(flight)
        if now - flight.wanted_at > EAGER_S:
            self._repeat_s = min(self._repeat_s * 2, LAST_REPEAT_S)
        self._next = now + self._repeat_s

    def _kick(self, flight: Flight) -> None:
        with self._lock:
            if self._signal and not flight.closed:
                signal.pthread_kill(self._main, self._signal)

    def _tell_swallowed(self, flight: Flight) -> None:
        for place in flight.swallowed[self._told :]:
            self._note(
                "warning", f"{place} caught RoundInterrupted of round {flight.index} and went on; re-raise it there"
            )
        self._told = len(flight.swallowed)
