"""What a round resumes from, as each node is told it: the same save for all, and where its shards are.

Of a shard that is on the reader's node alone nothing is told. If there are others, they are all told, its own as well:
what a node has may turn out to be bad.

In a large world that would be ten thousand places for a thousand nodes. There a node is told only of the shards that
its own ranks saved, by their numbers: with the same layout these are most of what they read, and hardly any node lacks
one. The durable tier has the others. A save that is on the local tier alone is told in full, with one place of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ...protocol.checkpoints import Place, Resume, Tier, holders_of

PLACES_LIMIT = 256
"""Shards of other nodes of which a node is told every place."""


@dataclass(slots=True)
class Choice:
    """What a round resumes from. resume: without places.

    places: where each shard is, by rank, the first one preferred. own: shards that each node has itself.
    """

    resume: Resume
    places: dict[int, tuple[Place, ...]] = field(default_factory=dict[int, tuple[Place, ...]])
    own: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    wide: bool = False
    """Every node lacks more shards than can be told one by one."""
    _told: dict[tuple[str, tuple[int, ...]], Resume] = field(default_factory=dict[tuple[str, tuple[int, ...]], Resume])

    @property
    def tier(self) -> Tier:
        return Tier.LOCAL if self.resume.local else Tier.DURABLE

    @property
    def text(self) -> str:
        """For people."""
        return f"resumes from step {self.resume.step} ({self.tier.value} tier)"

    def for_node(self, node: str, ranks: tuple[int, ...]) -> Resume:
        """What the ranks of `node` are told. ranks: their numbers in the round."""
        if not self.resume.local:
            return self.resume
        key = (node, ranks if self.resume.partial else ())
        if self.wide and not self.resume.partial:
            key = ("", ())
        known = self._told.get(key)
        if known is None:
            known = self._told[key] = msgspec.structs.replace(self.resume, holders=holders_of(self._places(*key)))
        return known

    def _places(self, node: str, ranks: tuple[int, ...]) -> list[Place]:
        own = self.own.get(node, set())
        shards = ranks if self.resume.partial else self.places
        return [
            place
            for rank in shards
            if rank not in own or len(self.places[rank]) > 1
            for place in self.places.get(rank, ())
        ]
