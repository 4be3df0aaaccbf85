"""Chooses what `perdure checkpoints prune` deletes, and deletes it.

The newest complete save of each tier stays, always. What is complete on the local tier cannot be judged from one node's
folder, so there a save counts as soon as a shard of it is good. Unfinished saves go once nobody has written to them for
an hour; a save that is marked as bad goes only if its step is named. What perdure did not write never goes.
"""

from collections.abc import Sequence
from pathlib import Path

from ..checkpoint_io.catalog import Kind
from ..checkpoint_io.files import delete_tree
from ..checkpoint_io.prune import prune
from ..protocol.checkpoints import Tier
from .checkpoint_list import Row

UNDER_WAY_S = 3600.0
"""An unfinished save that was written to so recently may be in the hands of a writer."""


def outdated(rows: Sequence[Row], keep: int) -> list[Row]:
    """All but the `keep` newest that count, on each tier, and old leftovers. Older attempts of a step that is kept go
    only if they are leftovers."""
    doomed: list[Row] = []
    for tier in Tier:
        mine = [row for row in rows if row.tier is tier]
        kept = sorted({row.step for row in mine if counts(row)})[-keep:]
        doomed += [row for row in mine if counts(row) and row.step not in kept]
        doomed += [row for row in mine if unfinished(row) and row.age > UNDER_WAY_S]
    return doomed


def chosen_for_step(rows: Sequence[Row], step: int) -> tuple[list[Row], str]:
    """Everything of that step that may be deleted; if that is nothing, why."""
    there = [row for row in rows if row.step == step]
    if not there:
        return [], f"there is nothing of step {step}"
    reasons: list[str] = []
    doomed: list[Row] = []
    for row in there:
        if not ours(row):
            reasons.append(f"{row.name} was not written by perdure: delete it by hand")
            continue
        newest = max((each.step for each in rows if each.tier is row.tier and counts(each)), default=-1)
        if counts(row) and row.step == newest:
            reasons.append(
                f"{row.name} is the newest complete one of the {row.tier.value} tier, which is never deleted"
            )
        elif unfinished(row) and row.age <= UNDER_WAY_S:
            reasons.append(f"{row.name} was written to within the last hour and may be a save under way")
        else:
            doomed.append(row)
    return doomed, "; ".join(reasons)


def counts(row: Row) -> bool:
    """Whether it could be resumed from, here or together with what other nodes have."""
    if row.kind is Kind.FOREIGN:
        return False
    return row.complete or (row.tier is Tier.LOCAL and any(found.usable for found in row.found))


def ours(row: Row) -> bool:
    gave_way = row.tier is Tier.DURABLE and any(found.bad for found in row.found)
    return row.tier is Tier.LOCAL or row.kind in (Kind.PUBLISHED, Kind.SAVING) or gave_way


def unfinished(row: Row) -> bool:
    return row.kind is Kind.SAVING or (row.tier is Tier.LOCAL and not counts(row) and not row.damaged)


def delete(row: Row, save: Path | None, local: Path | None) -> list[str]:
    """What went wrong."""
    if row.kind is Kind.PUBLISHED and row.save is not None and save is not None:
        return prune(save, row.save, row.tier)
    if row.tier is Tier.LOCAL and row.save is not None and local is not None:
        return [each for folder in row.folders for each in prune(local, row.save, row.tier, folder.parent.name)]
    return delete_tree(row.folder)
