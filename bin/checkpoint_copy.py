"""Copies a published checkpoint to another folder: verified while it is copied, and there as a whole or not at all.

The copy is made in a folder with the name of an unfinished save, synced, and renamed; what is there already is never
written to. Only perdure's own files are copied, each compared with its digest before the copy gets its name.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from ..checkpoint_io import names
from ..checkpoint_io.bundle import NoBundle, write_bundle
from ..checkpoint_io.catalog import Kind, look_published, read_all, read_manifest
from ..checkpoint_io.files import delete_tree, write_atomic
from ..checkpoint_io.formats import CHUNK, BadFormat, DataFile, digest_of, digest_of_save
from ..protocol.checkpoints import SaveId
from ..protocol.folders import sync_folder

Progress = Callable[[int], object]
"""Is told of so many more bytes."""


class CopyError(Exception):
    """There is no copy. The message names what is in the way and what to do."""


class Source:
    """A published folder that is whole by its manifest, its sidecars and its files' sizes. Raises CopyError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = look_published(folder)
        if found is None:
            raise CopyError(f"{folder} is not there")
        if found.kind is Kind.FOREIGN:
            raise CopyError(f"{folder} was not written by perdure and has no digests to verify a copy by; use cp -r")
        if not found.usable:
            raise CopyError(f"{folder} is not a good checkpoint: {found.why}")
        try:
            self.manifest = read_manifest(folder)
            self.save = SaveId(self.manifest.step, self.manifest.epoch, self.manifest.round)
            sidecars = read_all(folder, self.save, self.manifest.world_size)
        except (BadFormat, OSError) as error:
            raise CopyError(f"{folder} is not a good checkpoint: {error}") from error
        self.sidecars = [sidecar for sidecar, _ in sidecars]
        self.digests = [digest for _, digest in sidecars]

    def data_files(self) -> Iterator[tuple[str, DataFile]]:
        for sidecar in self.sidecars:
            for number, file in enumerate(sidecar.files):
                yield names.data_name(sidecar.rank, number), file

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """Everything else, verified. Raises CopyError, OSError."""
        digests: list[bytes] = []
        for sidecar in self.sidecars:
            name = names.sidecar_name(sidecar.rank)
            content = (self.folder / name).read_bytes()
            digests.append(digest_of(content))
            yield name, content
        if digest_of_save(digests).hex() != self.manifest.digest:
            raise CopyError(f"the sidecars in {self.folder} were changed while they were copied")
        content = (self.folder / names.DCP_METADATA).read_bytes()
        if digest_of(content).hex() != self.manifest.metadata:
            raise CopyError(f"{self.folder / names.DCP_METADATA} is damaged: its digest is not the published one")
        yield names.DCP_METADATA, content
        for name in (names.MCORE_METADATA, names.MANIFEST):
            yield name, (self.folder / name).read_bytes()


def copy(source: Source, to: Path, progress: Progress) -> Path:
    """Copies `source` into the folder `to`; the copy's path. Raises CopyError."""
    final = to / names.published_name(source.save.step)
    unfinished = to / names.saving_name(source.save)
    if to.exists() and not to.is_dir():
        raise CopyError(f"{to} is not a folder; name the folder that the copy is to be in")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if final.exists():
            raise CopyError(f"{final} is there already; name another folder, or delete it first")
        check_room(source, to)
        unfinished.mkdir()
    except FileExistsError as error:
        raise CopyError(f"{unfinished} is in the way; delete it if no other copy is being made") from error
    except OSError as error:
        raise CopyError(f"{to} cannot be written to: {error}") from error
    try:
        fill(source, unfinished, progress)
        sync_folder(unfinished)
        unfinished.rename(final)
        sync_folder(to)
    except (OSError, NoBundle) as error:
        raise CopyError(f"the copy was given up and deleted: {error}") from error
    finally:
        delete_tree(unfinished)
    return final


def check_room(source: Source, to: Path) -> None:
    free, needed = shutil.disk_usage(to).free, source.manifest.nbytes
    if free < needed:
        raise CopyError(f"{to} has {free} bytes free, the checkpoint needs {needed}; make room, or name another folder")


def fill(source: Source, folder: Path, progress: Progress) -> None:
    for name, file in source.data_files():
        copy_data(source.folder / name, folder / name, file, progress)
    for name, content in source.small_files():
        write_atomic(folder / name, content)
    write_bundle(folder, source.digests)


def copy_data(path: Path, target: Path, file: DataFile, progress: Progress) -> None:
    """Copies one file of data, piece by piece as it was digested."""
    with open(path, "rb") as reader, open(target, "xb", buffering=0) as writer:
        size = 0
        for number, digest in enumerate(file.digests):
            piece = reader.read(CHUNK)
            if xxhash.xxh3_64_intdigest(piece) != digest:
                at = number * CHUNK
                raise CopyError(f"{path} is damaged: bytes {at} to {at + len(piece)} are not what was written")
            write_out(writer.fileno(), piece)
            size += len(piece)
            progress(len(piece))
        if size != file.size or reader.read(1):
            raise CopyError(f"{path} is damaged: it is not {file.size} bytes long")
        os.fsync(writer.fileno())


def write_out(fd: int, data: bytes) -> None:
    """All of `data`; a write may take less than it was given."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
