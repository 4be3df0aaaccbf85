"""How a simulated rank saves and restores: at certain steps, with writers that are slow, fail, or outlive the round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perdure.protocol.checkpoints import Fact, Resume, SaveId, Tier, What
from perdure.protocol.messages import Directive
from perdure.protocol.rank_messages import Facts

if TYPE_CHECKING:
    from .ranks import SimRank
    from .storage import Storage

SAVE_EVERY = 20
"""Steps between two saves; every second one goes to the durable tier, too."""


class Saver:
    """One rank's. The writer is another process, so a save may end long after its round has."""

    def __init__(self, rank: SimRank, storage: Storage) -> None:
        self._rank = rank
        self._storage = storage

    def enter(self, directive: Directive) -> int:
        """The round begins: restore. Returns the step from which it goes on."""
        resume, chance = directive.resume, self._storage.chance
        if resume is None:
            return 0
        index = self._rank.round
        if self._storage.bad_luck(0.02):
            self._rank.clock.after(chance.uniform(0.0, 0.1), lambda: self._cannot_restore(index, resume))
        elif resume.save in self._storage.poisoned and not self._storage.bad_luck(0.3):
            self._rank.clock.after(chance.uniform(0.1, 0.4), lambda: self._if_inside(index, self._fail))
        return resume.step

    def _fail(self) -> None:
        self._rank.raise_error("FloatingPointError")

    def _cannot_restore(self, index: int, resume: Resume) -> None:
        tier = Tier.LOCAL if resume.local else Tier.DURABLE
        shard = self._storage.chance.randrange(resume.world_size)
        fact = Fact(resume.save, What.BAD, tier, shard, self._rank.agent.node, resume.world_size, why="a flipped bit")
        self._rank.say(Facts((fact,)))
        if self._storage.chance.random() < 0.5:
            self._if_inside(index, lambda: self._rank.raise_error("RestoreError"))

    def _if_inside(self, index: int, action: Callable[[], None]) -> None:
        if self._rank.round == index and self._rank.trains:
            action()

    def next_save(self, directive: Directive, first_step: int, steps_per_s: float) -> None:
        """Save at the next step that is due after `first_step`, and so on while the round lasts."""
        index, step = self._rank.round, (first_step // SAVE_EVERY + 1) * SAVE_EVERY

        def due() -> None:
            if self._rank.round == index and self._rank.trains:
                self._save(directive, step)
                self.next_save(directive, step, steps_per_s)

        self._rank.clock.after((step - first_step) / steps_per_s, due)

    def _save(self, directive: Directive, step: int) -> None:
        save = SaveId(step, directive.epoch, directive.round)
        if self._rank.rank == 0 and self._storage.bad_luck(0.1):
            self._storage.poisoned.add(save)
        tiers = [Tier.LOCAL] if step // SAVE_EVERY % 2 else [Tier.LOCAL, Tier.DURABLE]
        for tier in tiers:
            slow = self._storage.bad_luck(0.1)
            seconds = self._storage.chance.uniform(0.5, 4.0) if slow else self._storage.chance.uniform(0.01, 0.3)
            self._rank.clock.after(seconds, self._writing(save, tier, self._rank.rank, directive.world_size))

    def _writing(self, save: SaveId, tier: Tier, number: int, world_size: int) -> Callable[[], None]:
        def written() -> None:
            rank = self._rank
            if not rank.alive:
                return
            if self._storage.bad_luck(0.01):
                fact = Fact(save, What.FAILED, tier, number, world_size=world_size, why="ENOSPC")
            else:
                fact = self._storage.write(save, number, tier, rank.agent.node, world_size)
            rank.say(Facts((fact,)))

        return written
