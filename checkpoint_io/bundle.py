"""All sidecars of a published save in one file, with an index.

A save of N ranks has N sidecars, and each of M ranks that restore it may have to look at all of them: with ten thousand
of each that would be a hundred million files to open, which no parallel file system takes. So whoever publishes puts
them together. The index has the digest of each, all of which together have the digest that the job committed: a rank
that reads one sidecar knows by it that this is the one that was committed, without a look at the others.

The file is a second copy: what is wrong with it, or that it is missing, only sends the reader to the sidecars.
"""

import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

from .files import NEW, remove_file
from .formats import DIGEST, digest_of, digest_of_save
from .names import BUNDLE, sidecar_name

_MAGIC = b"perdure sidecars 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQ")
_ENTRY = struct.Struct(f"<Q{DIGEST}s")
"""Length and digest of a sidecar; they lie one behind the other, after the index."""


class NoBundle(Exception):
    """There is none, or it is not what was committed. Says why."""


def write_bundle(folder: Path, digests: Sequence[bytes]) -> None:
    """Put the sidecars in `folder`, which have these digests, together. The name is durable once the folder is synced.

    Raises NoBundle if one of them is another by now, and OSError.
    """
    lengths = [(folder / sidecar_name(rank)).stat().st_size for rank in range(len(digests))]
    temporary = folder / f"{NEW}{secrets.token_hex(4)}-{BUNDLE}"
    try:
        with open(temporary, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, len(digests)))
            for length, digest in zip(lengths, digests, strict=True):
                file.write(_ENTRY.pack(length, digest))
            for rank, (length, digest) in enumerate(zip(lengths, digests, strict=True)):
                data = (folder / sidecar_name(rank)).read_bytes()
                if len(data) != length or digest_of(data) != digest:
                    raise NoBundle(f"{folder / sidecar_name(rank)} changed while it was copied")
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, folder / BUNDLE)
    except BaseException:
        remove_file(temporary)
        raise


class Bundle:
    """An open bundle, for any thread. digests: of all sidecars, by rank; they are those that `digest` is of."""

    def __init__(self, folder: Path, world_size: int, digest: bytes) -> None:
        """Raises NoBundle."""
        self.path = folder / BUNDLE
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            index = self._read(_HEAD.size + world_size * _ENTRY.size, 0)
        except OSError as error:
            raise NoBundle(f"{self.path}: {error.strerror}") from error
        if len(index) < _HEAD.size + world_size * _ENTRY.size or _HEAD.unpack_from(index) != (_MAGIC, world_size):
            raise NoBundle(f"{self.path} is not the bundle of {world_size} sidecars")
        entries = list(_ENTRY.iter_unpack(index[_HEAD.size :]))
        self.digests = tuple(each for _, each in entries)
        if digest_of_save(self.digests) != digest:
            raise NoBundle(f"{self.path} is damaged, or of another save: its digests are not those that were committed")
        self._places: list[tuple[int, int]] = []
        at = len(index)
        for length, _ in entries:
            self._places.append((at, length))
            at += length

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def _read(self, nbytes: int, at: int) -> bytes:
        parts: list[bytes] = []
        while nbytes and (part := os.pread(self._file, nbytes, at)):
            parts.append(part)
            nbytes -= len(part)
            at += len(part)
        return b"".join(parts)

    def damage(self) -> str:
        """What of it is not what was written; empty if nothing is."""
        bad = [rank for rank in range(len(self.digests)) if self.sidecar(rank) is None]
        if bad:
            return f"{self.path.name}: the sidecar of rank {bad[0]} is not what was written: its digest differs"
        end = sum(self._places[-1]) if self._places else 0
        size = os.fstat(self._file).st_size
        return f"{self.path.name} has {size} bytes, its index says {end}" if size != end else ""

    def sidecar(self, rank: int) -> bytes | None:
        """None: what lies there is not what was committed."""
        at, length = self._places[rank]
        if length > os.fstat(self._file).st_size:
            return None
        try:
            data = self._read(length, at)
        except OSError:
            return None
        return data if digest_of(data) == self.digests[rank] else None
