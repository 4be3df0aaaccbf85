"""Every phase against every kind of event: nothing moves where no arrow leads, and the past moves nothing."""

import copy
from collections.abc import Callable

import msgspec
import pytest

from perdure.controller.core.events import (
    Attached,
    Event,
    LinkLost,
    Opened,
    Reported,
    Saved,
    Silent,
    Stocked,
    StopAsked,
    Tick,
)
from perdure.controller.core.job import Job
from perdure.controller.core.rounds import TRANSITIONS, IllegalTransition, JobPhase
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What
from perdure.protocol.messages import SlotState, Stage
from perdure.protocol.names import AgentName, Slot

from .desk import RANK, Desk
from .test_job_ends import complete

SETTINGS = msgspec.structs.replace(RANK, respawn=True, active_world_size=3)


def desk_in(phase: JobPhase) -> Desk:
    """A job of 2 x 2 ranks, 3 of them active, brought into `phase`."""
    desk = Desk((2, 2), SETTINGS)
    if phase is JobPhase.FORMING:
        desk.attach()
        return desk
    desk.form()
    match phase:
        case JobPhase.COMPLETING:
            desk.returns("n0/0")
        case JobPhase.RELEASED:
            complete(desk)
        case JobPhase.ABORTING:
            desk.fault("n0/0")
        case JobPhase.PLANNING:
            desk.gone("n0/0")
            desk.gone("n1/1")
            desk.gate("n0/1", "n1/0")
        case JobPhase.STOPPING | JobPhase.ENDED:
            desk.stop_at_once(1, "asked")
            for slot in desk.states if phase is JobPhase.ENDED else ():
                desk.gone(slot, 1)
        case _:
            pass
    assert desk.phase is phase
    return desk


def stale_report(desk: Desk) -> Event:
    """Of a life that is long over."""
    return Reported(AgentName("n0"), (SlotState(Slot("n0/0"), 0, 0, Stage.GATE, 7, port=1),))


def facts_of_everything() -> tuple[Fact, ...]:
    """Each kind of fact, of the present round, of one before and of another job, on both tiers."""
    return tuple(
        Fact(SaveId(7, epoch, round), what, tier, rank, "host0", 3)
        for epoch in (0, 9)
        for round in (0, 1)
        for tier in Tier
        for what in What
        for rank in (-1, 0, 5)
    )


EVENTS: dict[str, Callable[[Desk], Event]] = {
    "opened": lambda desk: Opened("job", 1, desk.job.incarnation + 1, 2, SETTINGS),
    "attached again": lambda desk: Attached(desk.hello("n0")),
    "attached anew": lambda desk: Attached(desk.hello("n0", agent=AgentName("n7"), slots=())),
    "reported again": lambda desk: Reported(AgentName("n0"), desk.hello("n0").slots),
    "reported of a stranger": lambda desk: Reported(AgentName("n9"), tuple(desk.states.values())),
    "reported late": stale_report,
    "link lost": lambda desk: LinkLost(AgentName("n1")),
    "link of a stranger lost": lambda desk: LinkLost(AgentName("n9")),
    "silent": lambda desk: Silent(AgentName("n1"), 60.0),
    "a stranger silent": lambda desk: Silent(AgentName("n9"), 60.0),
    "stop asked": lambda desk: StopAsked(143, "SIGTERM"),
    "saved": lambda desk: Saved(AgentName("n0"), facts_of_everything()),
    "saved by a stranger": lambda desk: Saved(AgentName("n9"), facts_of_everything()),
    "stocked": lambda desk: Stocked(AgentName("n1"), "tcp://n1", facts_of_everything()),
    "tick": lambda desk: Tick(),
}
WITHOUT_EFFECT = (
    "attached again",
    "reported again",
    "reported of a stranger",
    "reported late",
    "link of a stranger lost",
    "a stranger silent",
    "saved",
    "saved by a stranger",
    "stocked",
    "tick",
)


def sight(job: Job) -> tuple[object, ...]:
    """What counts of a job's state."""
    round = job.round
    return (
        job.phase, job.code, job.reason, dict(job.timers), job.completed, job.budget.rank_faults, job.stopping.request,
        round and (round.index, dict(round.findings), set(round.to_enter), set(round.to_return), set(round.to_settle)),
        [(record.state, record.wanted, record.condemned) for record in job.roster.slots()],
    )  # fmt: skip


@pytest.mark.parametrize("phase", JobPhase)
@pytest.mark.parametrize("name", EVENTS)
def test_every_event_in_every_phase(phase: JobPhase, name: str) -> None:
    desk = desk_in(phase)
    before = sight(desk.job)
    desk.do(EVENTS[name](desk), 0.0)
    if name in WITHOUT_EFFECT:
        assert sight(desk.job) == before
    seen = desk.phase
    assert seen is phase or reachable(phase, seen)
    deadline = desk.job.deadline()
    assert deadline is None or deadline > desk.now


def reachable(start: JobPhase, end: JobPhase) -> bool:
    """By arrows; one event may take several."""
    seen, todo = {start}, [start]
    while todo:
        for following in TRANSITIONS[todo.pop()] - seen:
            seen.add(following)
            todo.append(following)
    return end in seen


@pytest.mark.parametrize("old", JobPhase)
@pytest.mark.parametrize("new", JobPhase)
def test_where_no_arrow_leads_nothing_moves(old: JobPhase, new: JobPhase) -> None:
    desk = desk_in(old)
    if new in TRANSITIONS[old]:
        desk.job.move(new)
        assert desk.phase is new
        return
    before = copy.copy(sight(desk.job))
    with pytest.raises(IllegalTransition, match=f"{old.value} -> {new.value}"):
        desk.job.move(new)
    assert sight(desk.job) == before


def test_every_phase_can_end() -> None:
    assert all(reachable(phase, JobPhase.ENDED) for phase in JobPhase)


@pytest.mark.parametrize("phase", JobPhase)
def test_a_journal_replays_to_the_bit_from_every_phase(phase: JobPhase) -> None:
    """The same events into another machine: the same commands and the same state."""
    desk = desk_in(phase)
    again = Job()
    assert [msgspec.msgpack.encode(again.on(event, now)) for now, event in desk.journal] == desk.answers
    assert sight(again) == sight(desk.job)
