"""The bytes that `torch.save` puts before and after the data of one contiguous tensor, made without the data.

A tensor's item in a checkpoint file is a complete archive of torch.save: a zip with stored (not compressed) records.
All of it but the data follows from dtype and shape. So it is computed once, put into the staging image once, and
a save only copies data. The bytes are those that torch 2.13 writes, record by record, with these exceptions:
- The checksum (CRC-32) of the data record is 0. It stands behind the data and is not known beforehand; torch never
  checks it. Tools that do (`unzip -t`, Python's zipfile) call the record damaged. Our own digests protect the data.
- `.data/serialization_id`, a hash over contents that nothing reads back, is a constant.
- A tensor without elements gets the same padding as any other.

Data begins at a multiple of 64 bytes from the start of the archive, as torch places it.
"""

import functools
import io
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

ALIGNMENT = 64
_FOLDER = "archive/"
_DATA = "data/0"
_SERIALIZATION_ID = b"0" * 40
_FLAGS = 0x0808
"""UTF-8 names, and sizes and checksum stand behind the data."""
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_MAX_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """`head` + `nbytes` bytes of data in row-major order + `tail` is what torch.load reads."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


class _Archive:
    """A zip as torch's writer makes it. Data may be left out: `skip` counts it without holding it."""

    def __init__(self) -> None:
        self.out = bytearray()
        self._skipped = 0
        self._directory = bytearray()
        self._records = 0

    @property
    def at(self) -> int:
        return self._skipped + len(self.out)

    def add(self, name: str, data: bytes) -> None:
        at = self.at
        self.begin(name, len(data))
        self.out += data
        self.end(name, len(data), zlib.crc32(data), at)

    def skip(self, nbytes: int) -> None:
        self._skipped += nbytes

    def begin(self, name: str, size: int) -> None:
        """The local header, padded so that data begins aligned."""
        at = self.at
        encoded = (_FOLDER + name).encode()
        wide = _wide_field(size, 0, at)  # as torch does: how much is stored stands behind the data
        start = at + 30 + len(encoded) + len(wide) + 4
        padding = -start % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self.out += b"PK\x03\x04" + struct.pack("<HHHHHLLLHH", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        self.out += encoded + extra

    def end(self, name: str, size: int, crc: int, at: int) -> None:
        """What stands behind the data of the record that began at `at`, and its entry in the directory."""
        encoded = (_FOLDER + name).encode()
        wide = _wide_field(size, size, at)
        self.out += b"PK\x07\x08" + struct.pack("<LQQ" if wide else "<LLL", crc, size, size)
        small = _MAX_32 if size >= _MAX_32 else size
        numbers = (0, 0, _FLAGS, 0, 0, 0, crc, small, small, len(encoded), len(wide), 0, 0, 0, 0, min(at, _MAX_32))
        self._directory += b"PK\x01\x02" + struct.pack("<HHHHHHLLLHHHHHLL", *numbers) + encoded + wide
        self._records += 1

    def finish(self) -> None:
        at, size, count = self.at, len(self._directory), self._records
        self.out += self._directory
        end = self.at
        self.out += b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 0x031E, 0x2D, 0, 0, count, count, size, at)
        self.out += b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1)
        self.out += b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, count, count, size, min(at, _MAX_32), 0)


def _wide_field(size: int, stored: int, at: int) -> bytes:
    """The extra field for what 32 bits do not hold (zip64); empty if they do."""
    numbers = [size, stored] if size >= _MAX_32 else []
    if at >= _MAX_32:
        numbers.append(at)
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


class _StorageStandIn:
    def __init__(self, kind: type, elements: int) -> None:
        self.kind = kind
        self.elements = elements


class _TensorStandIn:
    """Pickles as a tensor would that nobody has allocated."""

    def __init__(self, rebuild: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self._reduced = (rebuild, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._reduced


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, _StorageStandIn):
            return ("storage", obj.kind, "0", "cpu", obj.elements)
        return None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, int]:
    """The record `data.pkl` of such a tensor, and the size of its data."""
    if dtype in _QUANTIZED:
        raise TypeError(f"tensors of dtype {dtype} are more than their numbers and cannot be saved; use dequantize()")
    # A real one tells how torch rebuilds this dtype; the other has shape and strides, but no memory.
    small: Any = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
    rebuild, arguments = cast("tuple[Any, tuple[Any, ...]]", small.__reduce_ex__(2))
    strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    storage, offset, _, _, *rest = arguments
    elements = 1
    for size in shape:
        elements *= size
    nbytes = elements * dtype.itemsize
    if isinstance(storage, torch.UntypedStorage):
        stand_in = _StorageStandIn(torch.UntypedStorage, nbytes)
    else:
        stand_in = _StorageStandIn(getattr(torch, storage._pickle_storage_type()), elements)
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(_TensorStandIn(rebuild, (stand_in, offset, shape, strides, *rest)))
    return out.getvalue(), nbytes


@functools.lru_cache(maxsize=8192)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Raises TypeError for a dtype that torch.save does not write as plain data."""
    data, nbytes = _pickled(dtype, tuple(shape))
    archive = _Archive()
    archive.add("data.pkl", data)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    at = archive.at
    archive.begin(_DATA, nbytes)
    split = len(archive.out)
    archive.skip(nbytes)
    archive.end(_DATA, nbytes, 0, at)
    archive.add("version", b"3\n")
    archive.add(".data/serialization_id", _SERIALIZATION_ID)
    archive.finish()
    return Frame(bytes(archive.out[:split]), nbytes, bytes(archive.out[split:]))
