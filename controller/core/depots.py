"""The nodes as places for shards: which can be reached, by which depot, and which keep copies for which.

Worked out anew only after an agent came or went: thousands of shards are reported between two such moments.
"""

from collections.abc import Iterator

from ...protocol.names import AgentName
from .roster import AgentRecord, Roster


class Depots:
    """What the roster says of depots. `changed` must be called whenever an agent comes, goes, or takes stock."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._speakers: dict[str, AgentRecord] | None = None
        self._ring: list[str] = []
        self._places: dict[str, int] = {}
        self._partners: dict[tuple[str, int], tuple[str, ...]] = {}

    def changed(self) -> None:
        self._speakers = None

    def speaker(self, node: str) -> AgentRecord | None:
        """The agent whose depot acts for `node`; None if the node is out of reach."""
        return self._living().get(node)

    def address(self, node: str) -> str:
        """Where the shards of `node` can be read from elsewhere; empty if nowhere."""
        speaker = self._living().get(node)
        return speaker.depot or "" if speaker is not None else ""

    def reachable(self) -> frozenset[str]:
        """Nodes whose shards every rank can read."""
        living = self._living()
        return frozenset(living if len(living) == 1 else (node for node, agent in living.items() if agent.depot))

    def first(self, other_than: frozenset[AgentName] = frozenset()) -> AgentRecord | None:
        """The attached agent that comes first in the order of agents."""
        there = [a for a in self._roster.agents.values() if a.attached and not a.lost and a.name not in other_than]
        return min(there, key=lambda agent: (agent.order, agent.name), default=None)

    def partners(self, node: str, count: int) -> tuple[str, ...]:
        """The nodes that keep copies of the shards of `node`: in other groups where there are any, and so that every
        node keeps as many as any other."""
        self._living()
        known = self._partners.get((node, count))
        if known is None:
            known = self._partners[node, count] = tuple(self._choose(node, count))
        return known

    def _choose(self, node: str, count: int) -> Iterator[str]:
        living, start = self._living(), self._places.get(node)
        if start is None:
            return
        group, near = living[node].group, list[str]()
        for other in (*self._ring[start + 1 :], *self._ring[:start]):
            if count == 0:
                return
            if living[other].group != group:
                count -= 1
                yield other
            elif len(near) < count:
                near.append(other)
        yield from near[:count]

    def _living(self) -> dict[str, AgentRecord]:
        if self._speakers is None:
            there = [agent for agent in self._roster.agents.values() if agent.attached and not agent.lost]
            self._speakers = {}
            for agent in sorted(there, key=lambda agent: (not agent.depot, agent.order, agent.name)):
                self._speakers.setdefault(agent.node, agent)
            self._make_ring(self._speakers)
        return self._speakers

    def _make_ring(self, speakers: dict[str, AgentRecord]) -> None:
        """All nodes in one ring, in which the next node is one of another group as long as there are any."""
        sizes: dict[str, int] = {}
        keys: dict[str, tuple[int, str]] = {}
        for agent in sorted(speakers.values(), key=lambda agent: (agent.order, agent.name)):
            sizes[agent.group] = number = sizes.get(agent.group, -1) + 1
            keys[agent.node] = (number, agent.group)
        self._ring = sorted(keys, key=lambda node: (keys[node], node))
        self._places = {node: i for i, node in enumerate(self._ring)}
        self._partners.clear()
