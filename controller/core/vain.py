"""Saves of the present round that cannot be complete any more, while ranks may still be writing their parts of them.

A rank that skips a save does so alone. If the others went on with theirs, their buffers would be in use a little
longer, so that they might skip the next save, which the first one takes: under lasting load no save would ever be
complete. So all ranks are told to give it up at once.

Only a failure can make a save vain, and the list changes only when a save comes to it: a normal save costs nothing
here, and a vain one is told once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...protocol.checkpoints import SaveId, Tier, due_tiers
from .saves import OnTier, SaveRecord

if TYPE_CHECKING:
    from .job import Job

LISTED = 16
"""Saves at most, the newest ones. A rank has two buffers, so those that it still writes are among them."""


class Vain:
    """listed: their ids, in order."""

    def __init__(self, job: Job, records: Mapping[SaveId, SaveRecord]) -> None:
        self._job = job
        self._records = records
        self.listed: tuple[SaveId, ...] = ()

    def consider(self, record: SaveRecord) -> None:
        """A rank has failed to write its shard, or skipped it."""
        if record.save in self.listed or not self._is_vain(record):
            return
        kept = [save for save in self.listed if self._is_awaited(self._records.get(save))]
        self.listed = tuple(sorted((*kept, record.save))[-LISTED:])
        self._job.directives.dirty_all()

    def forget(self) -> None:
        """A new round: all that was unfinished is dropped anyway."""
        self.listed = ()

    def _is_vain(self, record: SaveRecord) -> bool:
        """Every tier that it goes to lacks a shard for ever, and on some there are ranks that have not answered."""
        tiers = self._goes_to(record)
        lacking = all(tier.dropped or (tier.failed and not tier.complete) for tier in tiers)
        return lacking and any(not tier.dropped for tier in tiers)

    def _is_awaited(self, record: SaveRecord | None) -> bool:
        """Whether ranks have still to say what became of it; when all have, it is dropped."""
        return record is not None and any(not tier.dropped for tier in self._goes_to(record))

    def _goes_to(self, record: SaveRecord) -> list[OnTier]:
        """As ranks choose it, from the same settings."""
        settings = self._job.settings
        due = due_tiers(record.step, settings.non_persistent_save_interval, settings.save_interval)
        tiers: list[OnTier] = []
        if settings.non_persistent_local_ckpt_dir is not None:
            tiers.append(record.local)
        if settings.save is not None and due != [Tier.LOCAL]:
            tiers.append(record.durable)
        return tiers
