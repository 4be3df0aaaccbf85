"""From which save a round resumes: one for all its ranks, out of everything that is complete and can be reached.

The greatest step wins, whichever tier it is on. Of one save the local tier is preferred, and if the durable one has it
as well, a reader takes any shard from there that it cannot use here. Where `ckpt_step` is set, the first round takes
that step or none; later ones may take what this job has saved since.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...protocol.checkpoints import Place, Resume, digest_of_save, holders_of
from ...protocol.exit_codes import ExitCode
from ...protocol.settings import Settings
from . import wording
from .choice import PLACES_LIMIT, Choice
from .depots import Depots
from .saves import SaveRecord

PLACES_BYTES = 100_000
"""Of all places in what a rank is told, which is a packet of 128 KiB. A save that needs more, some 20,000 ranks in
order, and is not on the durable tier, is left alone."""
_HOLDER_BYTES = 12
_SPAN_BYTES = 7


class NoCheckpoint(Exception):
    """There is none to resume from, and the job must not begin without. code: what it ends with."""

    def __init__(self, code: ExitCode, text: str) -> None:
        self.code = code
        super().__init__(text)


def choose(
    records: Iterable[SaveRecord], depots: Depots, settings: Settings, *, first: bool, epoch: int
) -> Choice | None:
    """What the next round resumes from; None: it begins anew. first: it is the first round of the job.

    Raises:
        NoCheckpoint: `ckpt_step` is not there, or all that is there has been found bad.
    """
    wanted, reachable = settings.ckpt_step, depots.reachable()
    allowed = [
        record
        for record in sorted(records, key=lambda record: (record.step, *record.age), reverse=True)
        if wanted is None or record.step == wanted or (record.save.epoch == epoch and not first)
    ]
    for record in allowed:
        choice = _on_local(record, depots, reachable) if record.local_is_good(reachable) else None
        if choice is not None:
            return choice
        if record.durable_is_good:
            return Choice(_resume(record, record.digest))
    if wanted is not None and first:
        steps = sorted({r.step for r in records if r.durable_is_good or r.local_is_good(reachable)})
        there = f"there are steps {wording.listing(steps)}" if steps else "there is none of any other step either"
        raise NoCheckpoint(ExitCode.FAILED, f"no complete checkpoint of step {wanted} (ckpt_step); {there}")
    spent = [record for record in allowed if record.spent]
    if spent:
        steps = wording.listing(sorted({record.step for record in spent}))
        raise NoCheckpoint(
            ExitCode.CHECKPOINTS_SPENT,
            f"every checkpoint that can be reached is bad, or was resumed from in vain: steps {steps}; none was "
            "deleted. Look at them with `perdure checkpoints`; a job with another `save` folder begins anew",
        )
    return None


def _resume(record: SaveRecord, digest: bytes) -> Resume:
    known = digest if record.seen else b""
    return Resume(record.save, record.world_size, known, durable=record.durable_is_good)


def _on_local(record: SaveRecord, depots: Depots, reachable: frozenset[str]) -> Choice | None:
    """The save on the local tier; None if the places of its shards are too many to be told."""
    digest = digest_of_save(record.local.digests[rank] for rank in range(record.world_size)) if record.seen else b""
    choice = Choice(msgspec.structs.replace(_resume(record, digest), local=True))
    addresses = {node: depots.address(node) for node in reachable}
    bad = record.local.bad_shards
    for rank in range(record.world_size):
        nodes = [node for node in record.local.holders[rank] if node in reachable and (rank, node) not in bad]
        choice.places[rank] = tuple(Place(rank, node, addresses[node]) for node in nodes)
        for node in nodes:
            choice.own.setdefault(node, set()).add(rank)
    choice.wide = record.world_size - max(len(ranks) for ranks in choice.own.values()) > PLACES_LIMIT
    if not choice.wide:
        return choice
    if record.durable_is_good:
        choice.resume = msgspec.structs.replace(choice.resume, partial=True)
        return choice
    choice.places = {rank: places[:1] for rank, places in choice.places.items()}
    told = holders_of(place for places in choice.places.values() for place in places)
    nbytes = sum(_HOLDER_BYTES + len(h.node) + len(h.address) + _SPAN_BYTES * len(h.spans) for h in told)
    return choice if nbytes <= PLACES_BYTES else None
