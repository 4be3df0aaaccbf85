"""A simulated trainer process: start-up, gate, function, and every way to break. It obeys what its agent says, as the
worker runtime does, and knows the truth about itself, against which the supervisors' verdicts are checked.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.names import NO_ROUND, Slot
from perdure.protocol.rank_messages import (
    Drop,
    Enter,
    Entered,
    Finish,
    FromRank,
    Hold,
    Interrupt,
    Leaving,
    Passed,
    Raised,
    Ready,
    Returned,
    StopAt,
    ToRank,
)
from perdure.worker_runtime.agent.hang import Progress

from .saving import Saver

if TYPE_CHECKING:
    from .agents import SimAgent

STEPS_PER_S = 10.0


class Place(Enum):
    STARTING = "starting"
    GATE = "gate"
    INSIDE = "inside"
    RETURNED = "returned"
    OUTSIDE = "outside"
    DEAD = "dead"


class Hang(Enum):
    """livelock: Python runs, no ping; comes when interrupted. stuck: a C call, does not come. frozen: SIGSTOP."""

    LIVELOCK = "livelock"
    STUCK = "stuck"
    FROZEN = "frozen"


class SimRank:
    """One process. `sick`: it may rightly be killed. `slow_s`: how long it takes to leave the function."""

    def __init__(self, agent: SimAgent, slot: Slot, life: int) -> None:
        self.agent = agent
        self.slot = slot
        self.life = life
        self.clock = agent.clock
        self.place = Place.STARTING
        self.round = NO_ROUND
        self.rank = -1
        self.step = -1
        self.hang: Hang | None = None
        self.hung_at = 0.0
        self.sick = False
        self.slow_s = 0.002
        self.functions = agent.world.functions
        self.done = 0
        self._entered_at = 0.0
        self._first_step = 0
        self._left: int | None = None
        self._passed: int | None = None
        self._ordered: list[ToRank] = []
        storage = agent.world.storage
        self._saver = Saver(self, storage) if storage is not None else None
        self._channel_free = 0.0
        self.clock.after(self.clock.chance.uniform(0.2, 2.0), self._started)

    def __repr__(self) -> str:
        return f"{self.slot}.{self.life}"

    @property
    def alive(self) -> bool:
        return self.place is not Place.DEAD

    @property
    def trains(self) -> bool:
        """Inside the function, and getting on."""
        return self.place is Place.INSIDE and self._left is None and self.hang is None and self._passed is None

    # ---- the socket pair --------------------------------------------------------------------------------------

    def say(self, message: FromRank) -> None:
        """Packets arrive in order, each a moment later."""
        self._channel_free = max(self._channel_free, self.clock.now + self.clock.chance.uniform(0.0001, 0.001))
        step = self.step
        self.clock.at(self._channel_free, lambda: self.agent.rank_said(self, message, step))

    def hear(self, message: ToRank) -> None:
        if self.alive and self.hang is not Hang.FROZEN:
            self.clock.after(0.0003, lambda: self._obey(message))
        else:
            self._ordered.append(message)

    def _obey(self, message: ToRank) -> None:
        if not self.alive or self.hang is Hang.FROZEN:
            self._ordered.append(message)
            return
        match message:
            case Enter():
                self._enter(message)
            case Interrupt():
                self._interrupted(message.round)
            case Hold():
                self._hold(message.round)
            case StopAt():
                self._stop_at(message)
            case Drop():
                self._drop(message)
            case Finish():
                self._finish(message.code)

    # ---- life -------------------------------------------------------------------------------------------------

    def _started(self) -> None:
        if not self.alive:
            return
        self.place = Place.GATE
        self.say(Ready(port=9000 + self.life))

    def _enter(self, order: Enter) -> None:
        assert self.place is Place.GATE, f"{self} was told to enter round {order.round} while {self.place.value}"
        self.place, self.round, self.rank = Place.INSIDE, order.round, order.rank
        self._left = self._passed = None
        self._entered_at = self.clock.now
        directive = self.agent.machine.directive
        self._first_step = self._saver.enter(directive) if self._saver else self.agent.world.furthest_step
        self.say(Entered(order.round))
        self.agent.world.entered(self)
        if self._saver is not None and directive.round == order.round:
            self._saver.next_save(directive, self._first_step, STEPS_PER_S)
        self._schedule_return()

    def _schedule_return(self) -> None:
        index = self.round
        self.clock.after(self.agent.world.function_s(index), lambda: self._return(index))

    def _return(self, index: int) -> None:
        free = self.hang is None and self._left is None and self._passed is None
        if self.place is Place.INSIDE and self.round == index and free:
            self.walk()
            self.place = Place.RETURNED
            self.say(Returned(index))

    def walk(self) -> None:
        """Bring `step` up to now."""
        if self.place is Place.INSIDE and self.hang is None:
            step = self._first_step + int((self.clock.now - self._entered_at) * STEPS_PER_S)
            self.step = step if self._passed is None else min(step, self._passed + 1)
            self.agent.world.furthest_step = max(self.agent.world.furthest_step, self.step)

    def progress(self) -> Progress:
        """What the beat page says."""
        now = self.clock.now
        moved = self.hung_at if self.hang else now
        auto = now if self.hang is Hang.LIVELOCK else moved
        return Progress(auto, moved, 0.0, self.step)

    # ---- an orderly stop --------------------------------------------------------------------------------------

    def _hold(self, index: int) -> None:
        """As if it asked in every step; held, it does one step more and waits there. A stuck one answers nothing."""
        if self.round != index or self.hang is Hang.STUCK or self.place not in (Place.INSIDE, Place.RETURNED):
            return
        self.walk()
        self._passed = self.step
        self.say(Passed(index, self.step))

    def _stop_at(self, order: StopAt) -> None:
        if self.round != order.round or self.place is not Place.INSIDE or self.hang or self._left is not None:
            return
        assert self._passed is not None, f"{self} was told when to stop, and never to hold"
        self.walk()
        steps = order.step - self.step
        self.clock.after(max(steps, 0) / STEPS_PER_S + self.clock.chance.uniform(0.0, 0.05), lambda: self._stop(order))

    def _stop(self, order: StopAt) -> None:
        """`should_stop` is True."""
        if self.place is Place.INSIDE and self.round == order.round and self.hang is None and self._left is None:
            self.step = order.step
            self.place = Place.RETURNED
            self.agent.world.stopped(self, self._passed)
            self.say(Returned(order.round))

    def _drop(self, order: Drop) -> None:
        """The runtime thread hears it, wherever the main thread is."""
        assert all(save.round == self.round for save in order.saves), f"{self}, in round {self.round}, is told {order}"
        if self._saver is not None:
            self._saver.drop(order.saves, self.agent.machine.directive.world_size)

    # ---- leaving the function ---------------------------------------------------------------------------------

    def _interrupted(self, index: int) -> None:
        if self.round != index or self.hang is Hang.STUCK:
            return
        if self.place is Place.RETURNED:
            self._come_back(None)
        elif self.place is Place.INSIDE and self._left is None:
            self.walk()
            self._left = index
            self.hang = None
            self.clock.after(self.slow_s, lambda: self._unwound(index, None))

    def _unwound(self, index: int, fault: Fault | None) -> None:
        if self.place is Place.INSIDE and self.round == index and self.hang is not Hang.FROZEN:
            self._come_back(fault)

    def _come_back(self, fault: Fault | None) -> None:
        self.place = Place.GATE
        self.say(Ready(round=self.round, port=9000 + self.life, fault=fault))

    def _finish(self, code: int) -> None:
        if self.place in (Place.GATE, Place.RETURNED) and code == 0:
            self.place = Place.OUTSIDE
            self.clock.after(self.clock.chance.uniform(0.01, 0.2), self._own_code)
        elif self.hang is not Hang.STUCK:
            self.clock.after(0.05, lambda: self.die(code))

    def _own_code(self) -> None:
        """What the trainer does after the decorator returned: another resilient function, or the end."""
        self.functions -= 1
        self.done += 1
        if not self.alive:
            return
        if self.functions > 0 and not self.agent.world.over:
            self.place = Place.GATE
            self.say(Ready(port=9000 + self.life))
        else:
            self.die(0)

    # ---- breaking ---------------------------------------------------------------------------------------------

    def raise_error(self, error: str = "ValueError", *, peer_error: bool = False) -> None:
        """The function raises, and the process comes to the gate."""
        if self.place is not Place.INSIDE or self._left is not None or self.hang is not None:
            return
        self.walk()
        index = self._left = self.round
        fault = Fault(
            self.slot, self.life, index, FaultKind.EXCEPTION, f"{error}: boom", error=error, place="train.py:1",
            step=self.step, peer_error=peer_error,
        )  # fmt: skip
        self.say(Raised(fault))
        self.clock.after(self.slow_s, lambda: self._unwound(index, fault))
        self.agent.world.broken(self)

    def leave(self, code: int) -> None:
        """sys.exit in the function."""
        if self.place is not Place.INSIDE or self._left is not None or self.hang is not None:
            return
        self.walk()
        fault = Fault(
            self.slot, self.life, self.round, FaultKind.EXIT, f"SystemExit: {code}", code=code, error="SystemExit",
            step=self.step,
        )  # fmt: skip
        self._left = self.round
        self.say(Leaving(code, fault))
        self.clock.after(0.01, lambda: self.die(code))

    def hang_up(self, kind: Hang) -> None:
        if self.place is Place.INSIDE and self._left is None and self.hang is None:
            self.walk()
            self.hang, self.hung_at, self.sick = kind, self.clock.now, True

    def die(self, code: int) -> None:
        """The process ends now; the kernel tells a little later."""
        if not self.alive:
            return
        self.walk()
        was_inside = self.place is Place.INSIDE
        self.place = Place.DEAD
        self.clock.at(
            max(self._channel_free, self.clock.now) + self.clock.chance.choice((0.001, 0.002, 0.3)),
            lambda: self.agent.rank_died(self, code),
        )
        if was_inside:
            self.agent.world.broken(self)
