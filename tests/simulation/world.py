"""A whole job in one heap: agents, their ranks, the network, the controller; and what chance or a test does to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from perdure.controller.core.rounds import JobPhase
from perdure.protocol.names import AgentName
from perdure.protocol.settings import Settings

from .agents import SimAgent
from .clockwork import Clockwork
from .controllers import SimController
from .invariants import check_entered, check_stopped
from .network import Weather
from .ranks import Place, SimRank
from .storage import Storage

SETTINGS = Settings(
    soft_timeout=2.0,
    hard_timeout=4.0,
    heartbeat_interval=1.0,
    heartbeat_timeout=5.0,
    barrier_timeout=20.0,
    completion_timeout=10.0,
    forming_timeout=30.0,
    startup_timeout=20.0,
    controller_timeout=120.0,
    termination_grace_time=0.5,
    last_call_wait=0.5,
)
"""Short, in the proportions of the defaults."""


class World:
    """layout: slots of each agent; agents n0, n1, ... each on a node of its own, or `per_node` of them on one."""

    def __init__(
        self,
        seed: int,
        layout: Sequence[int],
        settings: Settings = SETTINGS,
        *,
        per_node: int = 1,
        functions: int = 1,
        function_s: float = 10.0,
        tracing: bool = False,
    ) -> None:
        self.clock = Clockwork(seed, tracing=tracing)
        self.settings = settings
        self.expected = len(layout)
        self.functions = functions
        self.weather = Weather()
        self.crash_chance = 0.0
        self.early_trouble = 0.0
        """How often something goes wrong in the very moments in which a round begins."""
        self.trouble: Callable[[], None] = lambda: None
        self.furthest_step = 0
        self.last_round = -1
        self.rank_faults = 0
        self.stops: dict[int, int] = {}
        """round -> the step after which its ranks left because the job was to stop."""
        self.storage = Storage(self, seed) if settings.save is not None else None
        self.agents: list[SimAgent] = []
        self._function_s = function_s
        self._processes = 0
        self.controller = SimController(self)
        for number, slots in enumerate(layout):
            self.add_agent(AgentName(f"n{number}"), f"host{number // per_node}", slots)
        self.start_controller()

    # ---- what others ask --------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.controller.job.phase in (JobPhase.STOPPING, JobPhase.ENDED)

    def function_s(self, index: int) -> float:
        return self._function_s + 0.01 * (index % 7) + self.clock.chance.uniform(0.0, 0.1)

    def round_began(self) -> None:
        if self.early_trouble and self.clock.chance.random() < self.early_trouble:
            self.clock.after(self.clock.chance.uniform(0.0, 0.01), self.trouble)

    def entered(self, rank: SimRank) -> None:
        self.clock.say(rank, f"runs round {rank.round} as rank {rank.rank}")
        check_entered(self, rank)

    def stopped(self, rank: SimRank, passed: int | None) -> None:
        self.clock.say(rank, f"leaves round {rank.round} after step {rank.step}")
        check_stopped(self, rank, passed)

    def broken(self, rank: SimRank) -> None:
        """A rank left its round in the middle: some of its peers see a broken connection."""
        for other in self.ranks():
            beside = other is not rank and other.place is Place.INSIDE and other.round == rank.round
            if beside and self.clock.chance.random() < 0.5:
                self.clock.after(self.clock.chance.uniform(0.001, 0.05), peer_error(other, rank.round))

    def ranks(self) -> list[SimRank]:
        return [rank for agent in self.agents if agent.alive for rank in agent.ranks.values() if rank.alive]

    def living(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.alive]

    # ---- what happens to it -----------------------------------------------------------------------------------

    def add_agent(self, name: AgentName, node: str, slots: int) -> SimAgent:
        self._processes += 1
        agent = SimAgent(self, name, node, slots, self._processes)
        self.agents.append(agent)
        return agent

    def start_controller(self) -> None:
        if not self.controller.up and self.controller.finished is None:
            self.controller.start()

    def crash_controller(self, back_after_s: float) -> None:
        if self.controller.up:
            self.controller.crash()
            self.clock.after(back_after_s, self.start_controller)

    def cut(self, agent: SimAgent) -> None:
        """The connection breaks and comes back."""
        connection = agent.connection
        if connection is None:
            return
        self.clock.say("network", f"cuts {agent}")
        connection.open = False
        self.clock.after(self.clock.chance.uniform(0.001, 0.2), lambda: self.controller.broke(agent, connection))
        agent.disconnect()

    def part(self, agent: SimAgent, seconds: float) -> None:
        """Nothing gets through for a while; either end finds out by itself."""
        self.clock.say("network", f"parts {agent} for {seconds:.1f} s")
        agent.parted = True
        connection = agent.connection
        limit = self.settings.heartbeat_timeout
        if connection is not None:
            connection.parted = True
            # Frames are resent by TCP if it heals soon; ours are lost, which is the harder case.
            self.clock.after(limit * 1.2, lambda: agent.disconnect() if agent.connection is connection else None)
            self.clock.after(limit * 1.25, lambda: self.controller.broke(agent, connection))
        self.clock.after(seconds, lambda: self._heal(agent))

    def _heal(self, agent: SimAgent) -> None:
        agent.parted = False
        if agent.connection is not None:
            agent.connection.parted = False

    def kill_agent(self, agent: SimAgent, replaced_after_s: float | None) -> None:
        """The agent dies, its guard kills its ranks; a relaunch brings a new process of the same name."""
        self.clock.say("fault", f"{agent} dies")
        connection, slots = agent.connection, len(agent.ranks)
        agent.die()
        if connection is not None:
            self.clock.after(0.002, lambda: self.controller.broke(agent, connection))
        if replaced_after_s is not None:
            self.clock.after(replaced_after_s, lambda: None if self.over else relaunch(self, agent, slots))

    # ---- running ----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.step(until):
            pass

    def calm(self) -> None:
        """No more faults from here on."""
        self.weather.lost = self.weather.doubled = self.weather.late = 0.0
        self.crash_chance = self.early_trouble = 0.0

    def run_to_the_end(self, limit_s: float) -> None:
        """Liveness: once faults have stopped, the job ends in bounded time, and nothing is left of it."""
        self.calm()
        deadline = self.clock.now + limit_s
        while self.clock.now < deadline and not (self.controller.finished and not self.living()):
            if not self.clock.step(deadline):
                break
        job = self.controller.job
        assert self.controller.finished is not None, (
            f"{limit_s:g} s after the last fault the job is {job.phase.value}, "
            f"round {job.round.index if job.round else None}, timers {job.timers}, "
            f"slots {list(job.roster.slots())}"
        )
        assert self.controller.finished.reason
        left = self.living()
        assert not left, (
            f"still there: {left} with {[a.ranks for a in left]}, told {[a.machine.directive for a in left]}"
        )

    def script(self) -> str:
        return "\n".join(self.clock.trace)


def peer_error(rank: SimRank, index: int) -> Callable[[], None]:
    def see() -> None:
        if rank.round == index:
            rank.raise_error("DistBackendError", peer_error=True)

    return see


def relaunch(world: World, former: SimAgent, slots: int) -> None:
    world.clock.say("fault", f"{former} is started again")
    if world.storage is not None:
        world.storage.relaunched(former)
    world.add_agent(former.name, former.node, slots)


def settings_with(**changes: object) -> Settings:
    return msgspec.structs.replace(SETTINGS, **changes)
