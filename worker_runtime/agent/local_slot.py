"""What an agent knows of one of its slots, beyond what it tells the controller."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ...protocol.checkpoints import SaveId
from ...protocol.faults import Fault
from ...protocol.messages import ExitRecord, SlotState, Stage
from ...protocol.names import NO_ROUND, Slot
from .actions import Action, KillProcess

SLOW_S = 1.0


@dataclass(slots=True)
class LocalSlot:
    """entering: the round that its process was told to enter and has not reported from.
    interrupted, held, stopped: the last round that it was told to leave, to hold, and after which step to stop.
    vain: saves of its round that it was told to give up.
    killing: why we are killing it. spawned: when, on the agent's clock.
    look_at: when to judge its progress next, None while it is not judged.
    """

    state: SlotState
    entering: int | None = None
    interrupted: int = NO_ROUND
    held: int = NO_ROUND
    stopped: int = NO_ROUND
    vain: tuple[SaveId, ...] = ()
    finish_told: bool = False
    killing: str = ""
    spawned: float = 0.0
    look_at: float | None = None

    @classmethod
    def new(cls, slot: Slot, index: int, life: int, now: float) -> "LocalSlot":
        return cls(SlotState(slot, index, life, Stage.STARTING), spawned=now)

    @property
    def slot(self) -> Slot:
        return self.state.slot

    @property
    def life(self) -> int:
        return self.state.life

    @property
    def stage(self) -> Stage:
        return self.state.stage

    @property
    def alive(self) -> bool:
        return self.state.stage not in (Stage.DYING, Stage.GONE)

    def change(
        self,
        *,
        stage: Stage | None = None,
        round: int | None = None,
        port: int | None = None,
        step: int | None = None,
        pid: int | None = None,
        fault: Fault | None = None,
        exit: ExitRecord | None = None,
        functions: int | None = None,
        passed: int | None = None,
    ) -> SlotState:
        """Replace what is given and keep the rest; returns the new state."""
        state = self.state
        self.state = msgspec.structs.replace(
            state,
            stage=state.stage if stage is None else stage,
            round=state.round if round is None else round,
            port=state.port if port is None else port,
            step=state.step if step is None else step,
            pid=state.pid if pid is None else pid,
            fault=state.fault if fault is None else fault,
            exit=state.exit if exit is None else exit,
            functions=state.functions if functions is None else functions,
            passed=state.passed if passed is None else passed,
            change=state.change + 1,
        )
        return self.state

    def begin_round(self) -> None:
        """What went wrong in the last round is over."""
        change = self.state.change + 1
        self.state = msgspec.structs.replace(self.state, fault=None, port=0, passed=None, change=change)
        self.vain = ()

    def kill(self, why: str) -> list[Action]:
        """Kill its process, unless that is under way."""
        if self.killing:
            return []
        self.killing = why
        self.look_at = None
        return [KillProcess(self.slot, self.life, why)]


def slow_phases(timings: Mapping[str, float]) -> str:
    """Which phases of coming back to the gate took long enough to be worth a line; empty if none did."""
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in timings.items() if seconds >= SLOW_S)
