"""What every depot is to do, as it stands now: publish, prune, replicate. An order stands until a fact ends it.

What concerns the durable tier is one agent's: that of rank 0, or another one once that is given up. What concerns a
node's local tier is that node's, whichever of its agents is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol.checkpoints import NO_ORDERS, DepotOrders, Prune, Publish, Replicate, SaveId, Tier
from ...protocol.names import AgentName
from .depots import Depots
from .roster import AgentRecord, Roster

PUBLISHERS = 3
"""Agents that try to publish a save, one after the other."""

NOBODY = AgentName("")


@dataclass(slots=True)
class Publication:
    """agent: who is to do it now, NOBODY while nobody is there. tried: who has tried in vain."""

    order: Publish
    agent: AgentName = NOBODY
    tried: set[AgentName] = field(default_factory=set[AgentName])


class Orders:
    """All orders of a job. dirty: is told of each agent whose orders changed."""

    def __init__(self, roster: Roster, depots: Depots, dirty: Callable[[AgentRecord], None]) -> None:
        self._roster = roster
        self._depots = depots
        self._dirty = dirty
        self.publications: dict[SaveId, Publication] = {}
        self.durable_prunes: dict[SaveId, AgentName] = {}
        self.local_prunes: dict[str, dict[SaveId, None]] = {}
        self.replicas: dict[str, dict[tuple[SaveId, int], Replicate]] = {}

    def of(self, agent: AgentRecord) -> DepotOrders:
        """All that this agent's depot is to do."""
        if not (self.publications or self.durable_prunes or self.local_prunes or self.replicas):
            return NO_ORDERS
        name, node = agent.name, agent.node
        publish = tuple(each.order for each in self.publications.values() if each.agent == name)
        prune = [Prune(save, Tier.DURABLE) for save, whose in self.durable_prunes.items() if whose == name]
        replicate: tuple[Replicate, ...] = ()
        if (node in self.local_prunes or node in self.replicas) and self._depots.speaker(node) is agent:
            prune += [Prune(save, Tier.LOCAL) for save in self.local_prunes.get(node, ())]
            replicate = tuple(self.replicas.get(node, {}).values())
        return DepotOrders(publish, tuple(prune), replicate) if publish or prune or replicate else NO_ORDERS

    # ---- the durable tier -------------------------------------------------------------------------------------

    def publish(self, order: Publish, wanted: AgentRecord | None) -> None:
        """wanted: whose work it is, if it is there."""
        self.publications[order.save] = Publication(order, self._assigned(wanted))

    def published(self, save: SaveId) -> None:
        """It is done, or not wanted any more."""
        publication = self.publications.pop(save, None)
        if publication is not None:
            self._touch(publication.agent)

    def try_another(self, publication: Publication) -> bool:
        """Its agent could not publish it: let another one try. False if none is left."""
        publication.tried.add(publication.agent)
        other = self._depots.first(frozenset(publication.tried))
        if other is None or len(publication.tried) >= PUBLISHERS:
            self.published(publication.order.save)
            return False
        self._touch(publication.agent)
        publication.agent = self._touch(other.name)
        return True

    @property
    def publishing(self) -> bool:
        """Whether somebody who is there is about to publish something."""
        agents = (self._roster.agents.get(each.agent) for each in self.publications.values())
        return any(agent is not None and agent.attached and not agent.lost for agent in agents)

    def prune_durable(self, save: SaveId, wanted: AgentRecord | None) -> None:
        if save not in self.durable_prunes:
            self.durable_prunes[save] = self._assigned(wanted)

    # ---- the local tier ---------------------------------------------------------------------------------------

    def prune_local(self, save: SaveId, node: str) -> None:
        self.local_prunes.setdefault(node, {})[save] = None
        self._touch_node(node)

    def replicate(self, order: Replicate, node: str) -> None:
        self.replicas.setdefault(node, {})[order.save, order.place.rank] = order
        self._touch_node(node)

    def replicated(self, save: SaveId, rank: int, node: str) -> bool:
        """A copy is there, or will never be. False if none was ordered."""
        orders = self.replicas.get(node)
        if orders is None or orders.pop((save, rank), None) is None:
            return False
        if not orders:
            del self.replicas[node]
        self._touch_node(node)
        return True

    def stop_replicating(self, is_vain: Callable[[Replicate], bool]) -> None:
        """No more copies of these."""
        for node, orders in list(self.replicas.items()):
            for order in [order for order in orders.values() if is_vain(order)]:
                self.replicated(order.save, order.place.rank, node)

    def pruned(self, save: SaveId, tier: Tier, node: str) -> None:
        if tier is Tier.DURABLE:
            whose = self.durable_prunes.pop(save, None)
            if whose is not None:
                self._touch(whose)
            return
        orders = self.local_prunes.get(node)
        if orders is not None and save in orders:
            del orders[save]
            if not orders:
                del self.local_prunes[node]
            self._touch_node(node)

    def forget_node(self, node: str) -> None:
        """Nobody knows any more what lies there."""
        self.local_prunes.pop(node, None)
        self.replicas.pop(node, None)
        self._touch_node(node)

    # ---- who does it ------------------------------------------------------------------------------------------

    def reassign(self) -> None:
        """An agent came or was given up: whoever is there does the work of those who are not."""
        for publication in self.publications.values():
            publication.agent = self._still(publication.agent, frozenset(publication.tried))
        for save, whose in self.durable_prunes.items():
            self.durable_prunes[save] = self._still(whose, frozenset())

    def lost(self, agent: AgentRecord) -> None:
        self.reassign()
        if self._depots.speaker(agent.node) is None:
            self.stop_replicating(lambda order: order.place.node == agent.node)
        self._touch_node(agent.node)

    def _still(self, whose: AgentName, tried: frozenset[AgentName]) -> AgentName:
        agent = self._roster.agents.get(whose)
        if agent is not None and not agent.lost:
            return whose
        other = self._depots.first(tried)
        return self._touch(other.name) if other is not None else NOBODY

    def _assigned(self, wanted: AgentRecord | None) -> AgentName:
        there = wanted if wanted is not None and not wanted.lost else self._depots.first()
        return self._touch(there.name) if there is not None else NOBODY

    def _touch(self, name: AgentName) -> AgentName:
        agent = self._roster.agents.get(name)
        if agent is not None:
            self._dirty(agent)
        return name

    def _touch_node(self, node: str) -> None:
        speaker = self._depots.speaker(node)
        if speaker is not None:
            self._dirty(speaker)
