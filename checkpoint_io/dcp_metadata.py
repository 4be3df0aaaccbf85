"""DCP's `.metadata` made from sidecars, without torch.

The file is a pickled `torch.distributed.checkpoint.metadata.Metadata`. Whoever publishes a save has no torch, so the
pickle is put together here, opcode by opcode, of the few shapes of objects that it consists of: this needs none of the
classes, and takes a tenth of the time of pickling stand-ins for them. `dcp_check` compares the result with torch's own
classes. The same sidecars always give the same bytes.

What the sidecars say together is checked on the way: every tensor covered exactly once, nothing left to others that
nobody wrote. Deprecated properties (requires_grad, pin_memory) are not in a sidecar; they get DCP's defaults.
"""

import math
from collections.abc import Hashable, Iterable, Sequence

from .formats import Item, Sidecar
from .names import data_name

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
DCP_VERSION = "1.0.0"
"""What DCP writes into `Metadata.version`; a torch whose Metadata has no such field ignores it."""

Part = tuple[int, Item]
"""An item and the rank in whose shard it is."""
Chunks = dict[tuple[int, ...] | None, Part]
"""What is known of one name: its chunks by their offsets in order of rank, or the one value, under None."""


class BadSave(ValueError):
    """The shards of a save do not make a whole."""


def encode(sidecars: Sequence[Sidecar]) -> bytes:
    """The `.metadata` of the save whose sidecars, of all ranks, these are. Raises BadSave."""
    entries = collect(sidecars)
    for sidecar in sidecars:
        for fqn in sidecar.held:
            if fqn not in entries:
                raise BadSave(f"rank {sidecar.rank} left {fqn!r} to other ranks to write, and none of them has it")
    for fqn, chunks in entries.items():
        check_covered(fqn, chunks)
    return _Pickle().metadata(entries, _save_id(sidecars))


def collect(sidecars: Sequence[Sidecar]) -> dict[str, Chunks]:
    """Every name with its parts; where several ranks wrote the same part, that of the lowest one. Raises BadSave."""
    entries: dict[str, Chunks] = {}
    for sidecar in sorted(sidecars, key=lambda each: each.rank):
        for item in sidecar.items:
            chunks = entries.setdefault(item.fqn, {})
            if 0 in item.sizes and 0 not in item.shape:
                continue  # an empty shard of a tensor that does not divide evenly: nothing to find there
            twin = chunks.get(item.offsets)
            if twin is None:
                chunks[item.offsets] = (sidecar.rank, item)
            elif twin[1].sizes != item.sizes:
                raise BadSave(_disagree(item.fqn, twin, (sidecar.rank, item)))
            first = next(iter(chunks.values()))
            if first[1].shape != item.shape or first[1].dtype != item.dtype:
                raise BadSave(_disagree(item.fqn, first, (sidecar.rank, item)))
    return entries


def _disagree(fqn: str, one: Part, other: Part) -> str:
    def told(part: Part) -> str:
        rank, item = part
        if item.offsets is None:
            return f"rank {rank} has a value that is no tensor"
        return f"rank {rank} has {item.dtype} {list(item.shape)}, of it {list(item.sizes)} at {list(item.offsets)}"

    return (
        f"{fqn!r} is not the same on all ranks: {told(one)}, {told(other)}; "
        "what differs between ranks needs a name of its own on each"
    )


def _save_id(sidecars: Sequence[Sidecar]) -> str:
    save = sidecars[0].save
    return f"{save.step}-{save.epoch:x}-{save.round}"


# ---- do the chunks make the tensor? ---------------------------------------------------------------------------


def check_covered(fqn: str, chunks: Chunks) -> None:
    """Raises BadSave unless every element of the tensor is in exactly one chunk."""
    items = [item for _, item in chunks.values()]
    if not items:
        raise BadSave(f"of {fqn!r} there are only empty shards")
    shape = items[0].shape
    if items[0].offsets is None:
        return
    if len(items) == 1 and items[0].sizes == shape and not any(items[0].offsets):
        return
    for rank, item in chunks.values():
        if not _inside(item):
            raise BadSave(
                f"rank {rank} wrote a chunk of {fqn!r} that is outside of it: "
                f"{list(item.sizes)} at {item.offsets}, the tensor is {list(shape)}"
            )
    there = sum(math.prod(item.sizes) for item in items)
    whole = math.prod(shape)
    if there < whole:
        raise BadSave(
            f"the {len(items)} chunks of {fqn!r} have {there} of its {whole} elements: a part was not written"
        )
    pair = _overlap(list(chunks.values())) if whole else None
    if pair is not None:
        (one, a), (other, b) = pair
        raise BadSave(
            f"chunks of {fqn!r} overlap: {list(a.sizes)} at {a.offsets} of rank {one}, "
            f"{list(b.sizes)} at {b.offsets} of rank {other}"
        )


def _inside(item: Item) -> bool:
    offsets = item.offsets or ()
    if not len(offsets) == len(item.sizes) == len(item.shape):
        return False
    return all(0 <= at <= at + size <= end for at, size, end in zip(offsets, item.sizes, item.shape, strict=True))


def _overlap(parts: list[Part]) -> tuple[Part, Part] | None:
    """Two parts that share an element. Parts that a straight cut separates need no comparison: for the grids that
    meshes make, this takes time in proportion to their number."""
    if len(parts) < 2:
        return None
    for dim in range(len(parts[0][1].shape)):
        groups = _cut(parts, dim)
        if len(groups) > 1:
            return next((pair for group in groups if (pair := _overlap(group)) is not None), None)
    for number, one in enumerate(parts):
        for other in parts[:number]:
            if _meet(one[1], other[1]):
                return other, one
    return None


def _cut(parts: list[Part], dim: int) -> list[list[Part]]:
    groups: list[list[Part]] = []
    reached = -1
    for part in sorted(parts, key=lambda each: (each[1].offsets or ())[dim]):
        start = (part[1].offsets or ())[dim]
        if not groups or start >= reached:
            groups.append([])
        groups[-1].append(part)
        reached = max(reached, start + part[1].sizes[dim])
    return groups


def _meet(one: Item, other: Item) -> bool:
    sides = zip(one.offsets or (), one.sizes, other.offsets or (), other.sizes, strict=True)
    return all(a < b + of_b and b < a + of_a for a, of_a, b, of_b in sides)


# ---- the pickle -----------------------------------------------------------------------------------------------

_PROTOCOL = b"\x80\x02"
_MARK, _STOP, _NONE, _FALSE, _REDUCE, _BUILD = b"(", b".", b"N", b"\x89", b"R", b"b"
_NO_TUPLE, _TUPLE, _TUPLE1 = b")", b"t", b"\x85"
_DICT, _SET_ITEMS, _LIST, _APPENDS, _NEW = b"}", b"u", b"]", b"e", b")\x81"


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + value.to_bytes(1, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + length.to_bytes(1, "little") + value.to_bytes(length, "little", signed=True)


class _Pickle:
    """Opcodes of pickle's protocol 2. Each method returns those that put one object on the stack.

    What occurs often is named in pickle's memo when it is first made and fetched from there afterwards, so what a
    method returns must go into the pickle, once, and in the order of the calls.
    """

    def __init__(self) -> None:
        self._memo: dict[Hashable, bytes] = {}

    def _remember(self, key: Hashable, code: bytes) -> bytes:
        number = len(self._memo).to_bytes(4, "little")
        self._memo[key] = b"j" + number
        return code + b"r" + number

    def _text(self, value: str) -> bytes:
        if (known := self._memo.get(value)) is not None:
            return known
        data = value.encode("utf-8", "surrogatepass")
        return self._remember(value, b"X" + len(data).to_bytes(4, "little") + data)

    def _class(self, module: str, name: str) -> bytes:
        key = (module, name)
        if (known := self._memo.get(key)) is not None:
            return known
        return self._remember(key, b"c" + module.encode() + b"\n" + name.encode() + b"\n")

    def _tuple(self, values: Iterable[str | int]) -> bytes:
        parts = [self._text(each) if isinstance(each, str) else _integer(each) for each in values]
        return _MARK + b"".join(parts) + _TUPLE if parts else _NO_TUPLE

    def _size(self, values: tuple[int, ...]) -> bytes:
        key = ("Size", values)
        if (known := self._memo.get(key)) is not None:
            return known
        return self._remember(key, self._class("torch", "Size") + self._tuple(values) + _TUPLE1 + _REDUCE)

    def _state(self, *fields: bytes) -> bytes:
        """Names and values in turn, for the object that is on the stack."""
        return _DICT + _MARK + b"".join(fields) + _SET_ITEMS + _BUILD

    def _properties(self, dtype: str) -> bytes:
        """TensorProperties: its state is a tuple, and a memory format is pickled as a number."""
        key = ("properties", dtype)
        if (known := self._memo.get(key)) is not None:
            return known
        if not dtype.isidentifier():
            raise BadSave(f"{dtype!r} is no name of a torch.dtype")
        code = (self._class(_METADATA, "TensorProperties"), _NEW, _MARK, self._class("torch", dtype))
        code += (self._class("torch.serialization", "_get_layout"), self._text("torch.strided"), _TUPLE1, _REDUCE)
        code += (_FALSE, self._class(_METADATA, "_MEM_FORMAT_ENCODING"), _integer(0), _TUPLE1, _REDUCE, _FALSE)
        return self._remember(key, b"".join(code) + _TUPLE + _BUILD)

    def _chunk(self, item: Item) -> bytes:
        return (
            self._class(_METADATA, "ChunkStorageMetadata")
            + _NEW
            + self._state(
                self._text("offsets"),
                self._size(item.offsets or ()),
                self._text("sizes"),
                self._size(item.sizes),
            )
        )

    def _described(self, chunks: Chunks) -> bytes:
        """An entry of state_dict_metadata."""
        first = next(iter(chunks.values()))[1]
        if first.offsets is None:
            return self._class(_METADATA, "BytesStorageMetadata") + _NEW
        head = self._class(_METADATA, "TensorStorageMetadata") + _NEW
        properties = self._text("properties") + self._properties(first.dtype)
        size = self._text("size") + self._size(first.shape)
        listed = self._text("chunks") + _LIST + _MARK + b"".join([self._chunk(item) for _, item in chunks.values()])
        return head + self._state(properties, size, listed + _APPENDS)

    def _stored(self, number: int, rank: int, item: Item) -> bytes:
        """An entry of storage_data: MetadataIndex and _StorageInfo. DCP numbers the chunks of a tensor."""
        head = self._class(_METADATA, "MetadataIndex") + _NEW
        index = self._text("fqn") + self._text(item.fqn) + self._text("index")
        if item.offsets is None:
            index += _NONE
        else:
            index += _integer(number) + self._text("offset") + self._size(item.offsets)
        key = head + self._state(index)
        info = self._class(_FILESYSTEM, "_StorageInfo") + _NEW
        path = self._text("relative_path") + self._text(data_name(rank, item.file))
        offset = self._text("offset") + _integer(item.at)
        return key + info + self._state(path, offset, self._text("length") + _integer(item.length))

    def _storage_meta(self, save_id: str) -> bytes:
        head = self._class(_METADATA, "StorageMeta") + _NEW
        fields = self._text("checkpoint_id") + _NONE + self._text("save_id") + self._text(save_id)
        return head + self._state(fields, self._text("load_id") + _NONE + self._text("modules") + _LIST)

    def metadata(self, entries: dict[str, Chunks], save_id: str) -> bytes:
        out = [_PROTOCOL, self._class(_METADATA, "Metadata"), _NEW, _DICT, _MARK]
        out += [self._text("state_dict_metadata"), _DICT, _MARK]
        for fqn, chunks in entries.items():
            out.append(self._text(fqn) + self._described(chunks))
        out += [_SET_ITEMS, self._text("planner_data"), _DICT, _MARK]
        for fqn, chunks in entries.items():
            out.append(self._text(fqn) + self._tuple(next(iter(chunks.values()))[1].path))
        out += [_SET_ITEMS, self._text("storage_data"), _DICT, _MARK]
        for chunks in entries.values():
            for number, (rank, item) in enumerate(chunks.values()):
                out.append(self._stored(number, rank, item))
        out += [_SET_ITEMS, self._text("storage_meta"), self._storage_meta(save_id)]
        out += [self._text("version"), self._text(DCP_VERSION), _SET_ITEMS, _BUILD, _STOP]
        return b"".join(out)
