"""`Round`: what the training function holds of the round that it runs in.

`ping` and `section` are called in the innermost loop of a trainer: they store into the beat page and do nothing else.
"""

from collections.abc import Generator
from contextlib import contextmanager
from operator import index
from threading import get_ident, main_thread
from time import monotonic_ns
from typing import TYPE_CHECKING, SupportsIndex

from ..protocol.checkpoints import Resume
from .beats import SECTIONS, SECTIONS_RECORDED, STEP_MAX, W_DEPTH, W_PAUSE_UNTIL, W_PING, W_SECTIONS, W_STEP
from .checkpoints import Checkpoints
from .interrupt import Flight

if TYPE_CHECKING:
    from ..checkpoint_io.checkpointer import Checkpointer

WAIT_LIMIT_S = 86_400.0
"""Longer than any wait for the step of a stop."""


class Section:
    """One named section of a round. The same object serves every entry: the stack is in the page."""

    __slots__ = ("_id", "_words")

    def __init__(self, words: "memoryview[int]", number: int) -> None:
        self._words = words
        self._id = number

    def __enter__(self) -> None:
        words = self._words
        depth = words[W_DEPTH]
        if depth < SECTIONS_RECORDED:
            at = W_SECTIONS + 2 * depth
            words[at] = self._id
            words[at + 1] = monotonic_ns()
        # Last, so that a reader never sees a level that is not filled in.
        words[W_DEPTH] = depth + 1

    def __exit__(self, kind: object, error: object, at: object) -> None:
        self._words[W_DEPTH] -= 1


class _Atomic:
    """The context manager of `Round.atomic`."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            raise RuntimeError("round.atomic() works in the main thread only: no other thread is ever interrupted")
        self._flight.enter_atomic()

    def __exit__(self, kind: object, error: object, at: object) -> None:
        self._flight.leave_atomic()


class Round:
    """One round, as seen by one of its ranks.

    index counts rounds from 0. rank, world_size, local_rank and local_world_size hold for this round only.
    resume: the save from which all ranks resume (`resume.step`), chosen by the controller; None if there is none.
    """

    __slots__ = (
        "_atomic",
        "_checkpoints",
        "_flight",
        "_sections",
        "_stop",
        "_words",
        "index",
        "local_rank",
        "local_world_size",
        "rank",
        "resume",
        "world_size",
    )

    def __init__(
        self,
        flight: Flight,
        words: "memoryview[int]",
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        checkpoints: Checkpoints,
        resume: Resume | None = None,
    ) -> None:
        self.index = flight.index
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.resume = resume
        self._checkpoints = checkpoints
        self._flight = flight
        self._words = words
        self._sections = {name: Section(words, number) for number, name in enumerate(SECTIONS, 1)}
        self._atomic = _Atomic(flight)
        self._stop = flight.stop

    def __repr__(self) -> str:
        return f"Round(index={self.index}, rank={self.rank}, world_size={self.world_size})"

    def ping(self, step: SupportsIndex) -> None:
        """The work moves: `step` is reached. Arms the judging of hangs by progress; well under a microsecond."""
        words = self._words
        try:
            words[W_STEP] = step  # pyright: ignore[reportArgumentType, reportCallIssue]
        except ValueError:
            # More than 64 bits: a trainer must not fail because its step cannot be shown.
            words[W_STEP] = STEP_MAX
        except TypeError:
            raise TypeError(f"round.ping(step) takes a whole number, not {type(step).__name__}: {step!r:.80}") from None
        words[W_PING] = monotonic_ns()

    def section(self, name: str) -> Section:
        """A context manager that says what the rank is doing: `setup`, `step` or `checkpointing`. They may be
        nested."""
        try:
            return self._sections[name]
        except (KeyError, TypeError):
            raise ValueError(f"unknown section {name!r}; known are {', '.join(SECTIONS)}") from None

    def atomic(self) -> _Atomic:
        """A context manager in which neither an interrupt nor an abort of communicators happens: both wait for its end.

        For what must not be torn, such as the write of a checkpoint. Re-entrant. Keep it short: the others wait.
        """
        return self._atomic

    @contextmanager
    def pause(self, *, max: float) -> Generator[None]:
        """No hang is judged inside, for at most `max` seconds. Deaths and exceptions are handled as ever."""
        if not 0 < max < 1e9:
            raise ValueError(f"round.pause(max={max!r}) takes a positive number of seconds")
        words = self._words
        before = words[W_PAUSE_UNTIL]
        words[W_PAUSE_UNTIL] = monotonic_ns() + int(max * 1e9)
        try:
            yield
        finally:
            if words[W_PING]:
                # Time in the pause does not count: judging by progress starts anew.
                words[W_PING] = monotonic_ns()
            words[W_PAUSE_UNTIL] = before

    @property
    def checkpointer(self) -> "Checkpointer":
        """Saves and restores this rank's state: `save`, `restore`, `due`. The same object in all rounds."""
        return self._checkpoints.get(self)

    def should_stop(self, step: SupportsIndex) -> bool:
        """Whether all ranks are to leave after `step`, which is True for the same step on all of them.

        Ask in every step, with the same growing number on all ranks. It costs nothing until somebody asks the job to
        stop; then it may wait a moment, until all ranks have said how far they are.
        """
        try:
            number = index(step)
        except TypeError:
            what = f"{type(step).__name__}: {step!r:.80}"
            raise TypeError(f"round.should_stop(step) takes a whole number, not {what}") from None
        return not self._stop.passes(number) and self._is_last(number)

    def _is_last(self, step: int) -> bool:
        """The job is to stop: wait until it is known after which step."""
        stop = self._stop
        if stop.step is None:
            # The wait is bounded by others: the controller ends it after termination_grace_time, and the agent, where
            # no controller comes back, after controller_timeout. Whoever waits here does not hang.
            with self.pause(max=WAIT_LIMIT_S):
                self._flight.await_stop()
        return stop.step is not None and step >= stop.step
