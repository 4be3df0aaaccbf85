"""Simulated time: a heap of things to do, and one source of chance. The same seed gives the same world, to the bit."""

import heapq
from collections.abc import Callable
from random import Random

EVENT_LIMIT = 400_000
"""A world that takes more steps than this runs in circles."""


class Clockwork:
    """now: seconds since the world began. trace: what happened, if anybody wants to read it."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.now = 0.0
        self.chance = Random(seed)
        self.trace: list[str] = []
        self.steps = 0
        self._tracing = tracing
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, action))

    def step(self, until: float) -> bool:
        """Do the next thing; False if there is none before `until`."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.steps += 1
        assert self.steps < EVENT_LIMIT, f"more than {EVENT_LIMIT} steps: something runs in circles"
        action()
        return True

    def say(self, who: object, text: str) -> None:
        if self._tracing:
            self.trace.append(f"{self.now:9.3f}  {who}: {text}")


class Alarm:
    """One pending call that can be moved: the way in which a sans-IO machine is served with `deadline` and `tick`."""

    def __init__(self, clock: Clockwork, action: Callable[[], None]) -> None:
        self._clock = clock
        self._action = action
        self._at: float | None = None

    def set(self, at: float | None) -> None:
        if at == self._at:
            return
        self._at = at
        if at is not None and at != float("inf"):
            self._clock.at(at, lambda: self._ring(at))

    def _ring(self, at: float) -> None:
        if self._at == at:
            self._at = None
            self._action()
