"""The framing is torch.save's own, byte for byte where it can be, and torch reads it."""

import io
import os
import struct
from pathlib import Path

import pytest
import torch
from torch._C import PyTorchFileReader

from perdure.checkpoint_io.framing import frame

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (2, 0, 3), (300, 70), (1, 1, 1, 1), (65537,), (2, 1, 5)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def framed(tensor: torch.Tensor) -> bytes:
    made = frame(tensor.dtype, tuple(tensor.shape))
    data = bytes_of(tensor)
    assert len(data) == made.nbytes
    assert made.length == len(made.head) + len(data) + len(made.tail)
    return made.head + data + made.tail


def saved(tensor: torch.Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_it(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = random_tensor(dtype, shape)
        loaded = torch.load(io.BytesIO(framed(tensor)), weights_only=True)
        assert loaded.dtype is dtype
        assert loaded.shape == tensor.shape
        assert loaded.stride() == tensor.stride()
        assert loaded.device.type == "cpu"
        assert not loaded.requires_grad
        assert bytes_of(loaded) == bytes_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_torch_save_writes(dtype: torch.dtype) -> None:
    """All but the checksum of the data and the id, which is made of checksums, and is checked by one itself."""
    for shape in SHAPES:
        tensor = random_tensor(dtype, shape)
        if not tensor.numel():
            continue
        ours, theirs = bytearray(framed(tensor)), bytearray(saved(tensor))
        assert len(ours) == len(theirs)
        for archive in (ours, theirs):
            mask(archive)
        assert ours == theirs


def mask(archive: bytearray) -> None:
    """Clear what differs, at both places where a zip has it."""
    size, begin = struct.unpack("<QQ", archive[-58:-42])
    at = begin
    while at < begin + size:
        name_length, extra_length = struct.unpack("<HH", archive[at + 28 : at + 32])
        name = bytes(archive[at + 46 : at + 46 + name_length]).decode()
        (data_size,) = struct.unpack("<L", archive[at + 24 : at + 28])
        (local,) = struct.unpack("<L", archive[at + 42 : at + 46])
        data_at = local + 30 + sum(struct.unpack("<HH", archive[local + 26 : local + 30]))
        if name in ("archive/data/0", "archive/.data/serialization_id"):
            archive[at + 16 : at + 20] = bytes(4)
            archive[data_at + data_size + 4 : data_at + data_size + 8] = bytes(4)
        if name == "archive/.data/serialization_id":
            archive[data_at : data_at + data_size] = bytes(data_size)
        at += 46 + name_length + extra_length


def test_data_is_where_the_reader_looks_for_it_and_aligned() -> None:
    for dtype in (torch.float32, torch.bool, torch.float8_e5m2):
        for shape in SHAPES:
            made = frame(dtype, shape)
            reader = PyTorchFileReader(io.BytesIO(made.head + bytes(made.nbytes) + made.tail))
            assert reader.get_record_offset("data/0") == len(made.head)
            assert len(made.head) % 64 == 0
            assert sorted(reader.get_all_records()) == [
                ".data/serialization_id",
                ".format_version",
                ".storage_alignment",
                "byteorder",
                "data.pkl",
                "data/0",
                "version",
            ]


@pytest.mark.parametrize("elements", [(1 << 32) - 64, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_above_4_gib_it_is_zip64_as_torch_writes_it(tmp_path: Path, elements: int) -> None:
    """In a sparse file: torch skips the data as well, and so neither writes nor holds it."""
    path = tmp_path / "archive"
    with torch.serialization.skip_data():
        torch.save(torch.empty(elements, dtype=torch.uint8), path)
    made = frame(torch.uint8, (elements,))
    assert os.stat(path).st_size == made.length
    with path.open("r+b") as file:
        theirs = file.read(len(made.head))
        file.seek(len(made.head) + made.nbytes)
        tail = file.read()
        assert theirs == made.head
        ours = made.tail
        # Where they differ are the id and its checksum, once behind it and once in the directory.
        unlike = {at for at in range(len(tail)) if tail[at] != ours[at]}
        place = ours.index(b"0" * 40)
        crc = struct.pack("<L", 0xFFFFFFFF & int.from_bytes(ours[place + 44 : place + 48], "little"))
        behind = set(range(place, place + 48))
        listed = set(range(ours.rindex(crc), ours.rindex(crc) + 4))
        assert unlike <= behind | listed
        file.seek(len(made.head) + made.nbytes)
        file.write(ours)
    reader = PyTorchFileReader(str(path))
    assert reader.get_record_offset("data/0") == len(made.head)
    # Maps the file; nothing of the data is read.
    assert torch.load(path, weights_only=True, mmap=True).shape == (elements,)
    path.unlink()


def test_it_is_made_once_for_each_dtype_and_shape() -> None:
    assert frame(torch.float32, (3, 4)) is frame(torch.float32, (3, 4))
    assert frame(torch.float32, (3, 4)) != frame(torch.float32, (4, 3))


def test_a_dtype_that_has_no_plain_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="quint8"):
        frame(torch.quint8, (4,))
