"""Saves made by hand: real files and sidecars, for tests of what comes after they are written."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import xxhash

from perdure.checkpoint_io.files import write_atomic
from perdure.checkpoint_io.formats import (
    CHUNK,
    VERSION,
    DataFile,
    Item,
    Sidecar,
    digest_of,
    digest_of_save,
    encode_sidecar,
)
from perdure.checkpoint_io.names import data_name, local_name, saving_name, sidecar_name
from perdure.protocol.checkpoints import Publish, SaveId


def chunk(fqn: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dtype: str = "float32") -> Item:
    """A chunk that is nowhere."""
    return Item(fqn, tuple(fqn.split(".")), tuple(shape), tuple(offsets), tuple(sizes), dtype, None, 0, 0, 9, 0, 9)


def value(fqn: str) -> Item:
    return Item(fqn, tuple(fqn.split(".")), (), None, (), "", None, 1, 0, 9, 0, 0)


def sidecar_of(rank: int, *items: Item, world_size: int = 1, held: tuple[str, ...] = ()) -> Sidecar:
    files = (DataFile(0, ()), DataFile(0, ()))
    return Sidecar(VERSION, SaveId(100, 5, 1), rank, world_size, items, files, held=held)


def data_file(data: bytes) -> DataFile:
    digests = tuple(xxhash.xxh3_64_intdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
    return DataFile(len(data), digests)


def write_shard(
    folder: Path,
    save: SaveId,
    rank: int,
    world_size: int,
    items: Sequence[Item],
    *files: bytes,
    held: tuple[str, ...] = (),
) -> bytes:
    """Data files, then the sidecar. Returns the sidecar's digest."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(files):
        (folder / data_name(rank, number)).write_bytes(data)
    written = tuple(data_file(data) for data in files)
    data = encode_sidecar(Sidecar(VERSION, save, rank, world_size, tuple(items), written, held=held))
    write_atomic(folder / sidecar_name(rank), data)
    return digest_of(data)


def small_shard(folder: Path, save: SaveId, rank: int, world_size: int) -> bytes:
    """A few KB of noise that claim to be one row of a tensor, and a value on rank 0."""
    noise = random.Random(f"{save}{save.epoch}-{rank}")
    row = Item("w", ("w",), (world_size, 8), (rank, 0), (1, 8), "float32", None, 0, 0, 4000, 100, 32)
    lone = Item("lr", ("lr",), (), None, (), "", None, 1, 0, 70, 0, 0)
    if rank:
        return write_shard(folder, save, rank, world_size, [row], noise.randbytes(4096), held=("lr",))
    return write_shard(folder, save, 0, world_size, [row, lone], noise.randbytes(4096), noise.randbytes(70))


def written_save(save_dir: Path, save: SaveId, world_size: int = 2) -> Publish:
    """A save on the durable tier of which every shard is written; the order to publish it."""
    folder = save_dir / saving_name(save)
    digests = [small_shard(folder, save, rank, world_size) for rank in range(world_size)]
    return Publish(save, world_size, digest_of_save(digests))


def local_save_of(local_dir: Path, node: str, save: SaveId, ranks: Sequence[int], world_size: int = 2) -> Path:
    folder = local_dir / node / local_name(save)
    for rank in ranks:
        small_shard(folder, save, rank, world_size)
    return folder


def flip_bit(path: Path, position: int) -> None:
    """position: of the bit in the file. The size and the time of change stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
