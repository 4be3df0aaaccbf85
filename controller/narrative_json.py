"""A job's story as a program reads it: one JSON object for each round, complete, on a line of its own."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from .core import wording
from .core.blame import Finding
from .narrative import Chapter, Story
from .narrative_checkpoints import published, resume_record


def encode_round(story: Story, chapter: Chapter) -> bytes:
    return msgspec.json.encode(round_record(story, chapter))


def round_record(story: Story, chapter: Chapter) -> dict[str, Any]:
    """Everything that is known of one round. `end` is the job's, and only in its last round."""
    round, verdict, settings = chapter.round, chapter.verdict, story.job.settings
    return {
        "job": story.header.job,
        "attempt": story.header.attempt,
        "round": None if round is None else round.index,
        "outcome": chapter.outcome,
        "began": _stamp(chapter.began),
        "entered": _stamp(chapter.entered),
        "fault": _stamp(chapter.fault),
        "completed": _stamp(chapter.completed),
        "world_size": 0 if round is None else round.size,
        "reserves": chapter.reserves,
        "step": chapter.step,
        "seats": _seats(story, chapter),
        "story": chapter.story,
        "phases": chapter.phases,
        "resume": resume_record(chapter),
        "checkpoints": [{"at": _stamp(note.at), **note.tell.fields} for note in published(chapter)],
        "cause": verdict and _finding(story, chapter, verdict.cause),
        "companions": [_finding(story, chapter, finding) for finding in verdict.companions] if verdict else [],
        "victims": [_finding(story, chapter, finding) for finding in verdict.victims] if verdict else [],
        "killed": {} if round is None else dict(sorted(round.late.items())),
        "controller_restarted": round is not None and round.interrupted_by_restart,
        "events": [
            {"at": _stamp(note.at), "event": note.tell.event, "level": note.tell.level, "text": note.tell.text}
            for note in chapter.notes
        ],
        "budget": {
            "rounds": 0 if round is None else round.index + 1,
            "max_iterations": settings.max_iterations,
            "rank_faults_of_job": story.job.budget.rank_faults,
            "max_rank_faults": settings.max_rank_faults,
        },
        "end": _end(story) if chapter is story.chapters[-1] else None,
    }


def _seats(story: Story, chapter: Chapter) -> dict[int, dict[str, Any]]:
    round = chapter.round
    if round is None:
        return {}
    return {
        rank: {
            "slot": record.slot,
            "life": round.lives[rank],
            "pid": story.pids.get((record.slot, round.lives[rank]), 0),
            "host": record.agent.host,
        }
        for rank, record in sorted(round.seats.items())
    }


def _finding(story: Story, chapter: Chapter, finding: Finding) -> dict[str, Any]:
    fault = finding.fault
    process = (fault.slot, fault.life)
    assert chapter.round is not None
    return {
        "rank": finding.rank,
        "at": _stamp(chapter.evidence[process]),
        "host": chapter.round.seats[finding.rank].agent.host,
        "pid": story.pids.get(process, 0),
        "summary": wording.describe(fault, finding.rank),
        **{name: getattr(fault, name) for name in fault.__struct_fields__},
        "exit": story.exits.get(process),
    }


def _end(story: Story) -> dict[str, Any] | None:
    return None if story.ended is None else {"code": story.ended.code, "reason": story.ended.reason}


def _stamp(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
