"""Reads every byte of a save, on whichever tier, and notes in its row what was found."""

from collections.abc import Callable, Iterator
from pathlib import Path

from ..checkpoint_io.catalog import Kind
from ..checkpoint_io.verify import verify_save, verify_shard
from .checkpoint_list import Row

Progress = Callable[[int], object]
"""Is told of so many more bytes."""


def verify(row: Row, progress: Progress) -> None:
    """Sets `verified` and `problems`. What is not finished, gave way to another one, or has no digests, is left as it
    is: there is nothing that it should be equal to. So is what a running job has deleted meanwhile."""
    if row.kind is Kind.PUBLISHED:
        row.problems = tuple(of_published(row.folder, progress))
    elif row.kind is Kind.SHARD:
        row.problems = tuple(of_shards(row, progress))
    else:
        return
    if not any(folder.exists() for folder in row.folders):
        row.problems = ()
        return
    if row.damaged and not row.problems:
        row.problems = (row.why,)
    row.verified = not row.problems


def of_published(folder: Path, progress: Progress) -> Iterator[str]:
    done = 0
    for step in verify_save(folder):
        progress(step.done - done)
        done = step.done
        if step.problem:
            yield step.problem


def of_shards(row: Row, progress: Progress) -> Iterator[str]:
    """Every copy of every shard that can be seen from here."""
    for found in row.found:
        if found.kind is Kind.SHARD:
            problems = verify_shard(found.path.parent, found.rank)
            if found.path.parent.exists():
                yield from (f"on {found.node}: {problem}" for problem in problems)
            progress(found.nbytes)
