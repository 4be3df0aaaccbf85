"""A network between agents and the controller that loses, doubles, reorders, delays, breaks and parts.

As with TCP, nothing of an earlier connection arrives in a later one. Within a connection everything may happen to a
frame: that is harsher than TCP, but a full queue does lose frames, and what is above must not count on more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .clockwork import Clockwork


@dataclass
class Weather:
    """Chances per frame. All zero: a calm network."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0


class Connection:
    """One connect of one agent. Either end may be told of its end later than the other."""

    def __init__(self, clock: Clockwork, weather: Weather) -> None:
        self.open = True
        self.parted = False
        self._clock = clock
        self._weather = weather
        self._free = {"up": 0.0, "down": 0.0}

    def carry(self, way: str, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        """Deliver `frame` later, or never, or twice."""
        chance, weather = self._clock.chance, self._weather
        if not self.open or self.parted or chance.random() < weather.lost:
            return
        copies = 2 if chance.random() < weather.doubled else 1
        for _ in range(copies):
            delay = chance.uniform(0.0002, 0.002)
            if chance.random() < weather.late:
                delay += chance.uniform(0.01, 3.0)  # and others overtake it
                when = self._clock.now + delay
            else:
                when = self._free[way] = max(self._free[way], self._clock.now + delay)
            self._clock.at(when, lambda: self._arrive(frame, deliver))

    def _arrive(self, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        if self.open and not self.parted:
            deliver(frame)
