"""What truly lies on all disks of a simulated job, the depots that work on it, and what must hold whatever happens.

It has a source of chance of its own, so that a world without checkpoints is the same as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from perdure.protocol.checkpoints import (
    NO_ORDERS,
    DepotOrders,
    Fact,
    Place,
    Prune,
    Publish,
    Replicate,
    Resume,
    SaveId,
    Tier,
    What,
    digest_of_save,
)
from perdure.protocol.messages import Saved, Stock

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import World

AnOrder = Publish | Prune | Replicate


def digest_of(save: SaveId, rank: int) -> bytes:
    return f"{save!r} {rank}".encode()


class Storage:
    """saving: unpublished saves on the durable tier. published: by step. local: node -> saves. written: all that was
    ever written on the durable tier. poisoned: whoever trains from these fails.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = Random(seed)
        self.saving: dict[SaveId, set[int]] = {}
        self.published: dict[int, SaveId] = {}
        self.sizes: dict[SaveId, int] = {}
        self.local: dict[str, dict[SaveId, set[int]]] = {}
        self.written: dict[SaveId, set[int]] = {}
        self.poisoned: set[SaveId] = set()
        self.publishes: list[SaveId] = []
        self.resumes: list[Resume | None] = []
        self.drops = 0
        """How often a rank was told to give up a save."""
        self.troubled = False
        """Whether writers and depots are slow, fail, and write nonsense."""
        self._seen_orders: set[SaveId] = set()
        self._seen_prunes: set[SaveId] = set()

    def trouble(self) -> None:
        """From here on, all that can go wrong does now and then. Maybe a job before this one has left a save."""
        self.troubled = True
        if self.chance.random() < 0.3:
            save = self.published[50] = SaveId(50, 77, 0)
            self.sizes[save] = 2
            self.written[save] = {0, 1}

    def bad_luck(self, probability: float) -> bool:
        return self.troubled and self.chance.random() < probability

    def write(self, save: SaveId, rank: int, tier: Tier, node: str, world_size: int) -> Fact:
        self.sizes[save] = world_size
        if tier is Tier.LOCAL:
            self.local.setdefault(node, {}).setdefault(save, set()).add(rank)
        else:
            self.saving.setdefault(save, set()).add(rank)
            self.written.setdefault(save, set()).add(rank)
        where = node if tier is Tier.LOCAL else ""
        return Fact(save, What.WRITTEN, tier, rank, where, world_size, 1000, digest_of(save, rank), 0.1)

    def relaunched(self, agent: SimAgent) -> None:
        """A node comes back: sometimes with empty disks."""
        alone = not any(other.alive and other.node == agent.node for other in self.world.agents)
        if alone and self.bad_luck(0.3):
            self.local.pop(agent.node, None)

    def stock_of(self, node: str) -> tuple[Fact, ...]:
        local = [
            Fact(save, What.WRITTEN, Tier.LOCAL, rank, node, self.sizes[save], 1000, digest_of(save, rank))
            for save, ranks in self.local.get(node, {}).items()
            for rank in sorted(ranks)
        ]
        durable = [Fact(s, What.PUBLISHED, Tier.DURABLE, world_size=self.sizes[s]) for s in self.published.values()]
        return (*local, *durable)

    # ---- what must hold ---------------------------------------------------------------------------------------

    def check_orders(self) -> None:
        """After every event."""
        commits = self.world.controller.job.commits
        publications = commits.orders.publications
        assert len({save.step for save in publications}) == len(publications), f"one step twice: {publications}"
        for save in publications.keys() - self._seen_orders:
            self._seen_orders.add(save)
            self._check_publish(publications[save].order)
        for save in commits.orders.durable_prunes.keys() - self._seen_prunes:
            self._seen_prunes.add(save)
            if save in self.published.values():
                left = [r for r in commits.records.values() if r.durable_is_good and r.save != save]
                assert left, f"{save} is the last good one, and to be deleted"
                assert any(r.save in self.published.values() for r in left), f"{save} is the last one"
                assert max(r.age for r in left) > commits.records[save].age, f"{save} is the newest good one"
        for save in commits.vain.listed:
            assert save not in publications, f"{save} is given up, and to be published"
            record = commits.records.get(save)
            assert record is None or not (record.local.complete or record.durable.complete), f"{record} is given up"

    def _check_publish(self, order: Publish) -> None:
        save = order.save
        job = self.world.controller.job
        assert job.round is not None
        assert (save.epoch, save.round) == (job.epoch, job.round.index), f"{save} is committed in {job.round.index}"
        assert self.written[save] == set(range(order.world_size)), f"{save} has only {self.written[save]}"
        assert order.digest == digest_of_save(digest_of(save, rank) for rank in range(order.world_size))

    def check_resume(self) -> None:
        """A round is planned: what it resumes from is there, for every rank."""
        job = self.world.controller.job
        assert job.round is not None
        choice = job.round.choice
        self.resumes.append(None if choice is None else choice.resume)
        if choice is None:
            return
        resume, reachable = choice.resume, job.depots.reachable()
        assert resume.local or resume.durable
        if resume.durable:
            assert self.published.get(resume.step) == resume.save, f"{resume} is not published"
        for node in reachable if resume.local else ():
            told = choice.for_node(node, ())
            ranks = {place.rank for place in told.places} | self._own(node, resume.save)
            assert ranks >= set(range(resume.world_size)), f"{node} is told {told}, and has {ranks}"
            for place in told.places:
                self._check_place(resume.save, place)

    def _own(self, node: str, save: SaveId) -> set[int]:
        if self._known_alive(node):
            return self.local.get(node, {}).get(save, set())
        return set(range(self.sizes[save]))

    def _check_place(self, save: SaveId, place: Place) -> None:
        there = self.local.get(place.node, {}).get(save, set())
        assert place.rank in there or not self._known_alive(place.node), f"{place} of {save} has only {there}"

    def _known_alive(self, node: str) -> bool:
        """Whether the controller's agents of the node are those that truly live there: else it cannot know."""
        agents = [a for a in self.world.controller.job.roster.agents.values() if a.node == node and a.attached]
        living = {a.process for a in self.world.living()}
        return all(agent.process in living for agent in agents)


class SimDepot:
    """One agent's depot: takes stock, and does what stands in its orders, each in its own time."""

    def __init__(self, storage: Storage, agent: SimAgent) -> None:
        self._storage = storage
        self._agent = agent
        self._orders = NO_ORDERS
        self._pending: set[AnOrder] = set()
        self._answered: set[AnOrder] = set()
        agent.clock.after(storage.chance.choice((0.05, 0.5, 3.0)) if storage.troubled else 0.05, self._take_stock)

    def _take_stock(self) -> None:
        if self._agent.alive:
            address = f"tcp://{self._agent.node}"
            self._agent.push(Stock(address, self._storage.stock_of(self._agent.node)))

    def order(self, orders: DepotOrders) -> None:
        self._orders = orders
        wanted: list[AnOrder] = [*orders.publish, *orders.prune, *orders.replicate]
        self._answered &= set(wanted)
        for order in wanted:
            if order not in self._pending and order not in self._answered:
                self._pending.add(order)
                slow_s = self._storage.chance.choice((0.002, 0.05, 1.0)) if self._storage.troubled else 0.01
                self._agent.clock.after(slow_s, self._doing(order))

    def _doing(self, order: AnOrder) -> Callable[[], None]:
        return lambda: self._do(order)

    def _do(self, order: AnOrder) -> None:
        if not self._agent.alive:
            return
        self._pending.discard(order)
        self._answered.add(order)
        match order:
            case Publish():
                fact = self._publish(order)
            case Prune():
                fact = self._prune(order)
            case Replicate():
                fact = self._replicate(order)
        self._agent.clock.say(self._agent, f"depot: {fact.what.value} {fact.save} {fact.tier.value} {fact.rank}")
        self._agent.push(Saved((fact,)))

    def _publish(self, order: Publish) -> Fact:
        storage, save = self._storage, order.save
        there = storage.published.get(save.step)
        if there is not None:
            storage.saving.pop(save, None)
        elif len(storage.saving.get(save, ())) < order.world_size or storage.bad_luck(0.15):
            return Fact(save, What.UNPUBLISHED, Tier.DURABLE, why="no luck")
        else:
            storage.saving.pop(save)
            there = storage.published[save.step] = save
            storage.publishes.append(save)
        return Fact(there, What.PUBLISHED, Tier.DURABLE, world_size=storage.sizes[there])

    def _prune(self, order: Prune) -> Fact:
        storage, save, node = self._storage, order.save, self._agent.node
        if order.tier is Tier.LOCAL:
            storage.local.get(node, {}).pop(save, None)
            return Fact(save, What.PRUNED, Tier.LOCAL, node=node)
        storage.saving.pop(save, None)
        if storage.published.get(save.step) == save:
            del storage.published[save.step]
            assert storage.published, f"{save} was the last one"
        return Fact(save, What.PRUNED, Tier.DURABLE)

    def _replicate(self, order: Replicate) -> Fact:
        storage, save, place = self._storage, order.save, order.place
        there = place.rank in storage.local.get(place.node, {}).get(save, set())
        if there and not storage.bad_luck(0.1):
            return storage.write(save, place.rank, Tier.LOCAL, self._agent.node, storage.sizes[save])
        return Fact(save, What.FAILED, Tier.LOCAL, place.rank, self._agent.node, why="it could not be fetched")
