"""What perdure writes beside the data: a sidecar for each shard, a manifest for each published save.

Neither is pickle. A sidecar (msgpack) is enough to find and verify every byte of its shard; all sidecars of a save
together are enough to read it at any world size, without DCP's `.metadata`. Both carry a digest of themselves, so that
decoding one finds any bit of it that flipped: a sidecar as its last bytes, a manifest as its last field.
"""

import hashlib

import msgspec

from ..protocol.checkpoints import SaveId
from ..protocol.checkpoints import digest_of_save as digest_of_save  # read here by whoever reads the formats

VERSION = 1
CHUNK = 16 << 20
"""Bytes of a file that one digest covers; the last one may be shorter."""
DIGEST = 16
"""Bytes of `digest_of`."""


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value, or one chunk of one tensor, in one file of a shard.

    fqn: its flattened name, as DCP makes it. path: the keys that lead to it in the nested state dict.
    offsets, sizes: the chunk in the whole tensor of `shape`; None, () and () for a value that is no tensor.
    dtype: `float32`, as torch names it; empty for a value. index: DCP's MetadataIndex.index.
    at, length: the item in file number `file`: a complete zip archive of torch.save. data_at, nbytes: the tensor's raw
    bytes in that file, contiguous in row-major order. digest: `digest_of` a value's bytes, empty for a tensor: a value
    is unpickled, so who can write files must not be able to forge one, and the digests of chunks (xxh3) are no match.
    """

    fqn: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    dtype: str
    index: int | None
    file: int
    at: int
    length: int
    data_at: int
    nbytes: int
    digest: bytes = b""


class DataFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """digests: xxh3_64 of each CHUNK bytes."""

    size: int
    digests: tuple[int, ...]


class Sidecar(msgspec.Struct, frozen=True):
    """All about one shard. files: by number (`names.data_name`).

    items: those that the shard counts as its share come first; `extra` more follow (algorithm `atomic`), which other
    ranks' shards hold as well. They are on the local tier only: a durable shard has none.
    held: names that this rank holds and has left to others to write; whoever publishes checks that somebody has.
    writers: the rank that writes each of `held`, -1 where this rank cannot know. A hint for whoever restores.
    """

    version: int
    save: SaveId
    rank: int
    world_size: int
    items: tuple[Item, ...]
    files: tuple[DataFile, ...]
    extra: int = 0
    held: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """What a published folder holds. Digests are in hex.

    nbytes: of all data files. digest: `digest_of_save`. metadata: `digest_of` DCP's .metadata.
    created: seconds since 1970, for people. check: of all the above; `encode_manifest` fills it in.
    """

    version: int
    step: int
    epoch: int
    round: int
    world_size: int
    nbytes: int
    digest: str
    metadata: str
    created: float
    check: str = ""


class BadFormat(ValueError):
    """A sidecar or manifest that cannot be what it should be."""


def digest_of(data: bytes | memoryview) -> bytes:
    """The digest of everything but tensors' data."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


_encoder = msgspec.msgpack.Encoder()
_sidecars = msgspec.msgpack.Decoder(Sidecar)
_manifests = msgspec.json.Decoder(Manifest)


def encode_sidecar(sidecar: Sidecar) -> bytes:
    body = _encoder.encode(sidecar)
    return body + digest_of(body)


def decode_sidecar(data: bytes) -> Sidecar:
    """Raises BadFormat."""
    body = memoryview(data)[:-DIGEST]
    if digest_of(body) != data[-DIGEST:]:
        raise BadFormat("not a sidecar of perdure, or damaged: its last bytes are not the digest of the others")
    try:
        sidecar = _sidecars.decode(body)
    except msgspec.DecodeError as error:
        raise BadFormat(f"not a sidecar of perdure: {error}") from error
    if sidecar.version != VERSION:
        raise BadFormat(f"written by version {sidecar.version} of the format, this perdure reads {VERSION}")
    return sidecar


def encode_manifest(manifest: Manifest) -> bytes:
    check = digest_of(msgspec.json.encode(msgspec.structs.replace(manifest, check=""))).hex()
    checked = msgspec.structs.replace(manifest, check=check)
    return msgspec.json.format(msgspec.json.encode(checked), indent=2) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Raises BadFormat."""
    try:
        manifest = _manifests.decode(data)
    except msgspec.DecodeError as error:
        raise BadFormat(f"not a manifest of perdure: {error}") from error
    if manifest.version != VERSION:
        raise BadFormat(f"written by version {manifest.version} of the format, this perdure reads {VERSION}")
    if encode_manifest(manifest) != data:
        raise BadFormat("damaged: the manifest is not, byte for byte, what its own digest says")
    return manifest
