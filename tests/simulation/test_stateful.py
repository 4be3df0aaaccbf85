"""Hypothesis plays fate: it chooses what goes wrong and when, and shrinks what breaks the job to the fewest steps."""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .chaos import END_WITHIN_S, draw_checkpoints, misfortune
from .network import Weather
from .ranks import Hang, SimRank
from .world import World, settings_with

numbers = st.integers(0, 100)
"""Picks one of whatever is there."""


class Fate(RuleBasedStateMachine):
    """One job. After every rule time passes; at the end faults stop, and the job must come to its end."""

    world: World

    @initialize(
        seed=st.integers(0, 10_000),
        layout=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        per_node=st.sampled_from((1, 2)),
        granularity=st.sampled_from(("rank", "node")),
        respawn=st.booleans(),
        spares=st.integers(0, 2),
        budget=st.sampled_from((None, None, 2, 5)),
        functions=st.sampled_from((1, 2)),
        grace_s=st.sampled_from((0.5, 4.0, 15.0)),
        bad_weather=st.booleans(),
    )
    def begin(
        self,
        seed: int,
        layout: list[int],
        per_node: int,
        granularity: str,
        respawn: bool,
        spares: int,
        budget: int | None,
        functions: int,
        grace_s: float,
        bad_weather: bool,
    ) -> None:
        active = sum(layout) - spares if 0 < spares < sum(layout) else None
        knobs = settings_with(
            granularity=granularity,
            respawn=respawn,
            active_world_size=active,
            max_rank_faults=budget,
            termination_grace_time=grace_s,
            **draw_checkpoints(seed),
        )
        self.world = World(seed, layout, knobs, per_node=per_node, functions=functions)
        if self.world.storage is not None:
            self.world.storage.trouble()
        if bad_weather:
            self.world.weather = Weather(lost=0.05, doubled=0.05, late=0.05)

    def alive(self) -> bool:
        return bool(self.world.ranks()) and not self.world.over

    @rule(seconds=st.sampled_from((0.0, 0.001, 0.01, 0.3, 1.0, 2.5, 6.0, 12.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @precondition(alive)
    @rule(number=numbers, error=st.sampled_from(("ValueError", "OSError", "TypeError")))
    def a_rank_raises(self, number: int, error: str) -> None:
        self._rank(number).raise_error(error)

    @precondition(alive)
    @rule(number=numbers)
    def a_rank_is_killed(self, number: int) -> None:
        self._rank(number).die(-9)

    @precondition(alive)
    @rule(number=numbers, code=st.sampled_from((0, 1, 3, 17)))
    def a_rank_exits(self, number: int, code: int) -> None:
        self._rank(number).leave(code)

    @precondition(alive)
    @rule(number=numbers, kind=st.sampled_from(Hang))
    def a_rank_hangs(self, number: int, kind: Hang) -> None:
        self._rank(number).hang_up(kind)

    @precondition(alive)
    @rule(number=numbers, seconds=st.sampled_from((0.5, 5.0, 30.0)))
    def a_rank_gets_slow(self, number: int, seconds: float) -> None:
        rank = self._rank(number)
        rank.slow_s = seconds
        rank.sick = rank.sick or seconds > self.world.settings.barrier_timeout

    @precondition(alive)
    @rule(number=numbers)
    def a_connection_breaks(self, number: int) -> None:
        agents = self.world.living()
        self.world.cut(agents[number % len(agents)])

    @precondition(alive)
    @rule(number=numbers, seconds=st.sampled_from((0.5, 4.0, 9.0, 30.0)))
    def the_network_parts(self, number: int, seconds: float) -> None:
        agents = self.world.living()
        self.world.part(agents[number % len(agents)], seconds)

    @precondition(alive)
    @rule(seconds=st.sampled_from((4.0, 12.0)))
    def the_controller_is_cut_off(self, seconds: float) -> None:
        for agent in self.world.living():
            self.world.part(agent, seconds)

    @precondition(alive)
    @rule(number=numbers, back_after_s=st.sampled_from((None, 0.2, 10.0)))
    def an_agent_dies(self, number: int, back_after_s: float | None) -> None:
        agents = self.world.living()
        self.world.kill_agent(agents[number % len(agents)], back_after_s)

    @precondition(alive)
    @rule(back_after_s=st.sampled_from((0.1, 3.0, 20.0)))
    def the_controller_crashes(self, back_after_s: float) -> None:
        self.world.crash_controller(back_after_s)

    @precondition(alive)
    @rule()
    def the_controller_crashes_between_journal_and_deeds(self) -> None:
        self.world.crash_chance = 1.0
        self.world.run(1.0)
        self.world.crash_chance = 0.0

    @precondition(alive)
    @rule(number=numbers)
    def an_agent_is_told_to_stop(self, number: int) -> None:
        agents = self.world.living()
        agent = agents[number % len(agents)]
        agent.stop(143, f"SIGTERM to {agent.name}")

    @precondition(alive)
    @rule()
    def something_happens(self) -> None:
        misfortune(self.world)

    def _rank(self, number: int) -> SimRank:
        ranks = self.world.ranks()
        return ranks[number % len(ranks)]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_the_end(END_WITHIN_S)


TestFate = Fate.TestCase
TestFate.settings = settings(
    max_examples=int(os.environ.get("PERDURE_SIMULATION_EXAMPLES", "150")),
    stateful_step_count=25,
    deadline=None,
    database=None,
    print_blob=True,
    derandomize="PERDURE_SIMULATION_EXAMPLES" not in os.environ,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
