"""Which saves are to be deleted. Pure: what is known in, what is superfluous out.

The newest good ones stay, by age, not by step. One that is marked as bad never counts as one of them, the last good
one always stays, and so does what the present round resumed from until it has saved something itself: some rank may
still be reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .saves import OnTier, SaveRecord

if TYPE_CHECKING:
    from .job import Job

LOCAL_KEPT = 2
"""Complete saves that stay on the local tier: the newest one may turn out to be bad."""


def durable_surplus(records: Iterable[SaveRecord], job: Job) -> list[SaveRecord]:
    """What a newly published save makes superfluous on the durable tier."""
    present = [record for record in records if record.durable.in_use and not record.durable.dropped]
    good = sorted((record for record in present if record.durable_is_good), key=lambda record: record.age, reverse=True)
    if not good:
        return []
    kept = good[: job.settings.most_recent_k]  # None: all of them
    full = len(kept) == job.settings.most_recent_k
    waiting = {save.step for save in job.commits.orders.publications}

    def is_surplus(record: SaveRecord) -> bool:
        if record in kept or _is_read(record, job) or (record.step in waiting and not record.published):
            return False
        if record.durable.complete and not record.gave_up:
            return full and record.age < kept[-1].age
        return record.age < good[0].age and not _is_in_flight(record, record.durable, job)

    return [record for record in present if is_surplus(record)]


def local_surplus(records: Iterable[SaveRecord], job: Job) -> list[SaveRecord]:
    """What a newly completed save makes superfluous on the local tier."""
    present = [record for record in records if record.local.in_use and not record.local.dropped]
    kept = list(_newest_local(present, job.depots.reachable()))
    if len(kept) < LOCAL_KEPT:
        return []
    return [
        record
        for record in present
        if record.age < kept[-1].age and not _is_read(record, job) and not _is_in_flight(record, record.local, job)
    ]


def _newest_local(present: list[SaveRecord], reachable: frozenset[str]) -> Iterator[SaveRecord]:
    count = 0
    for record in sorted(present, key=lambda record: record.age, reverse=True):
        if count < LOCAL_KEPT and record.local_is_good(reachable):
            count += 1
            yield record


def _is_read(record: SaveRecord, job: Job) -> bool:
    round = job.round
    if round is None or round.choice is None or round.saved_step >= 0:
        return False
    return round.choice.resume.save == record.save


def _is_in_flight(record: SaveRecord, tier: OnTier, job: Job) -> bool:
    """It may still be finished."""
    round = job.round
    here = round is not None and (record.save.epoch, record.save.round) == (job.epoch, round.index)
    return here and not tier.complete and not tier.failures
