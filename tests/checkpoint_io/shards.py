"""Shards made by hand, as the format says and independently of the code that writes them in a job."""

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from perdure.checkpoint_io.formats import (
    CHUNK,
    VERSION,
    DataFile,
    Item,
    Manifest,
    Sidecar,
    digest_of,
    digest_of_save,
    encode_manifest,
    encode_sidecar,
)
from perdure.checkpoint_io.names import DCP_METADATA, MANIFEST, data_name, published_name, sidecar_name
from perdure.protocol.checkpoints import Resume, SaveId

SAVE = SaveId(100, 0xABC, 3)
ALIGNMENT = 4096

Chunks = Mapping[str, tuple[Sequence[int], Sequence[int], torch.Tensor]]
"""Of one rank: name -> shape of the whole tensor, where this part begins, and the part."""


def whole(tensors: Mapping[str, torch.Tensor]) -> Chunks:
    return {fqn: (tensor.shape, (0,) * tensor.dim(), tensor) for fqn, tensor in tensors.items()}


def part(tensor: torch.Tensor, dim: int, begin: int, count: int) -> tuple[Sequence[int], Sequence[int], torch.Tensor]:
    offsets = [0] * tensor.dim()
    offsets[dim] = begin
    return tensor.shape, offsets, tensor.narrow(dim, begin, count).contiguous()


def split(tensor: torch.Tensor, world: int, dim: int = 0) -> list[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
    """Parts for `world` ranks, as Shard(dim) places them."""
    each = -(-tensor.shape[dim] // world)
    parts: list[tuple[Sequence[int], Sequence[int], torch.Tensor]] = []
    for rank in range(world):
        begin = min(rank * each, tensor.shape[dim])
        parts.append(part(tensor, dim, begin, min(each, tensor.shape[dim] - begin)))
    return parts


def saved(thing: Any) -> bytes:
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


def data_place(archive: bytes) -> int:
    """Where a tensor's bytes begin in what torch.save made of it."""
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        header = next(each.header_offset for each in members.infolist() if each.filename.endswith("data/0"))
    name, extra = (int.from_bytes(archive[header + at : header + at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def digested(data: bytes) -> DataFile:
    digests = [xxhash.xxh3_64_intdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]
    return DataFile(len(data), tuple(digests))


def nested(fqn: str) -> tuple[str | int, ...]:
    return tuple(int(key) if key.isdigit() else key for key in fqn.split("."))


def write_shard(
    folder: Path,
    rank: int,
    world: int,
    chunks: Chunks,
    values: Mapping[str, Any] | None = None,
    *,
    extra: int = 0,
    save: SaveId = SAVE,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
    left_to: Mapping[str, int] | None = None,
) -> bytes:
    """One rank's files; the digest of its sidecar. A value that is bytes is taken as pickled already."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, others = bytearray(), bytearray()
    items: list[Item] = []
    for fqn, (shape, offsets, tensor) in chunks.items():
        archive = saved(tensor.clone())
        at = len(tensors) + -len(tensors) % ALIGNMENT
        tensors += bytes(at - len(tensors)) + archive
        where = at + data_place(archive) if tensor.numel() else at
        items.append(
            Item(fqn, (paths or {}).get(fqn, nested(fqn)), tuple(shape), tuple(offsets), tuple(tensor.shape),
                 str(tensor.dtype).removeprefix("torch."), None, 0, at, len(archive), where, tensor.nbytes)
        )  # fmt: skip
    for fqn, value in (values or {}).items():
        archive = value if isinstance(value, bytes) else saved(value)
        path = (paths or {}).get(fqn, nested(fqn))
        items.append(Item(fqn, path, (), None, (), "", None, 1, len(others), len(archive), 0, 0, digest_of(archive)))
        others += archive
    contents = [bytes(tensors), bytes(others)] if others else [bytes(tensors)]
    for number, data in enumerate(contents):
        (folder / data_name(rank, number)).write_bytes(data)
    sidecar = encode_sidecar(
        Sidecar(
            VERSION,
            save,
            rank,
            world,
            tuple(items),
            tuple(map(digested, contents)),
            extra,
            tuple(left_to or {}),
            tuple((left_to or {}).values()),
        )
    )
    (folder / sidecar_name(rank)).write_bytes(sidecar)
    return digest_of(sidecar)


def resume_of(digests: Sequence[bytes], save: SaveId = SAVE, **where: Any) -> Resume:
    return Resume(save, len(digests), digest_of_save(digests), **where)


def publish(root: Path, digests: Sequence[bytes], save: SaveId = SAVE, folder: Path | None = None) -> Path:
    """The manifest of shards that lie in `folder` already. `.metadata` is a pickle that nobody may open."""
    folder = folder or root / published_name(save.step)
    metadata = b"not to be opened"
    (folder / DCP_METADATA).write_bytes(metadata)
    manifest = Manifest(
        VERSION, save.step, save.epoch, save.round, len(digests), 0, digest_of_save(digests).hex(),
        digest_of(metadata).hex(), 0.0,
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    return folder


def flip(path: Path, at: int, bit: int = 0) -> None:
    """One bit, in a file that others may have links to: those keep the old content."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.unlink()
    path.write_bytes(data)
