"""The log is complete and readable, and whatever happens to it nobody waits."""

import io
import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.controller.log_output import QUEUE_LIMIT
from perdure.controller.logbook import Logbook


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "perdure.jsonl").read_text().splitlines()]


def texts(folder: Path) -> list[str]:
    return (folder / "perdure.log").read_text().splitlines()


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread, 20 s at most."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in 20 s"
        select.select([], [], [], 0.002)


def test_a_line_for_people_and_a_line_for_programs(tmp_path: Path) -> None:
    stream = io.StringIO()
    book = Logbook(tmp_path, "llama", "head", stream)
    book.line("start", "controller 1 leads job llama: 4 agents expected")
    book.line("fault", "exit: killed by SIGKILL", round=7, rank=3, slot="n2/1", host="n2", signal=9)
    book.line("node_lost", "no sign of life for 60 s", level="error", round=12, host="n7")
    book.line("late", "has not quiesced", level="warning", rank=-1, slot="n2/1")
    book.close()
    lines = texts(tmp_path)
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", "", line) for line in lines] == [
        "                                   START        controller 1 leads job llama: 4 agents expected",
        "      round 7   rank 3 (n2/1)      FAULT        exit: killed by SIGKILL",
        "ERROR round 12  n7                 NODE_LOST    no sign of life for 60 s",
        "WARN            reserve (n2/1)     LATE         has not quiesced",
    ]
    assert stream.getvalue().splitlines() == lines
    fault = records(tmp_path)[1]
    stamp = fault.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", stamp)
    assert fault == {
        "seq": 2,
        "level": "info",
        "job": "llama",
        "round": 7,
        "rank": 3,
        "slot": "n2/1",
        "host": "n2",
        "event": "fault",
        "text": "exit: killed by SIGKILL",
        "signal": 9,
    }


@pytest.mark.parametrize(
    "text",
    ["two\nlines\r\n", "\x1b[2J\x07bell", "a\u2028b\x85c\u202ed", "nul\0", "lone \udce9 surrogate", "héllo ✓"],
)
def test_one_record_is_one_line_whatever_the_text(tmp_path: Path, text: str) -> None:
    book = Logbook(tmp_path, "llama", "head")
    book.line("note", text)
    book.line(text, "event", slot=text, host=text)
    book.close()
    raw = (tmp_path / "perdure.log").read_text(encoding="utf-8")
    assert len(raw.splitlines()) == raw.count("\n") == 2
    assert "\x1b" not in raw
    assert len(records(tmp_path)) == 2
    assert book.lost == {}


def test_fields_can_be_anything(tmp_path: Path) -> None:
    class Nasty:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    book = Logbook(tmp_path, "llama", "head")
    book.line("a", "odd", path=Path("/x"), nan=float("nan"), error=ValueError("v"), job="another", seq=99)
    book.line("b", "nasty", nasty=Nasty(), fine=1)
    book.line("c", "huge", huge="h" * 1_000_000)
    book.line("d", "t" * 1_000_000)
    book.close()
    odd, nasty, huge, long = records(tmp_path)
    assert (odd["job"], odd["seq"], odd["nan"], odd["error"]) == ("llama", 1, None, "ValueError('v')")
    assert nasty["left_out"] == "fields nasty, fine: RuntimeError: no repr"
    assert "fields huge: 1000" in huge["left_out"]
    assert "characters cut" in long["text"]
    assert len(texts(tmp_path)[3]) < 20_000


def test_a_longer_text_has_its_first_line_for_people_and_the_rest_in_detail(tmp_path: Path) -> None:
    stream = io.StringIO()
    book = Logbook(tmp_path, "llama", "head", stream)
    book.line("ending", "ending the job with code 1: boom\nTraceback:\n  File x\nboom")
    book.close()
    assert texts(tmp_path)[0].endswith("ending the job with code 1: boom [3 more lines in perdure.jsonl]")
    assert stream.getvalue().count("\n") == 1
    (record,) = records(tmp_path)
    assert record["text"] == "ending the job with code 1: boom"
    assert record["detail"] == "Traceback:\n  File x\nboom"


def test_the_stream_is_spared_what_only_a_search_needs(tmp_path: Path) -> None:
    stream = io.StringIO()
    book = Logbook(tmp_path, "llama", "head", stream)
    book.line("setting", "soft_timeout = 60 s (default)", level="debug")
    book.line("settings", "all settings have their defaults")
    book.close()
    assert "soft_timeout" not in stream.getvalue()
    assert [record["event"] for record in records(tmp_path)] == ["setting", "settings"]
    assert "soft_timeout" in texts(tmp_path)[0]


def test_the_columns_say_who_so_the_text_does_not(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "llama", "head")
    book.line("fault", "rank 3 (n2/1): killed by SIGKILL", round=7, rank=3, slot="n2/1")
    book.line("killed", "rank 3 (n2/1) was killed: no progress", round=7, rank=3, slot="n2/1")
    book.line("slot_gone", "n2/15: killed by SIGKILL", slot="n2/1")
    book.close()
    assert [line[59:] for line in texts(tmp_path)] == [
        "FAULT        killed by SIGKILL",
        "KILLED       was killed: no progress",
        "SLOT_GONE    n2/15: killed by SIGKILL",
    ]
    assert records(tmp_path)[0]["text"] == "rank 3 (n2/1): killed by SIGKILL"


def test_without_a_directory_only_the_stream_is_written() -> None:
    stream = io.StringIO()
    book = Logbook(None, "llama", "head", stream)
    book.line("start", "hello")
    book.close()
    assert "START        hello\n" in stream.getvalue()
    Logbook(None, "llama", "head").close()


def test_two_threads_write_at_once(tmp_path: Path) -> None:
    book = Logbook(tmp_path, "llama", "head")

    def write(name: str) -> None:
        for count in range(1000):
            book.line("note", f"{name} {count}")

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    book.close(20)
    found = records(tmp_path)
    assert sorted(record["seq"] for record in found) == list(range(1, 2001))
    for name in "ab":
        own = [record["text"] for record in found if record["text"].startswith(name)]
        assert own == [f"{name} {count}" for count in range(1000)]
    assert len(texts(tmp_path)) == 2000


def test_half_a_line_of_a_killed_writer_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "perdure.log").write_text("2026-11-30 03:12:45.120 hal")
    book = Logbook(tmp_path, "llama", "head")
    book.line("start", "again")
    book.close()
    assert len(texts(tmp_path)) == 2
    assert texts(tmp_path)[1].endswith("again")


def test_a_full_disk_costs_lines_and_nothing_else(
    small_disk: Path, fill: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    book = Logbook(small_disk, "llama", "head")
    book.line("first", "before")
    until(lambda: len(texts(small_disk)) == 1 if (small_disk / "perdure.log").exists() else False)
    filler = fill(small_disk)
    for _ in range(300):
        book.line("note", "x" * 500)
    until(lambda: len(book.lost) == 2)
    until(lambda: not any(output._queue for output in (*book._readable, *book._structured)))
    filler.unlink()
    book.line("last", "after")
    book.close(20)
    lost = book.lost[str(small_disk / "perdure.log")]
    assert 0 < lost <= 300
    lines = texts(small_disk)
    assert len(lines) == 1 + (300 - lost) + 2
    assert f"LOG_GAP      {lost} lines are missing here" in lines[-2]
    assert lines[-1].endswith("after")
    found = records(small_disk)
    assert found[-2]["missing"] == book.lost[str(small_disk / "perdure.jsonl")]
    assert capfd.readouterr().err.count("No space left on device; its lines are dropped") == 2


def test_a_reader_that_leaves_costs_its_own_lines_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        book = Logbook(tmp_path, "llama", "head", head.stdin)
        book.line("note", "the first")
        assert head.stdout.readline().endswith("the first\n")
        head.wait(20)
        for _ in range(100):
            book.line("note", "more")
        book.close(20)
    assert len(texts(tmp_path)) == 101
    assert list(book.lost.values()) == [100]
    assert capfd.readouterr().err.count("Broken pipe") == 1


def test_a_fifo_without_a_reader_and_a_device_that_is_full(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "perdure.log")
    (tmp_path / "perdure.jsonl").symlink_to("/dev/full")
    book = Logbook(tmp_path, "llama", "head")
    for _ in range(10):
        book.line("note", "nobody listens")
    until(lambda: sorted(book.lost.values()) == [10, 10])
    reader = os.open(tmp_path / "perdure.log", os.O_RDONLY | os.O_NONBLOCK)
    book.line("note", "somebody listens")
    book.close(20)
    heard = os.read(reader, 65536).decode().splitlines()
    os.close(reader)
    assert "10 lines are missing" in heard[0]
    assert heard[1].endswith("somebody listens")


def test_a_frozen_reader_holds_nobody_back(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "perdure.log")
    frozen = os.open(tmp_path / "perdure.log", os.O_RDONLY | os.O_NONBLOCK)
    reading, writing = os.pipe()
    stream = open(writing, "w")  # noqa: SIM115 - closed below
    book = Logbook(tmp_path, "llama", "head", stream)
    slowest = 0.0
    text = "x" * 10_000
    count = 2 * QUEUE_LIMIT // len(text)
    for _ in range(count):
        begun = time.monotonic()
        book.line("note", text)
        slowest = max(slowest, time.monotonic() - begun)
    begun = time.monotonic()
    book.close(0.2)
    assert time.monotonic() - begun < 1.0
    assert slowest < 0.5
    assert book.lost[str(tmp_path / "perdure.log")] > count // 2
    assert book.lost[str(stream.name)] > count // 2
    os.close(frozen)
    os.close(reading)
    for output in book._readable:
        output._thread.join(20)
    stream.close()


def test_half_a_line_in_a_pipe_is_ended_before_the_next(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading, "rb", buffering=0) as reader:
        book = Logbook(None, "llama", "head", stream)
        for _ in range(20):
            book.line("note", "y" * 9_001)
        until(lambda: sum(book.lost.values()) > 0)
        until(lambda: not book._streams[0]._queue)
        heard = reader.read(1 << 20) or b""
        book.line("last", "after")
        book.close(20)
        heard += reader.read(1 << 20) or b""
    lines = heard.decode().splitlines()
    assert lines[-1].endswith("after")
    assert re.match(r"\d{4}-.{18} WARN .* lines are missing", lines[-2])
    assert len(lines[-3]) < len(lines[0]), "the pipe was full in the middle of a line"


def test_a_closed_stream_and_lines_after_close_are_counted(tmp_path: Path) -> None:
    stream = io.StringIO()
    book = Logbook(tmp_path, "llama", "head", stream)
    stream.close()
    book.line("note", "one")
    book.close(20)
    book.line("note", "late")
    assert sorted(book.lost.values()) == [1, 1, 2]
