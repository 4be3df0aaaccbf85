"""The log's lines about checkpoints: one for each save, whatever the number of ranks that speak of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.checkpoints import Fact, Tier
from . import wording
from .roster import AgentRecord
from .saves import SaveRecord

if TYPE_CHECKING:
    from .job import Job

REASONS_TOLD = 4
"""Different reasons of failure that are told of one save on one tier: some name a file, and so a rank."""


def tell_published(job: Job, record: SaveRecord, seconds: float) -> None:
    local, durable = record.local, record.durable
    durable_s = max(durable.seconds, seconds)
    times = [f"local after {local.seconds:.2f} s"] if local.complete else []
    times.append(f"durable after {durable_s:.2f} s")
    job.tell(
        "checkpoint",
        f"{record.save} is published: {_count(record.world_size)}, {wording.size(durable.nbytes)}; {', '.join(times)}",
        step=record.step,
        save_round=record.save.round,
        ranks=record.world_size,
        nbytes=durable.nbytes,
        local_s=local.seconds if local.complete else None,
        durable_s=durable_s,
        digest=record.digest.hex(),
    )


def tell_local(job: Job, record: SaveRecord) -> None:
    text = (
        f"{record.save} is complete on the local tier: {_count(record.world_size)}, {wording.size(record.local.nbytes)}"
    )
    job.tell("local_save", f"{text}; after {record.local.seconds:.2f} s", level="debug", step=record.step)


def tell_unpublished(job: Job, fact: Fact, agent: AgentRecord, other: str) -> None:
    text = f"{fact.save} could not be published by agent {agent.name}: {fact.why}"
    what = f"agent {other} tries" if other else "given up; its shards stay where they are, and nothing resumes from it"
    level = "warning" if other else "error"
    job.tell("unpublished", f"{text}; {what}", level=level, host=agent.host, step=fact.save.step)


def tell_failed(job: Job, record: SaveRecord, fact: Fact, told: int, *, copy: bool) -> None:
    if told >= REASONS_TOLD:
        return
    what = f"no copy of the shard of rank {fact.rank} on {fact.node}" if copy else f"rank {fact.rank} could not write"
    after = "; of further ranks with this reason nothing is said"
    if told == REASONS_TOLD - 1:
        after = "; of further reasons nothing is said"
    text = f"{record.save}, {fact.tier.value} tier: {what}: {fact.why}{after}"
    job.tell("save_failed", text, level="warning", rank=fact.rank, step=record.step, tier=fact.tier.value)


def tell_bad(job: Job, record: SaveRecord, fact: Fact) -> None:
    which = f"shard {fact.rank}" if fact.rank >= 0 else "the whole save"
    where = f" on {fact.node}" if fact.tier is Tier.LOCAL and fact.node else ""
    text = f"{record.save}, {fact.tier.value} tier: {which}{where} is bad: {fact.why}; it is not used again"
    job.tell("bad_save", text, level="warning", step=record.step, tier=fact.tier.value)


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"
