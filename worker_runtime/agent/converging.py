"""One slot against the directive: what must be done so that its process does what it should. Pure.

What is done once is remembered in the slot, so this may be asked after every event.
"""

from ...protocol.messages import Directive, Phase, Seat, Stage
from ...protocol.rank_messages import Drop, Enter, Finish, Hold, Interrupt, StopAt
from .actions import Action, Say, Tell
from .local_slot import LocalSlot


def converge(local: LocalSlot, order: Directive, job: str) -> list[Action]:
    """Bring the living process in `local` nearer to what `order` says."""
    actions: list[Action] = []
    for kill in order.kill:
        if kill.slot == local.slot and kill.life == local.life:
            actions += local.kill(kill.why)
    if order.phase is Phase.END:
        return [*actions, *_finish(local, order)]
    if _is_through(local, order):
        return [*actions, *_let_through(local)]
    match order.phase:
        case Phase.RUN:
            actions += _leave_round(local, order.round - 1, "the round is over and this rank has no seat in the next")
            actions += _take_seat(local, order, job)
            actions += _stop_round(local, order)
            actions += _give_up_saves(local, order)
        case Phase.ABORT:
            actions += _leave_round(local, order.round, order.cause)
            actions += _skip_round(local, order.round)
        case Phase.RELEASE:
            actions += _leave_round(local, order.round - 1, "the job's round is complete")
        case Phase.HOLD:
            pass
    return actions


def _is_through(local: LocalSlot, order: Directive) -> bool:
    """Whether its process is done with a function: it returned in the completed round, or the job is further."""
    if local.state.functions >= order.completed:
        return False
    if local.stage is Stage.RETURNED:
        return order.phase is Phase.RELEASE and local.state.round == order.round
    return local.stage is Stage.GATE and local.entering is None


def _let_through(local: LocalSlot) -> list[Action]:
    local.look_at = None
    local.change(stage=Stage.OUTSIDE, functions=local.state.functions + 1)
    return [Say(local.slot, local.life, Finish(0, "complete")), Tell((local.state,))]


def _leave_round(local: LocalSlot, last: int, cause: str) -> list[Action]:
    """Bring a process that is in, or on its way into, a round up to `last` back to the gate."""
    current = local.entering
    if current is None and local.stage in (Stage.RUNNING, Stage.RETURNED):
        current = local.state.round
    if current is None or current > last or local.interrupted >= current:
        return []
    local.interrupted = current
    return [Say(local.slot, local.life, Interrupt(current, cause))]


def _skip_round(local: LocalSlot, round: int) -> list[Action]:
    """A process at the gate will never enter a round that is over; the controller waits for that word."""
    if local.stage is not Stage.GATE or local.entering is not None or local.state.round >= round:
        return []
    local.change(round=round)
    return [Tell((local.state,))]


def _take_seat(local: LocalSlot, order: Directive, job: str) -> list[Action]:
    seat = next((s for s in order.seats if s.slot == local.slot and s.life == local.life), None)
    if seat is None or local.stage is not Stage.GATE or local.entering is not None or local.state.round >= order.round:
        return []
    local.entering = order.round
    return [Say(local.slot, local.life, _enter(local, seat, order, job))]


def _stop_round(local: LocalSlot, order: Directive) -> list[Action]:
    """The round is to end after a step on which all ranks agree: first each says how far it is."""
    if not _runs(local, order):
        return []
    actions: list[Action] = []
    if order.hold and local.held != order.round:
        local.held = order.round
        actions.append(Say(local.slot, local.life, Hold(order.round)))
    if order.stop_step >= 0 and local.stopped != order.round:
        local.stopped = order.round
        actions.append(Say(local.slot, local.life, StopAt(order.round, order.stop_step)))
    return actions


def _give_up_saves(local: LocalSlot, order: Directive) -> list[Action]:
    if order.vain == local.vain or not _runs(local, order):
        return []
    news = tuple(save for save in order.vain if save not in local.vain)
    local.vain = order.vain
    return [Say(local.slot, local.life, Drop(news))] if news else []


def _runs(local: LocalSlot, order: Directive) -> bool:
    return local.stage in (Stage.RUNNING, Stage.RETURNED) and local.state.round == order.round


def _enter(local: LocalSlot, seat: Seat, order: Directive, job: str) -> Enter:
    return Enter(
        round=order.round,
        rank=seat.rank,
        world_size=order.world_size,
        local_rank=local.state.index,
        local_world_size=order.local_world_size,
        master_addr=order.master_addr,
        master_port=order.master_port,
        job=job,
        epoch=order.epoch,
        resume=order.resume,
    )


def _finish(local: LocalSlot, order: Directive) -> list[Action]:
    if local.finish_told or not local.state.pid:
        return []  # a process that is still to be started is told when it is there
    local.finish_told = True
    local.look_at = None
    return [Say(local.slot, local.life, Finish(order.code, order.cause))]
