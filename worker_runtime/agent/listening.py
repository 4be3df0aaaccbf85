"""One slot and what its process says: what becomes of the slot, and what the controller is told. Pure."""

import msgspec

from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import Stage
from ...protocol.rank_messages import Entered, Leaving, Note, Passed, Raised, Ready, Returned
from .actions import Action, Tell, Write
from .local_slot import LocalSlot, slow_phases

FromLiving = Ready | Entered | Raised | Returned | Passed | Leaving | Note
"""What only a process that still lives can say; what became of checkpoints is true in any case."""


def hear(local: LocalSlot, message: FromLiving, step: int, judge_at: float) -> list[Action]:
    """A message of the living process in `local`. step: what its page says. judge_at: when to judge it if it has just
    entered.
    """
    match message:
        case Ready():
            return _ready(local, message, step)
        case Entered():
            return _entered(local, message, judge_at)
        case Raised() | Leaving():
            return _failed(local, message.fault, step)
        case Returned():
            local.look_at = None
            local.change(stage=Stage.RETURNED, round=message.round, step=step)
            return [Tell((local.state,))]
        case Passed():
            return _passed(local, message)
        case Note():
            return [Write("rank", message.text, message.level, local.slot)]


def _ready(local: LocalSlot, message: Ready, step: int) -> list[Action]:
    if local.entering is not None and message.round < local.entering:
        return []  # sent before it was told to enter
    actions: list[Action] = []
    local.entering = None
    local.look_at = None
    fault = local.state.fault
    if fault is None or (message.fault is not None and message.fault.kind is FaultKind.HEALTH_CHECK):
        fault = message.fault  # why it left the round has been told; that it is unfit is what counts from here on
    elif fault.kind is FaultKind.SOFT_HANG:
        where = fault.place or message.where
        fault = msgspec.structs.replace(fault, place=where, in_collective=message.in_collective)
    if slow := slow_phases(message.timings):
        actions.append(Write("slow", f"came back to the gate slowly: {slow}", "warning", local.slot))
    if message.swallowed:
        text = f"the interrupt was caught and ignored at {', '.join(message.swallowed)}"
        actions.append(Write("swallowed", text, "warning", local.slot))
    # A second resilient function starts counting at NO_ROUND again; the job's rounds only go up.
    round = max(local.state.round, message.round)
    local.change(stage=Stage.GATE, round=round, port=message.port, step=max(step, local.state.step), fault=fault)
    return [*actions, Tell((local.state,))]


def _entered(local: LocalSlot, message: Entered, judge_at: float) -> list[Action]:
    if local.entering != message.round:
        return []
    local.entering = None
    local.look_at = judge_at
    local.begin_round()
    local.change(stage=Stage.RUNNING, round=message.round)
    return [Tell((local.state,))]


def _passed(local: LocalSlot, message: Passed) -> list[Action]:
    if message.round != local.state.round or local.state.passed is not None:
        return []
    local.change(passed=message.step)
    return [Tell((local.state,))]


def _failed(local: LocalSlot, fault: Fault | None, step: int) -> list[Action]:
    """A rank says that it failed, or that it leaves; either way before the deed is done."""
    if fault is None or local.state.fault is not None:
        return []
    local.change(fault=fault, step=max(step, local.state.step))
    return [Tell((local.state,))]
