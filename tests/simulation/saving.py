"""How a simulated rank saves and restores: at certain steps, with writers that are slow, fail, or outlive the round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from perdure.protocol.checkpoints import GIVEN_UP, Fact, Resume, SaveId, Tier, What
from perdure.protocol.messages import Directive
from perdure.protocol.rank_messages import Facts

if TYPE_CHECKING:
    from .ranks import SimRank
    from .storage import Storage

SAVE_EVERY = 20
"""Steps between two saves; every second one goes to the durable tier, too."""
BUFFERS = 2


class Saver:
    """One rank's. The writer is another process, so a save may end long after its round has."""

    def __init__(self, rank: SimRank, storage: Storage) -> None:
        self._rank = rank
        self._storage = storage
        self._writing: dict[SaveId, list[Tier]] = {}
        """Saves that use a buffer, and the tiers of which nothing has been said."""
        self._vain: set[SaveId] = set()

    def enter(self, directive: Directive) -> int:
        """The round begins: restore. Returns the step from which it goes on."""
        self._vain.clear()
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
        if save in self._vain:
            self._fail_all(save, tiers, directive.world_size, GIVEN_UP)
            return
        if len(self._writing) >= BUFFERS or self._storage.bad_luck(0.03):
            self._fail_all(save, tiers, directive.world_size, "skipped")
            return
        self._writing[save] = list(tiers)
        for tier in tiers:
            slow = self._storage.bad_luck(0.1)
            seconds = self._storage.chance.uniform(0.5, 4.0) if slow else self._storage.chance.uniform(0.01, 0.3)
            self._rank.clock.after(seconds, self._write(save, tier, self._rank.rank, directive.world_size))

    def drop(self, saves: Iterable[SaveId], world_size: int) -> None:
        """Another rank did not save these: what is not written is given up, and what is not begun never is."""
        self._vain.update(saves)
        for save in saves:
            self._storage.drops += 1
            self._fail_all(save, self._writing.pop(save, []), world_size, GIVEN_UP)

    def _fail_all(self, save: SaveId, tiers: list[Tier], world_size: int, why: str) -> None:
        for tier in tiers:
            node = self._rank.agent.node if tier is Tier.LOCAL else ""
            fact = Fact(save, What.FAILED, tier, self._rank.rank, node, world_size=world_size, why=why)
            self._rank.say(Facts((fact,)))

    def _write(self, save: SaveId, tier: Tier, number: int, world_size: int) -> Callable[[], None]:
        def written() -> None:
            rank, left = self._rank, self._writing.get(save, [])
            if not rank.alive or tier not in left:
                return
            left.remove(tier)
            if not left:
                del self._writing[save]
            if self._storage.bad_luck(0.01):
                fact = Fact(save, What.FAILED, tier, number, world_size=world_size, why="ENOSPC")
            else:
                fact = self._storage.write(save, number, tier, rank.agent.node, world_size)
            rank.say(Facts((fact,)))

        return written
