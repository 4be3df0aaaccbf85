"""A desk whose ranks save: plays the writers and the depots of its agents by hand."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from perdure.controller.core.events import Saved, Stocked
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.checkpoints import DepotOrders, Fact, Resume, SaveId, Tier, What
from perdure.protocol.messages import Phase
from perdure.protocol.names import AgentName
from perdure.protocol.settings import Settings

from .desk import RANK, Desk

LOCAL, DURABLE = Tier.LOCAL, Tier.DURABLE
BOTH = msgspec.structs.replace(RANK, save="/save", non_persistent_local_ckpt_dir="/local")


class Bank(Desk):
    """Steps are saved in the present round, unless another one is named. stock: what the agents have found."""

    def __init__(
        self, layout: tuple[int, ...] = (2, 2), settings: Settings = BOTH, *, per_group: int = 0, per_node: int = 1
    ) -> None:
        super().__init__(layout, settings, per_group=per_group, per_node=per_node)
        self.stock: dict[str, list[Fact]] = {}

    def open(self) -> Bank:
        """All agents attach, take stock, and all ranks enter round 0."""
        self.attach()
        for agent in self.nodes:
            self.take_stock(agent)
        self.gate(*self.states)
        assert self.phase is JobPhase.RUNNING, self.phase
        self.enter(*self.seats)
        return self

    def take_stock(self, agent: str) -> None:
        self.do(Stocked(AgentName(agent), f"tcp://{agent}", tuple(self.stock.get(agent, ()))))

    # ---- facts ------------------------------------------------------------------------------------------------

    def save(self, step: int, round: int | None = None) -> SaveId:
        return SaveId(step, self.job.epoch, self.index if round is None else round)

    def fact(self, save: SaveId, what: What, tier: Tier, rank: int = -1, node: str = "", **rest: object) -> Fact:
        size = self.job.round.size if self.job.round else 4
        fact = Fact(save, what, tier, rank, node, size, 1000, f"{save}{rank}".encode(), 0.5)
        return msgspec.structs.replace(fact, **rest)

    def say(self, agent: str, *facts: Fact) -> None:
        self.do(Saved(AgentName(agent), facts))

    def written(self, step: int, tier: Tier, ranks: Iterable[int] | None = None, round: int | None = None) -> SaveId:
        """Ranks write their shards, each where it sits."""
        assert self.job.round is not None
        save = self.save(step, round)
        for rank in range(self.job.round.size) if ranks is None else ranks:
            agent = self.seats[rank].split("/")[0]
            node = self.nodes[agent] if tier is LOCAL else ""
            self.say(agent, self.fact(save, What.WRITTEN, tier, rank, node))
        return save

    def published(self, step: int, agent: str = "n0", round: int | None = None) -> SaveId:
        """All ranks write to the durable tier, and the depot that is told to publishes."""
        save = self.written(step, DURABLE, round=round)
        assert [order.save for order in self.orders(agent).publish] == [save]
        self.say(agent, self.fact(save, What.PUBLISHED, DURABLE))
        return save

    def found(self, step: int, epoch: int = 1, **rest: object) -> Fact:
        """For `stock`: a published save of an earlier job."""
        return msgspec.structs.replace(
            Fact(SaveId(step, epoch, 3), What.PUBLISHED, DURABLE, world_size=2, nbytes=2000), **rest
        )

    def bad(self, save: SaveId, tier: Tier, rank: int = -1, node: str = "") -> None:
        self.say("n0", self.fact(save, What.BAD, tier, rank, node, why="a flipped bit"))

    # ---- rounds -----------------------------------------------------------------------------------------------

    def again(self, slot: str = "n1/0", error: str = "", **fault: object) -> None:
        """A rank fails, each time in another way unless it is said how, and the next round runs."""
        error = error or f"Error{self.index}"
        self.fault(slot, error=error, **fault)
        self.settle()

    def restart(self, slot: str = "n1/0") -> None:
        """Another round, because a rank failed."""
        self.again(slot)

    # ---- what came of it --------------------------------------------------------------------------------------

    def orders(self, agent: str) -> DepotOrders:
        return self.order(agent).depot

    def pruned(self, agent: str, tier: Tier) -> list[int]:
        """Steps that an agent's depot is to delete from a tier."""
        return [order.save.step for order in self.orders(agent).prune if order.tier is tier]

    def resume(self, agent: str = "n0") -> Resume | None:
        """What the agent's ranks were told to resume from."""
        order = self.order(agent)
        assert order.phase is Phase.RUN
        return order.resume

    @property
    def resumed(self) -> tuple[int, str] | None:
        """The step, and the tier that is preferred."""
        resume = self.resume()
        return None if resume is None else (resume.step, "local" if resume.local else "durable")
