"""What must hold after every event, whatever happened. The simulation knows the truth; the supervisors only guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.controller.core.rounds import JobPhase
from perdure.protocol.messages import Phase

if TYPE_CHECKING:
    from .agents import SimAgent
    from .ranks import SimRank
    from .world import World

WAITING = frozenset({JobPhase.FORMING, JobPhase.PLANNING, JobPhase.COMPLETING, JobPhase.ABORTING, JobPhase.STOPPING})
"""Phases that end by themselves or by a timer."""


def check_job(world: World) -> None:
    """Called by the controller after every event."""
    job = world.controller.job
    if job.phase in WAITING:
        assert job.deadline() is not None, f"{job.phase.value} waits without a timer"
    round = job.round
    if job.phase is JobPhase.RUNNING:
        assert round is not None
        assert not round.to_enter or job.deadline() is not None, "waits for ranks to enter, without a timer"
    if job.phase is JobPhase.ENDED:
        assert job.reason, "ended without a reason"
    if round is not None and round.index != world.last_round:
        check_plan(world)
    check_budget(world)
    if world.storage is not None:
        world.storage.check_orders()


def check_plan(world: World) -> None:
    """A new round: ranks are 0..n-1, nobody sits twice, and it is the next one."""
    round = world.controller.job.round
    assert round is not None
    assert sorted(round.seats) == list(range(round.size))
    assert len({(record.agent.process, record.slot, round.lives[rank]) for rank, record in round.seats.items()}) == (
        round.size
    ), "one process in two seats"
    assert world.controller.job.stopping.request is None, f"round {round.index} of a job that is to stop"
    assert round.index == world.last_round + 1, f"round {round.index} after round {world.last_round}"
    world.last_round = round.index
    world.round_began()
    if world.storage is not None:
        world.storage.check_resume()
    settings = world.settings
    assert settings.min_world_size <= round.size, f"a world of {round.size}"
    assert round.size % settings.world_size_multiple_of == 0, f"a world of {round.size}"
    assert round.size <= (settings.active_world_size or round.size)


def check_budget(world: World) -> None:
    """Counts never go down, whoever leads, and a job does not go on beyond them."""
    job = world.controller.job
    count = job.budget.rank_faults
    assert count >= world.rank_faults, f"{count} rank faults after {world.rank_faults}"
    world.rank_faults = count
    limit = world.settings.max_rank_faults
    if limit is not None and job.phase is JobPhase.RUNNING:
        assert count <= limit, f"runs on with {count} rank faults of at most {limit}"
    rounds = world.settings.max_iterations
    if rounds is not None and job.round is not None:
        assert job.round.index < rounds, f"round {job.round.index} of at most {rounds}"


def check_entered(world: World, entering: SimRank) -> None:
    """A process runs the function: in the present round, as everybody else, but for who is out of reach."""
    job = world.controller.job
    if stands_by_the_job(world, entering.agent, entering):
        assert job.round is not None
        assert entering.round == job.round.index, f"{entering} runs round {entering.round}, the job {job.round.index}"
        assert entering.done == job.completed, f"{entering} runs function {entering.done}, the job {job.completed}"
    for agent in world.agents:
        for rank in agent.ranks.values() if agent.alive else ():
            if rank.place.value == "inside" and rank.round < entering.round:
                assert not stands_by_the_job(world, agent, rank), (
                    f"{entering} runs round {entering.round} while {rank} still runs round {rank.round}"
                )


def check_stopped(world: World, leaving: SimRank, passed: int | None) -> None:
    """All ranks that leave because the job is to stop leave after the same step, which none has passed before."""
    step = world.stops.setdefault(leaving.round, leaving.step)
    assert leaving.step == step, f"{leaving} leaves after step {leaving.step}, another one after {step}"
    assert passed is not None, f"{leaving} left, and was never held"
    assert passed < step, f"{leaving} had passed step {passed} and leaves after step {step}"


def stands_by_the_job(world: World, agent: SimAgent, rank: SimRank) -> bool:
    """Whether the controller counts on this process: it has never given up its agent, nor condemned it."""
    record = world.controller.job.roster.agents.get(agent.name)
    if record is None or record.process != agent.process or record.lost or was_lost(world, agent):
        return False
    slot = record.slots.get(rank.slot)
    return slot is not None and slot.alive and slot.state.life == rank.life


def was_lost(world: World, agent: SimAgent) -> bool:
    """Its agent was given up at some time, so it may still have to hear of what came after."""
    return any(
        said.event in ("agent_lost", "node_lost") and f"agent {agent.name} " in said.text
        for said in world.controller.log
    )


def may_be_killed(world: World, agent: SimAgent, rank: SimRank, why: str) -> None:
    """Nobody healthy is killed before the job is over."""
    over = agent.machine.directive.phase is Phase.END
    assert over or rank.sick, f"{rank} is healthy ({rank.place.value}) and is killed: {why}"
