"""Reads byte ranges of a shard's files and verifies every chunk that they touch, in a few threads.

A chunk of CHUNK bytes is what one digest covers. It is read once, scattered straight to where its bytes belong (a
range's own buffer, or scratch for what nobody asked for), hashed, and compared. So a range is verified, and finished,
when all its chunks are; bytes that turn out wrong may already lie in a range's buffer, and then BadShard is raised.

Reading and hashing run without the GIL, in pieces that are hashed while they still are in a core's cache. Smaller ones
than these were slower: threads that take turns at the GIL more often wait for each other.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import torch
import xxhash

from .formats import CHUNK, DataFile
from .names import data_name
from .sources import BadShard, Shard, Unreadable

_BUFFERS_AT_ONCE = 512
"""Of one system call; the kernel takes at most 1024."""
_PIECE = 1 << 20
"""Bytes of one system call."""
_WRITABLE = 0x200
"""PyBUF_WRITE of CPython's C interface."""

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


class Range:
    """Bytes `at` to `at + nbytes` of file number `file`.

    into: the contiguous CPU tensor that they go to. None: they go to a buffer of their own, pinned if asked for, which
    `finish` is called with once all of it is verified; after that it is let go.
    """

    __slots__ = ("_chunks_left", "_into", "_own", "at", "buffer", "file", "finish", "nbytes", "pinned")

    def __init__(
        self,
        file: int,
        at: int,
        nbytes: int,
        into: torch.Tensor | None = None,
        finish: Callable[[torch.Tensor], None] | None = None,
        pinned: bool = False,
    ) -> None:
        self.file = file
        self.at = at
        self.nbytes = nbytes
        self.finish = finish
        self.pinned = pinned
        self.buffer: memoryview | None = None
        self._into = into
        self._own: torch.Tensor | None = None
        self._chunks_left = (at + nbytes - 1) // CHUNK - at // CHUNK + 1

    def allocate(self) -> None:
        """Make the buffer, when the first byte is to be read. Under the reader's lock."""
        if self.buffer is None:
            data = self._into
            if data is None:
                data = self._own = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
            self.buffer = view_of(data)

    def chunk_verified(self) -> torch.Tensor | None:
        """Its own buffer, if that is complete now. Under the reader's lock."""
        self._chunks_left -= 1
        if self._chunks_left:
            return None
        complete, self._own, self.buffer = self._own, None, None
        return complete


def view_of(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, for as long as the tensor is there.

    A fifth of what the way over NumPy costs, and there may be thousands.
    """
    return _memory_at(data.data_ptr(), data.nbytes, _WRITABLE)


class ShardReader:
    """Threads and scratch memory, for all shards that one rank reads."""

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or min(4, len(os.sched_getaffinity(0))), "perdure-restore")
        self._own = threading.local()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes read and verified so far."""

    def close(self) -> None:
        """No thread writes to anybody's memory after this."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, shard: Shard, ranges: Iterable[Range]) -> None:
        """Read all ranges, which come in the order of the shard's files; a chunk is begun once all of it has come.

        Raises BadShard; what is in the buffers is worth nothing then.
        """
        jobs: list[Future[None]] = []
        try:
            for number, wanted in groupby(ranges, lambda each: each.file):
                file = _File(shard.folder / data_name(shard.rank, number), shard.sidecar.files[number])
                for chunk, part in _by_chunk(wanted, file.path):
                    jobs.append(self._pool.submit(self._chunk, file, chunk, part))
            for job in jobs:
                job.result()
        except OSError as error:
            raise Unreadable(f"{error}") from error
        finally:
            _end(jobs)

    def _chunk(self, file: "_File", chunk: int, ranges: list[Range]) -> None:
        begin = chunk * CHUNK
        end = min(begin + CHUNK, file.size)
        with self._lock:
            for each in ranges:
                each.allocate()
        digest = xxhash.xxh3_64()
        for at, buffers in _batches(begin, end, ranges, self._scratch()):
            file.fill(at, buffers)
            for buffer in buffers:
                digest.update(buffer)
        if digest.intdigest() != file.digests[chunk]:
            raise BadShard(f"{file.path}: bytes {begin} to {end} are not those that were written: their digest differs")
        self._finish(ranges, end - begin)

    def _finish(self, ranges: list[Range], nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            complete = [(each, data) for each in ranges if (data := each.chunk_verified()) is not None]
        for each, data in complete:
            if each.finish is not None:
                each.finish(data)

    def _scratch(self) -> memoryview:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = memoryview(bytearray(CHUNK))
        return self._own.scratch


class _File:
    """An open file of a shard. It is closed when nobody uses it any more, whatever interrupts the reader."""

    def __init__(self, path: Path, description: DataFile) -> None:
        self.path = path
        self.size = description.size
        self.digests = description.digests
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._fd).st_size
        if size != self.size or len(self.digests) != -(-size // CHUNK):
            raise BadShard(f"{path} has {size} bytes; its sidecar says {self.size}, with {len(self.digests)} digests")

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def fill(self, at: int, buffers: list[memoryview]) -> None:
        """Read exactly as many bytes as the buffers hold."""
        got = os.preadv(self._fd, buffers, at)
        wanted = sum(map(len, buffers))
        if got == wanted:
            return
        rest = list(buffers)
        while got < wanted:
            at += got
            wanted -= got
            while got >= len(rest[0]):
                got -= len(rest.pop(0))
            rest[0] = rest[0][got:]
            got = os.preadv(self._fd, rest, at)
            if not got:
                raise BadShard(f"{self.path} ended at byte {at} while it was read")


def _end(jobs: list[Future[None]]) -> None:
    """None of these runs any more: the caller may close its files and give the memory to another shard."""
    for job in jobs:
        job.cancel()
    for job in jobs:
        if not job.cancelled():
            job.exception()


def _by_chunk(ranges: Iterable[Range], path: Path) -> Iterator[tuple[int, list[Range]]]:
    """Each chunk, with the ranges that have a part of it, in order."""
    open_chunks: dict[int, list[Range]] = {}
    end = 0
    for each in ranges:
        if each.at < end:
            raise BadShard(f"{path}: two items of its sidecar share bytes at {each.at}")
        end = each.at + each.nbytes
        first, last = each.at // CHUNK, (end - 1) // CHUNK
        for chunk in [chunk for chunk in open_chunks if chunk < first]:
            yield chunk, open_chunks.pop(chunk)
        for chunk in range(first, last + 1):
            open_chunks.setdefault(chunk, []).append(each)
    yield from open_chunks.items()


def _batches(
    begin: int, end: int, ranges: Sequence[Range], scratch: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """From `begin` to `end`: the buffers that one system call fills, and where it begins in the file."""
    buffers: list[memoryview] = []
    start = at = begin
    used = 0
    for buffer, first, length in _pieces(begin, end, ranges):
        if buffer is None:
            buffer, first = scratch, used
            used += length
        while length:
            take = min(length, _PIECE - (at - start))
            buffers.append(buffer[first : first + take])
            first += take
            length -= take
            at += take
            if at - start == _PIECE or len(buffers) == _BUFFERS_AT_ONCE:
                yield start, buffers
                start, buffers = at, []
    if buffers:
        yield start, buffers


def _pieces(begin: int, end: int, ranges: Sequence[Range]) -> Iterator[tuple[memoryview | None, int, int]]:
    """Buffer, place in it and length of each stretch from `begin` to `end`; no buffer for what no range covers."""
    at = begin
    for each in ranges:
        first, last = max(each.at, begin), min(each.at + each.nbytes, end)
        if first > at:
            yield None, 0, first - at
        yield each.buffer, first - each.at, last - first
        at = last
    if at < end:
        yield None, 0, end - at
