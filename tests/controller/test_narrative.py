"""What a journal tells: every round, its cause in full, and whatever is readable of a damaged one."""

import json
from pathlib import Path

import msgspec
import pytest

from perdure.controller.core.events import StopAsked
from perdure.controller.journal import Journal, JournalError
from perdure.controller.narrative import Story, attempts, find_journal, read_story
from perdure.controller.narrative_json import encode_round
from perdure.controller.narrative_text import tell, tell_round
from perdure.protocol.faults import FaultKind
from perdure.protocol.messages import Stage

from .past import Past


def told(story: Story, round: int | None = None) -> str:
    chapter = None if round is None else story.chapter(round)
    return "\n".join(tell(story) if chapter is None else tell_round(story, chapter))


@pytest.fixture
def past(tmp_path: Path) -> Past:
    """A job of three ranks and no reserve that runs its round 0."""
    written = Past(tmp_path)
    written.opened()
    written.attached()
    written.entered(0, 0, 1, 2)
    return written


def recover(past: Past) -> None:
    """Rank 1 raises in round 0, and all run again."""
    past.failed(0, 1)
    past.gathered(0, 0, 1, 2)
    past.entered(1, 0, 1, 2)


def complete(past: Past, round: int) -> None:
    past.reported(*(past.state("n0", i, Stage.RETURNED, round=round, step=99) for i in range(3)), after=5.0)
    past.reported(*(past.state("n0", i, Stage.OUTSIDE, round=round) for i in range(3)))
    for index in range(3):
        past.died(round, index, code=0)
    past.close()


def test_a_round_is_told_with_its_cause_and_its_times(past: Past) -> None:
    recover(past)
    complete(past, 1)
    story = read_story(past.path)
    text = told(story)
    assert "job llama, attempt 1: ended with code 0 (COMPLETED)" in text
    assert "spent       2 rounds, 1 rank fault\n" in text
    assert "ROUND 0" in text
    assert "3 ranks, 0 reserves; formed in 0.500 s, ran 1.0 s to step 7" in text
    assert "seats       ranks 0-2: n0/0-2" in text
    line = (
        "rank 1 (n0/1): ValueError: boom at train.py:12, step 7; world 3, 0 reserves; abort 7.0 + plan 0.0 + enter 3.0"
    )
    assert f"ended       {line} = 10.0 ms\n" in text
    assert "exception of rank 1: slot n0/1, life 1, pid 101, host n0" in text
    assert "at /x/train.py:12" in text
    assert '|   File "train.py", line 12, in train' in text
    assert "every rank returned" in text
    assert "ran 5.0 s to step 99" in text
    assert text.rstrip().endswith("code 0 (COMPLETED): completed")


def test_times_are_wall_times_that_each_controller_noted(past: Past) -> None:
    recover(past)
    past.now = 5.0  # another machine's clock
    past.opened(wall=1_800_000_100.0)
    past.close()
    story = read_story(past.path)
    assert story.chapters[1].began == pytest.approx(1_800_000_000.5)
    assert story.last == pytest.approx(1_800_000_100.0)
    assert "2 controllers one after the other" in told(story)
    assert "controller incarnation 2 leads from the journal" in told(story, 1)


def test_a_death_tells_its_signal_and_its_last_lines(past: Past) -> None:
    past.died(0, 2, stderr="terminate called\nwithout reason")
    past.close()
    text = told(read_story(past.path))
    assert "signal of rank 2" in text
    assert "killed by SIGKILL" in text
    assert "stderr      | terminate called\n              | without reason" in text
    assert "NO END" in text
    assert "no controller leads it" in text


def test_a_kill_of_ours_says_why(past: Past) -> None:
    past.failed(0, 1, kind=FaultKind.SOFT_HANG, message="no progress for 2 s (soft_timeout=2)", detail="", stale_s=2.0)
    past.died(0, 1, code=-15, killed_by="no progress for 4 s (hard_timeout=4)")
    past.gathered(0, 0, 2)
    past.close()
    text = told(read_story(past.path))
    assert "2.00 s without progress when judged" in text
    assert "process     killed by SIGTERM, by perdure: no progress for 4 s (hard_timeout=4)" in text
    assert "killed: rank 1 (hard_timeout=4)" in text


def test_companions_and_victims_are_told_apart(past: Past) -> None:
    past.failed(0, 0, message="RuntimeError: Connection closed by peer", peer_error=True)
    past.failed(0, 1, after=0.001)
    past.failed(0, 2, after=0.001, message="KeyError: 'k'")
    past.close()
    text = told(read_story(past.path), 0)
    assert "exception of rank 1" in text
    assert "also failed" in text
    assert "rank 2 (n0/2): KeyError: 'k'" in text
    assert "victims" in text
    assert "rank 0 (n0/0): RuntimeError: Connection closed by peer" in text


def test_the_same_cause_is_told_in_full_only_once_and_with_its_round_always(past: Past) -> None:
    recover(past)
    past.failed(1, 1)
    past.close()
    story = read_story(past.path)
    assert told(story).count("Traceback") == 1
    assert "cause       the same as in round 0; exception of rank 1" in told(story)
    assert "Traceback" in told(story, 1)


def test_a_long_traceback_is_cut_unless_its_round_is_asked_for(past: Past) -> None:
    past.failed(0, 1, detail="\n".join(f"frame {number}" for number in range(100)))
    past.close()
    story = read_story(past.path)
    assert "70 lines left out here, shown with --round" in told(story)
    assert "frame 99" in told(story)
    assert "frame 50" not in told(story)
    assert "frame 50" in told(story, 0)


def test_budgets_are_counted_against_their_limits(tmp_path: Path) -> None:
    past = Past(tmp_path, max_rank_faults=5, max_iterations=8)
    past.opened()
    past.attached()
    past.entered(0, 0, 1, 2)
    recover(past)
    past.close()
    text = told(read_story(past.path))
    assert "spent       2 of 8 rounds (max_iterations), 1 of 5 rank faults (max_rank_faults)" in text
    assert "rank fault 1 of 5, round 2 of 8" in text


def test_text_from_ranks_cannot_control_the_terminal(past: Past) -> None:
    past.failed(0, 1, message="bad\x1b[2J", detail="a\x1b[31m\nb\x07")
    past.close()
    text = told(read_story(past.path))
    assert text.replace("\n", "").isprintable()


def test_one_json_object_a_round_tells_everything(past: Past) -> None:
    recover(past)
    complete(past, 1)
    story = read_story(past.path)
    first, second = [json.loads(encode_round(story, chapter)) for chapter in story.rounds]
    assert (first["round"], first["outcome"], first["world_size"], first["end"]) == (0, "fault", 3, None)
    assert first["phases"] == {"abort_ms": 7.0, "plan_ms": 0.0, "enter_ms": 3.0, "total_ms": 10.0}
    assert first["cause"]["kind"] == "exception"
    assert first["cause"]["detail"].startswith("Traceback")
    assert first["seats"]["1"] == {"slot": "n0/1", "life": 1, "pid": 101, "host": "n0"}
    assert (second["round"], second["outcome"]) == (1, "completed")
    assert second["end"] == {"code": 0, "reason": "completed"}


def test_a_job_that_never_ran_tells_its_end(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.opened()
    past.write(StopAsked(143, "SIGTERM to the controller"))
    past.tick(20.0)
    past.close()
    story = read_story(past.path)
    assert "code 143 (TERMINATED): SIGTERM to the controller" in told(story)
    assert json.loads(encode_round(story, story.chapters[0]))["end"]["code"] == 143


# ---- what cannot be read ----------------------------------------------------------------------------------------


def test_damage_ends_the_story_with_its_offset_and_what_came_before_is_told(past: Past) -> None:
    recover(past)
    offset = past.write(StopAsked(143, "the damaged one"))
    past.write(StopAsked(143, "behind it"))
    past.close()
    content = bytearray(past.path.read_bytes())
    content[offset + 20] ^= 0xFF
    past.path.write_bytes(content)
    story = read_story(past.path)
    assert f"damaged at offset {offset}" in story.trouble
    assert "ROUND 1" in told(story)


def test_a_torn_tail_is_no_trouble(past: Past) -> None:
    recover(past)
    past.close()
    whole = past.path.read_bytes()
    past.path.write_bytes(whole[:-3])
    story = read_story(past.path)
    assert story.trouble == ""
    assert "ROUND 0" in told(story)
    assert past.path.read_bytes() == whole[:-3], "reading changes nothing"


def test_a_record_that_is_no_event_is_named(past: Past) -> None:
    journal = Journal.open(past.path, "llama", 1)
    offset = journal.append(msgspec.msgpack.encode(["not", "an", "event"]))
    journal.close()
    story = read_story(past.path)
    assert f"the record at offset {offset} is no event of this version" in story.trouble


def test_an_event_that_the_core_refuses_is_named(past: Past) -> None:
    gone = past.state("n0", 0, Stage.GONE, round=0)  # without an exit record, which no agent ever sends
    past.reported(gone)
    past.close()
    assert "Reported at offset" in read_story(past.path).trouble


@pytest.mark.parametrize(("write", "why"), [
    (lambda path: path.write_bytes(b"hello\n" * 100), "not a perdure journal"),
    (lambda path: path.write_bytes(b""), "not a perdure journal"),
    (lambda path: Journal.open(path, "llama", 1).close(), "holds no event"),
    (lambda path: path.mkdir(), "not a regular file"),
])  # fmt: skip
def test_what_is_no_journal_of_a_job_is_refused(tmp_path: Path, write: object, why: str) -> None:
    assert callable(write)
    write(tmp_path / "journal")
    with pytest.raises(JournalError, match=why):
        read_story(tmp_path / "journal")


def test_a_journal_whose_first_event_opens_no_job_is_refused(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.attached()
    past.close()
    with pytest.raises(JournalError, match="journal of no job: its first event, at offset"):
        read_story(past.path)


def test_a_journal_is_found_in_a_run_directory_and_in_old_attempts(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="holds no journal"):
        find_journal(tmp_path)
    with pytest.raises(JournalError, match="does not exist"):
        find_journal(tmp_path / "nowhere")
    for name in ("attempt-2", "attempt-10", "attempt-11.moving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal").touch()
    assert attempts(tmp_path) == [2, 10]
    assert find_journal(tmp_path) == tmp_path / "attempt-10" / "journal"
    (tmp_path / "journal").touch()
    assert find_journal(tmp_path) == tmp_path / "journal"
    assert find_journal(tmp_path / "attempt-2") == tmp_path / "attempt-2" / "journal"


# ---- checkpoints ----------------------------------------------------------------------------------------------


def test_what_was_published_and_what_each_round_resumed_from_is_told(past: Past) -> None:
    for step in range(10, 90, 10):
        past.saved(step, 0)
    recover(past)
    complete(past, 1)
    story = read_story(past.path)
    text = told(story)
    assert text.count("resumed     from step 80 (round 0), durable tier, saved by 3 ranks\n") == 1
    assert "step 10 (round 0) is published: 3 ranks, 3.0 kB; durable after 0.25 s\n" in text
    assert "... 2 more, shown with --round ..." in text
    assert "step 40 (round 0) is published" not in text
    assert "step 40 (round 0) is published" in told(story, 0)
    first, second = (json.loads(encode_round(story, chapter)) for chapter in story.rounds)
    assert [each["step"] for each in first["checkpoints"]] == list(range(10, 90, 10))
    assert (first["resume"], second["checkpoints"]) == (None, [])
    assert (second["resume"]["step"], second["resume"]["local"], second["resume"]["durable"]) == (80, False, True)
