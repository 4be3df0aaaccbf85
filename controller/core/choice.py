"""What a round resumes from, as each node is told it: the same save for all, and where its shards are.

Of a shard that is on the reader's node alone nothing is told. If there are others, they are all told, its own as well:
what a node has may turn out to be bad.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ...protocol.checkpoints import Place, Resume, Tier

PLACES_LIMIT = 256
"""Shards of other nodes of which a node is told every place; of more than that it is told one place each."""


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
    _for_node: dict[str, Resume] = field(default_factory=dict[str, Resume])

    @property
    def tier(self) -> Tier:
        return Tier.LOCAL if self.resume.local else Tier.DURABLE

    @property
    def text(self) -> str:
        """For people."""
        return f"resumes from step {self.resume.step} ({self.tier.value} tier)"

    def for_node(self, node: str) -> Resume:
        """What the ranks of `node` are told."""
        if not self.resume.local:
            return self.resume
        key = "" if self.wide else node
        known = self._for_node.get(key)
        if known is None:
            own = self.own.get(key, set())
            told = (each for rank, each in self.places.items() if rank not in own or len(each) > 1)
            places = tuple(place for each in told for place in each)
            known = self._for_node[key] = msgspec.structs.replace(self.resume, places=places)
        return known
