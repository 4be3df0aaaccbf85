"""Reading every byte of a save and comparing it with what was written.

A shard's sidecar carries its own digest and one of every 16 MiB of each data file, framing and padding included. A
published folder's manifest carries its own digest, that of all sidecars, and that of DCP's `.metadata`. So any bit that
flips, in any file, is found. `BAD` marks are not looked at, and none is made.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import local

import msgspec
import xxhash

from ..protocol.checkpoints import SaveId
from .bundle import Bundle, NoBundle
from .catalog import THREADS, nbytes_of, read_manifest, read_sidecar
from .formats import CHUNK, BadFormat, Manifest, Sidecar, digest_of, digest_of_save
from .names import DCP_METADATA, MANIFEST, MCORE_METADATA, data_name, published_step
from .publish import MCORE


class Progress(msgspec.Struct, frozen=True):
    """So many of `total` bytes are read. problem: found in the last ones, if any."""

    done: int
    total: int
    problem: str = ""


def verify_shard(folder: Path, rank: int) -> list[str]:
    """What is wrong with a shard; empty if it is as it was written."""
    try:
        sidecar, _ = read_sidecar(folder, rank)
    except (OSError, BadFormat) as error:
        return [f"rank {rank}: {error}"]
    return [each.problem for each in _verify_data(folder, [sidecar]) if each.problem]


def verify_save(folder: Path) -> Iterator[Progress]:
    """Verify a published save: what is wrong, and how far it is. At least one Progress; good if none has a problem."""
    try:
        manifest = read_manifest(folder)
    except (OSError, BadFormat) as error:
        yield Progress(0, 0, f"{MANIFEST}: {error}")
        return
    sidecars: list[Sidecar] = []
    digests: list[bytes] = []
    problems: list[str] = []
    for rank in range(manifest.world_size):
        try:
            sidecar, digest = read_sidecar(folder, rank)
            sidecars.append(sidecar)
            digests.append(digest)
        except (OSError, BadFormat) as error:
            problems.append(f"rank {rank}: {error}")
    problems += _verify_folder(folder, manifest)
    problems += _verify_bundle(folder, manifest)
    if not problems and digest_of_save(digests).hex() != manifest.digest:
        problems.append(f"the sidecars are not those that {MANIFEST} names")
    problems += _verify_belonging(sidecars, manifest)
    total = sum(nbytes_of(sidecar) for sidecar in sidecars)
    for problem in problems:
        yield Progress(0, total, problem)
    yield from _verify_data(folder, sidecars)
    yield Progress(total, total)


def _verify_folder(folder: Path, manifest: Manifest) -> list[str]:
    problems: list[str] = []
    step = published_step(folder.name)
    if step is not None and step != manifest.step:
        problems.append(f"{folder.name} has the {MANIFEST} of step {manifest.step}")
    for name, wanted in ((DCP_METADATA, manifest.metadata), (MCORE_METADATA, digest_of(MCORE).hex())):
        try:
            if digest_of((folder / name).read_bytes()).hex() != wanted:
                problems.append(f"{name} is not what was written: its digest differs")
        except OSError as error:
            problems.append(f"{name}: {error}")
    return problems


def _verify_bundle(folder: Path, manifest: Manifest) -> list[str]:
    try:
        damage = Bundle(folder, manifest.world_size, bytes.fromhex(manifest.digest)).damage()
    except (NoBundle, ValueError) as error:
        damage = str(error)
    return [damage] if damage else []


def _verify_belonging(sidecars: list[Sidecar], manifest: Manifest) -> list[str]:
    """A sidecar in order that is another save's, or a sum that cannot be."""
    save = SaveId(manifest.step, manifest.epoch, manifest.round)
    problems = [
        f"rank {each.rank}: its shard is of {each.save}, world size {each.world_size}"
        for each in sidecars
        if (each.save, each.world_size) != (save, manifest.world_size)
    ]
    total = sum(nbytes_of(each) for each in sidecars)
    if len(sidecars) == manifest.world_size and total != manifest.nbytes:
        problems.append(f"the shards have {total} bytes, {MANIFEST} says {manifest.nbytes}")
    return problems


# ---- data files -----------------------------------------------------------------------------------------------

_buffers = local()


def _verify_data(folder: Path, sidecars: list[Sidecar]) -> Iterator[Progress]:
    """All chunks of all data files, a few at a time."""
    total = sum(nbytes_of(sidecar) for sidecar in sidecars)
    done = 0
    waiting: deque[tuple[int, Future[str]]] = deque()
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        for path, at, size, digest in _chunks(folder, sidecars):
            waiting.append((max(size, 0), threads.submit(_verify_chunk, path, at, size, digest)))
            if len(waiting) > 2 * THREADS:
                size, future = waiting.popleft()
                done += size
                yield Progress(done, total, future.result())
        for size, future in waiting:
            done += size
            yield Progress(done, total, future.result())


def _chunks(folder: Path, sidecars: list[Sidecar]) -> Iterator[tuple[Path, int, int, int]]:
    """Path, offset, size and digest of each chunk; size -1 stands for the check of the file's length."""
    for sidecar in sidecars:
        for number, file in enumerate(sidecar.files):
            path = folder / data_name(sidecar.rank, number)
            yield path, file.size, -1, len(file.digests)
            for index, digest in enumerate(file.digests):
                at = index * CHUNK
                yield path, at, max(0, min(CHUNK, file.size - at)), digest


def _verify_chunk(path: Path, at: int, size: int, digest: int) -> str:
    try:
        if size < 0:
            return _verify_length(path, at, digest)
        buffer = getattr(_buffers, "chunk", None)
        if buffer is None:
            buffer = _buffers.chunk = bytearray(CHUNK)
        view = memoryview(buffer)[:size]
        if _read(path, at, view) < size:
            return ""  # the check of the length says it
        if xxhash.xxh3_64_intdigest(view) != digest:
            return f"{path.name}: bytes {at} to {at + size} are not what was written: their digest differs"
    except OSError as error:
        return f"{path.name}: {error}"
    return ""


def _verify_length(path: Path, size: int, digests: int) -> str:
    there = path.stat().st_size
    if there != size:
        return f"{path.name} has {there} bytes, its sidecar says {size}"
    if digests != -(-size // CHUNK):
        return f"{path.name} has {size} bytes and {digests} digests: parts of it cannot be verified"
    return ""


def _read(path: Path, at: int, view: memoryview) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], at + done)
            if count == 0:
                break
            done += count
        return done
    finally:
        os.close(fd)
