"""Every way in which a file can be broken: a torn tail is cut, and damage is named and left alone."""

from pathlib import Path

import msgspec
import pytest

from perdure.controller import journal_format
from perdure.controller.journal import Journal, JournalError, read_header, read_records
from perdure.controller.journal_format import MAGIC, PREFIX, JournalHeader, encode_header, frame

PAYLOADS = [b"first", b"second record", b"\0\0\0\0third\0"]


def write_journal(path: Path, payloads: list[bytes]) -> list[int]:
    """A journal with these records; the offsets at which they stand, and the end."""
    journal = Journal.open(path, "llama", 1)
    offsets = [journal.append(payload) for payload in payloads]
    offsets.append(journal.end)
    journal.close()
    return offsets


def payloads_in(path: Path) -> list[bytes]:
    return [payload for _, payload in read_records(path)]


def damage_of(path: Path) -> str:
    try:
        payloads_in(path)
    except JournalError as error:
        return str(error)
    return ""


def test_truncated_anywhere_it_keeps_every_whole_record(tmp_path: Path) -> None:
    offsets = write_journal(tmp_path / "whole", PAYLOADS)
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size < offsets[0]:
            with pytest.raises(JournalError, match="header at offset 0 is damaged"):
                Journal.open(path, "llama", 1)
            assert path.read_bytes() == whole[:size]
            continue
        kept = max(index for index, offset in enumerate(offsets) if offset <= size)
        journal = Journal.open(path, "llama", 1)
        assert journal.cut == size - offsets[kept]
        assert path.stat().st_size == offsets[kept]
        journal.append(b"after")
        journal.close()
        assert payloads_in(path) == [*PAYLOADS[:kept], b"after"]


def test_an_empty_file_becomes_a_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    assert write_journal(tmp_path / "journal", PAYLOADS)
    assert payloads_in(tmp_path / "journal") == PAYLOADS


def test_a_flipped_bit_is_a_torn_tail_in_the_last_record_and_an_error_that_names_the_offset_elsewhere(
    tmp_path: Path,
) -> None:
    offsets = write_journal(tmp_path / "whole", PAYLOADS)
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "journal"
    for place in range(len(whole)):
        record = max(offset for offset in (0, *offsets) if offset <= place)
        for bit in range(8):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            error = damage_of(path)
            if error:
                assert f"offset {record}" in error
                with pytest.raises(JournalError):
                    Journal.open(path, "llama", 1)
                assert path.read_bytes() == broken
            else:
                assert record == offsets[-2]
                assert payloads_in(path) == PAYLOADS[:-1]


def test_zeros_behind_the_last_record_are_cut(tmp_path: Path) -> None:
    """Some file systems keep the new size and lose the data when the power goes."""
    path = tmp_path / "journal"
    end = write_journal(path, PAYLOADS)[-1]
    half = frame(end, b"x" * 100)[:50]
    for tail in (b"\0" * 3, b"\0" * 5000, half + b"\0" * 5000):
        path.write_bytes(path.read_bytes()[:end] + tail)
        journal = Journal.open(path, "llama", 1)
        assert journal.cut == len(tail)
        journal.close()
        assert payloads_in(path) == PAYLOADS


def test_garbage_behind_the_last_record_is_damage_if_it_is_more_than_one_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    end = write_journal(path, PAYLOADS)[-1]
    path.write_bytes(path.read_bytes() + PREFIX.pack(4, 1) + b"abcd" + b"more")
    with pytest.raises(JournalError, match=f"offset {end} "):
        Journal.open(path, "llama", 1)


def test_a_long_record_whose_length_is_damaged_does_not_swallow_those_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    offsets = write_journal(path, [b"a" * 100, b"b" * 70_000, b"c"])
    content = bytearray(path.read_bytes())
    content[offsets[0] + 2] = 0x7F
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"offset {offsets[0]} .*nothing was cut"):
        Journal.open(path, "llama", 1)


def test_a_record_quoted_in_a_torn_one_does_not_pass_for_a_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    offsets = write_journal(path, [b"quoted"])
    quote = path.read_bytes()[offsets[0] : offsets[1]]
    torn = frame(offsets[1], b"----" + quote + b"----" * 10)[:-5]
    path.write_bytes(path.read_bytes() + torn)
    journal = Journal.open(path, "llama", 1)
    assert journal.cut == len(torn)
    journal.close()


def test_a_later_format_is_named(tmp_path: Path) -> None:
    later = MAGIC + msgspec.msgpack.encode([journal_format.FORMAT + 1, {"anything": 1}])
    (tmp_path / "journal").write_bytes(frame(0, later))
    with pytest.raises(JournalError, match="journal format 2; this perdure reads format 1"):
        Journal.open(tmp_path / "journal", "llama", 1)


@pytest.mark.parametrize("content", [b"hello", b"epoch,loss\n1,2.5\n" * 100, b"\0" * 4096, frame(0, b"no magic")])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a perdure journal"):
        Journal.open(path, "llama", 1)
    assert path.read_bytes() == content


def test_the_header_is_what_it_says(tmp_path: Path) -> None:
    header = JournalHeader(1, "llama", 3, 5.0)
    (tmp_path / "journal").write_bytes(frame(0, encode_header(header)))
    assert read_header(tmp_path / "journal") == header
