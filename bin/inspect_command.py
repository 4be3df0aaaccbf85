"""`perdure inspect JOURNAL`: the story of a job, from its journal. Reads only; the job may be running."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..controller.journal import JournalError
from ..controller.narrative import Chapter, Story, find_journal, read_story
from ..controller.narrative_json import encode_round
from ..controller.narrative_text import tell, tell_round
from ..protocol.exit_codes import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal", type=Path, metavar="JOURNAL", help="a journal, or the run directory (or attempt-N in it) it is in"
    )
    parser.add_argument("--round", type=int, metavar="N", help="only this round, without any cut")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each round")


def main(args: argparse.Namespace) -> int:
    """Tell the story; 0, or 1 if the journal is not there, not a journal, or damaged."""
    try:
        story = read_story(find_journal(args.journal))
        lines = _lines(story, args)
    except (JournalError, LookupError) as error:
        print(f"perdure inspect: {error.args[0]}", file=sys.stderr)
        return int(ExitCode.FAILED)
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough; without this Python complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if story.trouble:
        print(f"perdure inspect: {story.trouble}; what is told above comes before that place", file=sys.stderr)
        return int(ExitCode.FAILED)
    return int(ExitCode.COMPLETED)


def _lines(story: Story, args: argparse.Namespace) -> Iterator[str]:
    chapters = _chosen(story, args.round)
    if args.json:
        return (encode_round(story, chapter).decode() for chapter in chapters)
    return tell(story) if args.round is None else tell_round(story, chapters[0])


def _chosen(story: Story, number: int | None) -> list[Chapter]:
    """The rounds that are wanted; without any, the time before the first, so that the job's end is told."""
    if number is None:
        return story.rounds or story.chapters
    chapter = story.chapter(number)
    if chapter is not None:
        return [chapter]
    known = f"rounds 0 to {len(story.rounds) - 1}" if story.rounds else "no round"
    raise LookupError(f"there is no round {number} in {story.path}; it tells of {known}")
