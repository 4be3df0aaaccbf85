"""What is known of each save, tier by tier: which shards are written, where they are, and what is wrong with them.

Two orders of saves must not be mixed up. By *step*: what a round resumes from is the greatest one. By *age* (job,
round, step): what is deleted is the oldest one, for after a fall back to an older step the newest saves have smaller
steps than the ones that were found bad.
"""

from dataclasses import dataclass, field

from ...protocol.checkpoints import SaveId, Tier


@dataclass(slots=True)
class OnTier:
    """One save on one tier.

    digests: of the sidecars that are written, by rank. holders: rank -> nodes that have its shard (local tier).
    complete: all shards were written, before the round after it was planned. failures: what went wrong, and for whom
    first. failed: ranks that could not write, or skipped it. bad: the whole is unusable; bad_shards: single ones are,
    (rank, node). struck: rounds that resumed from it failed. dropped: it is to be deleted, or is deleted. seconds:
    from the call of `save` to the last shard.
    """

    digests: dict[int, bytes] = field(default_factory=dict[int, bytes])
    holders: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    failed: set[int] = field(default_factory=set[int])
    bad_shards: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    complete: bool = False
    bad: bool = False
    struck: bool = False
    dropped: bool = False
    nbytes: int = 0
    seconds: float = 0.0

    def is_hopeless(self, world_size: int) -> bool:
        """Every rank has answered, and not every one has written."""
        if not self.failed or self.complete or len(self.failed) + len(self.digests) < world_size:
            return False
        return len(self.failed | self.digests.keys()) >= world_size

    @property
    def sound(self) -> bool:
        """Nothing speaks against it as a whole."""
        return self.complete and not (self.bad or self.struck or self.dropped)

    @property
    def in_use(self) -> bool:
        """Something of it may lie there."""
        return bool(self.digests or self.holders or self.failures) or self.complete


@dataclass(slots=True)
class SaveRecord:
    """One save. ours: it is of this job. seen: this job saw it written. published: it has its final name there.

    digest: of all sidecars on the durable tier, once they are all written. gave_up: nobody could publish it.
    """

    save: SaveId
    world_size: int
    ours: bool
    seen: bool
    durable: OnTier = field(default_factory=OnTier)
    local: OnTier = field(default_factory=OnTier)
    published: bool = False
    gave_up: bool = False
    digest: bytes = b""

    def on(self, tier: Tier) -> OnTier:
        return self.local if tier is Tier.LOCAL else self.durable

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def age(self) -> tuple[bool, int, int, int]:
        """Greater is younger. What this job has saved is the youngest, whatever the clocks say that epochs are from."""
        return (self.ours, self.save.epoch, self.save.round, self.save.step)

    @property
    def durable_is_good(self) -> bool:
        """Every rank can resume from the durable tier."""
        return self.published and self.durable.sound and not self.durable.bad_shards

    def local_is_good(self, reachable: frozenset[str]) -> bool:
        """Every rank can resume from the local tier: each shard is on a node that can be reached."""
        local = self.local
        if not local.sound:
            return False
        bad, holders = local.bad_shards, local.holders
        for rank in range(self.world_size):
            if not any(node in reachable and (rank, node) not in bad for node in holders.get(rank, ())):
                return False
        return True

    @property
    def spent(self) -> bool:
        """It was complete once, and has been found unusable since."""
        local, durable = self.local, self.durable
        return (self.published and not durable.dropped and not self.durable_is_good) or (
            local.complete and not local.dropped and bool(local.bad or local.struck or local.bad_shards)
        )
