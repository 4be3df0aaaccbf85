"""The checkpoints of a job's story: what each round resumed from, and what was published while it ran."""

from collections.abc import Iterator
from typing import Any

from .narrative import Chapter, Note

CHECKPOINTS = 6
"""Published saves that a round's block names, unless the round was asked for."""

EVENT = "checkpoint"


def published(chapter: Chapter) -> list[Note]:
    return [note for note in chapter.notes if note.tell.event == EVENT]


def resumed_from(chapter: Chapter) -> str:
    """`step 100 (round 2), local tier, saved by 8 ranks`; empty if the round began anew."""
    choice = chapter.round.choice if chapter.round is not None else None
    if choice is None:
        return ""
    resume = choice.resume
    both = " (the durable one has it, too)" if resume.local and resume.durable else ""
    ranks = f"{resume.world_size} rank{'' if resume.world_size == 1 else 's'}"
    return f"{resume.save}, {choice.tier.value} tier{both}, saved by {ranks}"


def lines(chapter: Chapter, *, full: bool) -> Iterator[tuple[float, str]]:
    """A line for each published save, and when it was; of many the first and the last ones."""
    notes = published(chapter)
    shown = notes if full or len(notes) <= CHECKPOINTS else [*notes[: CHECKPOINTS // 2], *notes[-CHECKPOINTS // 2 :]]
    for number, note in enumerate(shown):
        if len(shown) < len(notes) and number == CHECKPOINTS // 2:
            yield 0.0, f"... {len(notes) - len(shown)} more, shown with --round ..."
        yield note.at, note.tell.text


def resume_record(chapter: Chapter) -> dict[str, Any] | None:
    """For programs."""
    choice = chapter.round.choice if chapter.round is not None else None
    if choice is None:
        return None
    resume = choice.resume
    return {
        "step": resume.step,
        "epoch": resume.save.epoch,
        "round": resume.save.round,
        "world_size": resume.world_size,
        "local": resume.local,
        "durable": resume.durable,
        "digest": resume.digest.hex(),
    }
