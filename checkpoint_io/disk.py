"""Writing one shard of a save to one folder, so that it is there as a whole or not at all.

Rules:
- Space is reserved before the first byte is written: a disk that is full says so at once.
- A file has a temporary name until its bytes are synced. The sidecar comes last: without it nothing is a shard.
- What an earlier attempt left under a name of ours is deleted and made anew, never written into: a process that is
  stuck in the kernel may still hold the old file.
- Whatever goes wrong, all files of the attempt are removed, and the error names the path, the cause and the sizes.
- Each chunk is handed to the disk as soon as it is copied (sync_file_range), so that the final fsync has little left:
  measured at 1.4 times the speed of one fsync at the end.
- What is hashed is written while it still is in the core's cache: memory is what a trainer on the same node lacks.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from ..protocol.folders import NO_SUCH_CALL, sync_folder
from .formats import CHUNK, DataFile, digest_of
from .names import data_name, sidecar_name

PIECE = 256 << 10
"""Hashed and written at once; it fits the second-level cache of any server's core."""
_OUR_FOLDER_TRIES = 5
_START_WRITING = 2
"""SYNC_FILE_RANGE_WRITE of <fcntl.h>."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
# The C library's posix_fallocate would write to every block of a file system that cannot reserve.
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

TRANSIENT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.ETIMEDOUT})
"""Errors of a file system that may be gone a little later."""


class Unwritable(Exception):
    """The shard could not be written; nothing of it is left, unless the text says so. code: the errno, 0 if none."""

    def __init__(self, why: str, code: int = 0) -> None:
        super().__init__(why)
        self.code = code


class DamagedCopy(Exception):
    """The file that was to be copied no longer holds what was written to it."""


class Source(Protocol):
    """Where the bytes of a file come from."""

    @property
    def size(self) -> int: ...

    def chunks(self) -> Iterator[memoryview]:
        """All of them, CHUNK at a time; a view is valid until the next one is asked for."""
        ...


class Memory:
    """Bytes in memory, or in an image."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)
        self.size = len(self._view)

    def chunks(self) -> Iterator[memoryview]:
        return (self._view[at : at + CHUNK] for at in range(0, self.size, CHUNK))


class Copy:
    """The first `size` bytes of a data file that was written before, verified as they are read.

    The file is open from the start: its folder may be pruned before its turn comes.
    """

    def __init__(self, path: str, written: DataFile, size: int, buffer: bytearray) -> None:
        self.size = size
        self._path = path
        self._written = written
        self._buffer = memoryview(buffer)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._file)

    def chunks(self) -> Iterator[memoryview]:
        for number, at in enumerate(range(0, self.size, CHUNK)):
            view = self._buffer[: min(CHUNK, self._written.size - at)]
            self._fill(view, at)
            if xxh3_64_intdigest(view) != self._written.digests[number]:
                raise DamagedCopy(f"{self._path}: bytes {at} to {at + len(view)} are not those that were written")
            yield view[: self.size - at]

    def _fill(self, view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file, [view[done:]], at + done)
            except OSError as error:
                raise DamagedCopy(f"{self._path}: {name_of(error)} at byte {at + done}") from error
            if not count:
                raise DamagedCopy(f"{self._path}: it ends at byte {at + done}, {self._written.size} were written")
            done += count


class Shard(NamedTuple):
    """What was written. digest: of the sidecar."""

    files: tuple[DataFile, ...]
    digest: bytes

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def write_shard(
    folder: str,
    rank: int,
    sources: Sequence[Source],
    sidecar: Callable[[tuple[DataFile, ...]], bytes],
    check: Callable[[], None],
) -> Shard:
    """Write the data files, number by number, and the sidecar that `sidecar` makes of them into `folder`.

    `check` is called between chunks; what it raises ends the attempt. Raises Unwritable and DamagedCopy.
    """
    attempt = _Attempt(folder, check)
    try:
        return attempt.write(rank, sources, sidecar)
    except OSError as error:
        left = attempt.undo()
        raise Unwritable(_explain(error, attempt, sources) + left, error.errno or 0) from error
    except BaseException:
        attempt.undo()
        raise


class _Attempt:
    def __init__(self, folder: str, check: Callable[[], None]) -> None:
        self.at = folder
        """The path that is being worked on."""
        self.free: int | None = None
        """Bytes, where that is what an error is about."""
        self._folder = folder
        self._check = check
        self._files: list[str] = []
        """To be removed if this does not succeed."""
        self._made_folder = False

    def write(self, rank: int, sources: Sequence[Source], sidecar: Callable[[tuple[DataFile, ...]], bytes]) -> Shard:
        self._check()
        self._make_folder()
        names = [data_name(rank, number) for number in range(len(sources))]
        self._clear([*names, data_name(rank, len(names)), sidecar_name(rank)])
        self._check_space(sum(source.size for source in sources))
        files = tuple(self._write_data(name, source) for name, source in zip(names, sources, strict=True))
        summary = sidecar(files)
        self._write_temporary(sidecar_name(rank), Memory(summary))
        self._check()
        for name in (*names, sidecar_name(rank)):
            self._rename(name)
        self.at = self._folder
        sync_folder(self._folder)
        return Shard(files, digest_of(summary))

    def undo(self) -> str:
        """Remove everything that was made; what cannot be removed is named, for the end of an error's text."""
        left: list[str] = []
        for path in reversed(self._files):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                left.append(f"{path} ({name_of(error)})")
        if self._made_folder:
            with suppress(OSError):
                os.rmdir(self._folder)
        return f"; left behind: {', '.join(left)}" if left else ""

    # ---- folders --------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        made: list[str] = []
        path = self._folder
        while not os.path.isdir(path) and path not in ("", "/"):
            made.append(path)
            path = os.path.dirname(path)
        os.makedirs(self._folder, exist_ok=True)
        self._made_folder = bool(made)
        for each in made:
            sync_folder(os.path.dirname(each) or ".")

    def _clear(self, names: Sequence[str]) -> None:
        for name in names:
            for path in (self._path(name), self._temporary(name)):
                self.at = path
                with suppress(FileNotFoundError):
                    os.unlink(path)
        self.at = self._folder

    def _check_space(self, needed: int) -> None:
        """Only a hint: quotas and single targets of a parallel file system are not seen, and some systems tell none."""
        # Of the parent: the folder may be gone again, see `_create`.
        found = os.statvfs(os.path.dirname(self._folder) or ".")
        self.free = found.f_bavail * found.f_frsize
        if found.f_blocks and self.free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # ---- files ----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _temporary(self, name: str) -> str:
        return os.path.join(self._folder, f".{name}.tmp")

    def _rename(self, name: str) -> None:
        self.at = self._path(name)
        self._files.append(self.at)
        os.rename(self._temporary(name), self.at)

    def _create(self, name: str) -> int:
        self.at = self._temporary(name)
        self._files.append(self.at)
        for _ in range(_OUR_FOLDER_TRIES):
            try:
                return os.open(self.at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                # Another rank's attempt failed and took the folder, empty as it was, with it.
                os.makedirs(self._folder, exist_ok=True)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _write_data(self, name: str, source: Source) -> DataFile:
        return DataFile(source.size, self._write_temporary(name, source))

    def _write_temporary(self, name: str, source: Source) -> tuple[int, ...]:
        """The digests of its chunks."""
        file = self._create(name)
        try:
            _reserve(file, source.size)
            digests = self._copy(file, source)
            os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        # NFS tells of a full quota here.
        os.close(file)
        return digests

    def _copy(self, file: int, source: Source) -> tuple[int, ...]:
        digests: list[int] = []
        at = 0
        for chunk in source.chunks():
            self._check()
            digests.append(_write_hashed(file, chunk, at))
            # Where this is not known, fsync does all of it.
            _libc.sync_file_range(file, at, len(chunk), _START_WRITING)
            at += len(chunk)
        return tuple(digests)


def _write_hashed(file: int, chunk: memoryview, at: int) -> int:
    """The chunk's digest."""
    digest = xxh3_64()
    for begin in range(0, len(chunk), PIECE):
        piece = chunk[begin : begin + PIECE]
        digest.update(piece)
        done = 0
        while done < len(piece):
            done += os.pwrite(file, piece[done:], at + begin + done)
    return digest.intdigest()


def _reserve(file: int, size: int) -> None:
    while size and _libc.fallocate(file, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code in NO_SUCH_CALL:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def name_of(error: OSError) -> str:
    """`ENOSPC, No space left on device`"""
    return f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror or error}"


def _explain(error: OSError, attempt: _Attempt, sources: Sequence[Source]) -> str:
    text = f"{attempt.at}: {name_of(error)}; {sum(source.size for source in sources)} bytes are to be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and attempt.free is not None:
        text += f", {attempt.free} were free when this began"
    if error.errno == errno.EDQUOT:
        text += "; the quota of this user, group or project is used up"
    return text
