"""The journal's file format: how bytes become records, and what a bad record means.

    file   = header record, record, record, ...
    record = length u32 | crc32 u32 | payload       (little endian; 1 to RECORD_LIMIT bytes of payload)

The checksum covers the record's own offset, its length and its payload. So a flipped length is noticed, and a block
that the disk put in the wrong place, or a record quoted inside another one, never passes for a record.

A bad record is one of two things, and they must not be confused:

- A *torn tail*: the last write did not finish. Nothing that was acknowledged is lost; the tail may be cut.
- *Damage*: something that had been written is gone. Cutting there would drop good records behind it, so nobody does.

It is a torn tail only if it is the last thing in the file: it runs to the end of the file or past it, or only zeros
follow (some file systems record the new size before the data, and after a power cut the rest reads as zeros), and no
whole record begins anywhere behind it.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

MAGIC = b"perdure journal\n"
FORMAT = 1

RECORD_LIMIT = (16 << 20) - 1
"""Bytes of the largest payload: the highest byte of a length is always zero, which `_holds_record` makes use of."""

PREFIX = struct.Struct("<II")
_PLACE = struct.Struct("<QI")

_SEARCH_LIMIT = 256 << 20
"""Bytes checksummed at most in search of records behind a bad one."""


class JournalError(Exception):
    """The journal cannot be used. The text names the file, the reason and what to do."""


class JournalHeader(msgspec.Struct, frozen=True, array_like=True):
    """Payload of the first record, behind MAGIC. `created` is wall time, for people only."""

    format: int
    job: str
    attempt: int
    created: float


def frame(offset: int, payload: bytes) -> bytes:
    """`payload` as the record that stands at `offset`."""
    if not 0 < len(payload) <= RECORD_LIMIT:
        raise JournalError(f"a journal record must have 1 to {RECORD_LIMIT} bytes, this one has {len(payload)}")
    return PREFIX.pack(len(payload), _checksum(offset, payload)) + payload


def _checksum(offset: int, payload: bytes | memoryview) -> int:
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(offset, len(payload))))


def encode_header(header: JournalHeader) -> bytes:
    return MAGIC + msgspec.msgpack.encode(header)


class RecordReader:
    """Iterates over the whole records of an open file, from its start: (offset, payload).

    After the last one, `end` is the offset behind it and `torn` the number of bytes of a torn tail there. Damage raises
    JournalError, after every good record before it was given. `header` is set once iteration has begun; its record is
    not among those given.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        # A live journal grows meanwhile; what comes later is not this reader's.
        self._size = os.fstat(file.fileno()).st_size
        self.end = 0
        self.torn = 0
        self.header = self._read_header()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while self.end < self._size:
            offset = self.end
            payload = self._read_record()
            if payload is None:
                self._require_torn(offset)
                self.torn = self._size - offset
                return
            yield offset, payload

    def _read_record(self) -> bytes | None:
        """The record at `end`, which moves behind it; None, and `end` stays, if it is not whole."""
        self._file.seek(self.end)
        prefix = self._file.read(PREFIX.size)
        if len(prefix) < PREFIX.size:
            return None
        length, checksum = PREFIX.unpack(prefix)
        if not 0 < length <= RECORD_LIMIT or self.end + PREFIX.size + length > self._size:
            return None
        payload = self._file.read(length)
        if len(payload) < length or _checksum(self.end, payload) != checksum:
            return None
        self.end += PREFIX.size + length
        return payload

    def _read_header(self) -> JournalHeader:
        payload = self._read_record()
        if payload is None or not payload.startswith(MAGIC):
            raise JournalError(
                f"{self._path} is not a perdure journal, or its header at offset 0 is damaged ({self._size} bytes); "
                "nothing was changed; move the file away, or name another run directory"
            )
        try:
            # The format number comes first and is read alone, so that a later format is named, not called damaged.
            fields = msgspec.msgpack.decode(payload[len(MAGIC) :], type=list[msgspec.Raw])
            number = msgspec.msgpack.decode(fields[0], type=int)
            if number != FORMAT:
                raise JournalError(f"{self._path} has journal format {number}; this perdure reads format {FORMAT}")
            return msgspec.msgpack.decode(payload[len(MAGIC) :], type=JournalHeader)
        except (msgspec.MsgspecError, IndexError) as error:
            raise JournalError(f"{self._path}: the header at offset 0 cannot be understood: {error}") from error

    def _require_torn(self, offset: int) -> None:
        """Return if the bad record at `offset` is a torn tail, else raise."""
        count = self._size - offset
        if count <= PREFIX.size + RECORD_LIMIT:
            self._file.seek(offset)
            if _is_torn(self._file.read(count), offset):
                return
        raise JournalError(
            f"{self._path} is damaged at offset {offset} of {self._size}: the record there fails its checksum and "
            "is not the last one; nothing was cut. Restore the file from a copy, or move it away to start the job "
            "without its past"
        )


def _is_torn(tail: bytes, offset: int) -> bool:
    """Whether `tail`, which begins with a bad record and stands at `offset`, is a write that did not finish."""
    if _holds_record(tail, offset):
        return False
    if len(tail) < PREFIX.size:
        return True
    length: int = PREFIX.unpack_from(tail)[0]
    if not 0 < length <= RECORD_LIMIT:
        return not tail.strip(b"\0")
    return not tail[PREFIX.size + length :].strip(b"\0")


def _holds_record(tail: bytes, offset: int) -> bool:
    """Whether a whole record begins anywhere in `tail` behind its first byte."""
    view = memoryview(tail)
    budget = _SEARCH_LIMIT
    # The highest byte of a length is zero: only places where it is are looked at.
    high = tail.find(0, 4)
    while high != -1:
        start = high - 3
        if start + PREFIX.size > len(tail):
            return False
        length, checksum = PREFIX.unpack_from(tail, start)
        stop = start + PREFIX.size + length
        if length > 0 and stop <= len(tail):
            budget -= length
            if budget < 0 or _checksum(offset + start, view[start + PREFIX.size : stop]) == checksum:
                return True
        high = tail.find(0, high + 1)
    return False
