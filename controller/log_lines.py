"""What a line of the log looks like, for people and for programs. One record is always one line.

For people, in columns, so that a screenful can be read down and `grep 'round 7 '`, `grep n2/1` or `grep ERROR` find
what they should:

    2026-11-30 03:12:45.120        round 7   rank 3 (n2/1)       FAULT         killed by SIGKILL, step 4120

For programs, one JSON object with everything that is known, `seq` included: wall time may jump, `seq` never does.
"""

from datetime import datetime
from typing import Any

import msgspec

from ..protocol.faults import DETAIL_LIMIT, clip

LINE_LIMIT = 262_144
"""Bytes of the largest JSON line; the fields of a larger one are left out and named."""

_LEVEL_WIDTH = 5
_ROUND_WIDTH = 9
_WHO_WIDTH = 18
_EVENT_WIDTH = 12

_LEVEL_NAMES = {"info": "", "warning": "WARN"}
_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


class Line(msgspec.Struct, frozen=True):
    """One record of the log. at: wall time."""

    at: datetime
    seq: int
    level: str
    job: str
    round: int | None
    rank: int | None
    slot: str | None
    host: str
    event: str
    text: str


def readable(line: Line, own_host: str) -> bytes:
    """`line` for people. The host is said only where the slot does not say it and it is not the log's own."""
    level = _LEVEL_NAMES.get(line.level, line.level.upper())
    round_ = "" if line.round is None else f"round {line.round}"
    who = _who(line, own_host)
    columns = (
        f"{line.at:%Y-%m-%d %H:%M:%S}.{line.at.microsecond // 1000:03d}",
        level.ljust(_LEVEL_WIDTH),
        round_.ljust(_ROUND_WIDTH),
        who.ljust(_WHO_WIDTH),
        line.event.upper().ljust(_EVENT_WIDTH),
        clip(_without(who, line.text)),
    )
    return one_line(" ".join(columns).rstrip()).encode("utf-8", "backslashreplace") + b"\n"


def _without(who: str, text: str) -> str:
    """`text` without the name at its beginning, if the column before it says that already."""
    rest = text.removeprefix(who) if who else text
    return rest.removeprefix(":").removeprefix(" ") if rest[:1] in (":", " ") else text


def _who(line: Line, own_host: str) -> str:
    rank = "" if line.rank is None else ("reserve" if line.rank < 0 else f"rank {line.rank}")
    if line.slot is not None:
        return f"{rank} ({line.slot})" if rank else line.slot
    if line.host != own_host:
        return f"{rank} ({line.host})" if rank else line.host
    return rank


def one_line(text: str) -> str:
    """`text` with everything escaped that is not to be printed: line ends, terminal controls, direction marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    known = _ESCAPES.get(ord(character))
    return known if known else character.encode("unicode_escape").decode("ascii")


def structured(line: Line, fields: dict[str, Any]) -> bytes:
    """`line` and `fields` for programs. A field that bears the name of a column is left out."""
    columns: dict[str, Any] = {
        "time": line.at.isoformat(timespec="milliseconds"),
        "seq": line.seq,
        "level": line.level,
        "job": line.job,
        "round": line.round,
        "rank": line.rank,
        "slot": line.slot,
        "host": line.host,
        "event": line.event,
        "text": clip(line.text),
    }
    try:
        encoded = msgspec.json.encode({**columns, **fields, **columns}, enc_hook=repr)
        if len(encoded) <= LINE_LIMIT:
            return _on_one_line(encoded)
        problem = f"{len(encoded)} bytes"
    except Exception as error:  # a field's own __repr__ may do anything, and a log line must not
        problem = f"{type(error).__name__}: {error}"
    columns["left_out"] = f"fields {', '.join(fields)}: {problem}"[:DETAIL_LIMIT]
    return _on_one_line(msgspec.json.encode({key: _clean(value) for key, value in columns.items()}))


def _on_one_line(encoded: bytes) -> bytes:
    """JSON escapes line feeds, but not the other characters at which many readers, Python's too, split lines."""
    for raw, escaped in ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")):
        encoded = encoded.replace(raw, escaped)
    return encoded + b"\n"


def _clean(value: Any) -> Any:
    """Lone surrogates (file names, environment) have no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
