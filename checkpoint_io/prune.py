"""Deleting saves, and what crashes left behind.

Nothing here raises: a folder that cannot be deleted is a line for the log, and stays for the next sweep. What may be
deleted is the caller's decision; here it is only made sure that the folder is the save that was named.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ..protocol.checkpoints import SaveId, Tier
from .catalog import Kind, look_published, whose
from .files import NEW, delete_tree
from .names import TRASH, bad_name, local_name, published_name, saving_name, saving_save
from .publish import point_tracker, read_tracker


def prune(root: Path, save: SaveId, tier: Tier, node: str = "") -> list[str]:
    """Delete a save from a tier, where it is there. root: the tier's folder. Returns what went wrong."""
    if tier is Tier.LOCAL:
        return delete_tree(root / node / local_name(save))
    problems = delete_tree(root / saving_name(save)) + delete_tree(root / bad_name(save))
    published = root / published_name(save.step)
    owner = whose(published)
    if owner is None:
        found = look_published(published)
        if found is not None and (found.kind is Kind.PUBLISHED or found.unsure):
            problems.append(f"{published} is not deleted: it cannot be told which save it is ({found.why})")
    elif owner == save:
        problems += delete_tree(published)
        problems += _tracked(root, save.step)
    return problems


def _tracked(root: Path, step: int) -> list[str]:
    """The tracker must not name what is gone."""
    try:
        if read_tracker(root) == step:
            point_tracker(root)
    except OSError as error:
        return [f"the tracker in {root} still names step {step}, which is deleted: {error}"]
    return []


def sweep(folder: Path, keep: Collection[SaveId] = ()) -> list[str]:
    """Delete what is half deleted, temporary files, and unfinished saves other than `keep`, which the caller knows to
    be alive. folder: the durable tier's, or a node's on the local tier. Returns what went wrong."""
    problems: list[str] = []
    try:
        for path in _leftovers(folder, keep):
            problems += delete_tree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{folder} cannot be swept: {error}")
    return problems


def _leftovers(folder: Path, keep: Collection[SaveId]) -> Iterator[Path]:
    for name in sorted(os.listdir(folder)):
        unfinished = saving_save(name)
        if name.startswith((TRASH, NEW)) or (unfinished is not None and unfinished not in keep):
            yield folder / name
