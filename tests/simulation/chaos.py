"""A world and its misfortunes, drawn from one seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .agents import SimAgent
from .network import Weather
from .ranks import Hang, SimRank
from .saving import SAVE_EVERY
from .world import World, settings_with

END_WITHIN_S = 400.0


def draw_world(seed: int, *, tracing: bool = False) -> World:
    """A small job: one to four nodes, with or without reserves, budgets, respawn, a second function."""
    world_seed = seed * 7919 + 1
    chance = Random(world_seed)
    per_node = chance.choice((1, 1, 2))
    layout = [chance.randint(1, 3)] * (chance.randint(1, 3) * per_node)
    total = sum(layout)
    settings = settings_with(
        granularity=chance.choice(("node", "rank")),
        active_world_size=chance.choice((None, None, max(1, total - layout[0]))),
        respawn=chance.random() < 0.7,
        max_iterations=chance.choice((None, None, None, 3, 8)),
        max_rank_faults=chance.choice((None, None, None, 4)),
        termination_grace_time=chance.choice((0.5, 0.5, 3.0, 12.0)),
        **draw_checkpoints(world_seed),
    )
    functions = chance.choice((1, 1, 2))
    world = World(
        seed,
        layout,
        settings,
        per_node=per_node,
        functions=functions,
        function_s=chance.choice((0.001, chance.uniform(2.0, 15.0), chance.uniform(2.0, 15.0))),
        tracing=tracing,
    )
    if world.storage is not None:
        world.storage.trouble()
    return world


def draw_checkpoints(seed: int) -> dict[str, object]:
    """Every second job has checkpoints, on both tiers."""
    chance = Random(-seed)
    if chance.random() < 0.5:
        return {}
    return {
        "save": "/save",
        "save_interval": 2 * SAVE_EVERY,
        "most_recent_k": chance.choice((None, 1, 2)),
        "non_persistent_local_ckpt_dir": "/local",
        "non_persistent_save_interval": SAVE_EVERY,
        "replication": chance.choice((0, 0, 1, 2)),
        "save_timeout": 20.0,
    }


def misfortune(world: World) -> None:
    """One thing goes wrong."""
    chance = world.clock.chance
    ranks, agents = world.ranks(), world.living()
    if not ranks or not agents or world.over:
        return
    rank, agent = chance.choice(ranks), chance.choice(agents)
    deeds, weights = zip(*MISFORTUNES, strict=True)
    chance.choices(deeds, weights)[0](world, rank, agent)


def mass_error(world: World) -> None:
    for rank in world.ranks():
        rank.raise_error("OSError")


def hang(world: World, rank: SimRank) -> None:
    kind = world.clock.chance.choice(list(Hang))
    world.clock.say("fault", f"{rank} hangs: {kind.value}")
    rank.hang_up(kind)


def sigkill(world: World, rank: SimRank) -> None:
    world.clock.say("fault", f"SIGKILL {rank}")
    rank.die(-9)


def leave(world: World, rank: SimRank) -> None:
    chance = world.clock.chance
    rank.leave(chance.choice((1, 3, 0, 75)) if chance.random() < 0.3 else 1)


def slow_down(world: World, rank: SimRank) -> None:
    rank.slow_s = world.clock.chance.choice((0.5, 5.0, 30.0))
    rank.sick = rank.sick or rank.slow_s > world.settings.barrier_timeout
    world.clock.say("fault", f"{rank} takes {rank.slow_s} s to unwind")


def stop(agent: SimAgent) -> None:
    """SIGTERM."""
    agent.stop(143, f"SIGTERM to {agent.name}")


MISFORTUNES: list[tuple[Callable[[World, SimRank, SimAgent], None], float]] = [
    (lambda world, rank, agent: rank.raise_error(world.clock.chance.choice(("ValueError", "RuntimeError"))), 4),
    (lambda world, rank, agent: sigkill(world, rank), 4),
    (lambda world, rank, agent: leave(world, rank), 2),
    (lambda world, rank, agent: mass_error(world), 1),
    (lambda world, rank, agent: hang(world, rank), 4),
    (lambda world, rank, agent: slow_down(world, rank), 2),
    (lambda world, rank, agent: world.cut(agent), 3),
    (lambda world, rank, agent: world.part(agent, world.clock.chance.uniform(0.5, 15.0)), 2),
    (lambda world, rank, agent: world.kill_agent(agent, world.clock.chance.choice((None, 0.2, 1.0, 8.0))), 1),
    (lambda world, rank, agent: world.crash_controller(world.clock.chance.uniform(0.1, 8.0)), 3),
    (lambda world, rank, agent: stop(agent), 0.5),
]
"""What may go wrong, and how often compared with the others."""


def run_seed(seed: int, *, tracing: bool = False) -> World:
    """The whole life of one job. Raises AssertionError if an invariant breaks."""
    world = draw_world(seed, tracing=tracing)
    chance = world.clock.chance
    try:
        if chance.random() < 0.5:
            world.weather = Weather(lost=0.03, doubled=0.03, late=0.03)
        world.crash_chance = chance.choice((0.0, 0.0, 0.003, 0.02))
        world.early_trouble = chance.choice((0.0, 0.3))
        world.trouble = lambda: misfortune(world)
        world.run(chance.uniform(0.0, 6.0))
        for _ in range(chance.randint(1, 25)):
            misfortune(world)
            world.run(chance.choice((0.0, 0.001, 0.05, 0.5, 3.0, 8.0)))
        if world.living() and chance.random() < 0.3:
            stop(chance.choice(world.living()))
        world.run(chance.choice((0.0, 60.0)))  # the end itself may fall into bad times, too
        world.run_to_the_end(END_WITHIN_S)
    except AssertionError as error:
        command = f"python -m tests.simulation.run_seed {seed}"
        raise AssertionError(f"seed {seed}: {error}\nto see the whole story: {command}\n{world.script()}") from error
    return world
