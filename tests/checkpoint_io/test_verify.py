"""Every bit that flips, in any file of any tier, is found; what is whole is called so."""

import os
import random
from pathlib import Path

import pytest

from perdure.checkpoint_io.formats import CHUNK, BadFormat, Item, decode_sidecar, digest_of_save
from perdure.checkpoint_io.names import saving_name
from perdure.checkpoint_io.publish import publish
from perdure.checkpoint_io.verify import verify_save, verify_shard
from perdure.protocol.checkpoints import Publish, SaveId

from .made_saves import flip_bit, local_save_of, small_shard, write_shard, written_save

A = SaveId(100, 5, 1)


def problems(folder: Path) -> list[str]:
    return [each.problem for each in verify_save(folder) if each.problem]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(tmp_path, written_save(tmp_path, A), created=1234.5)
    return tmp_path / "iter_0000100"


def test_a_flipped_bit_anywhere_is_found(folder: Path) -> None:
    chance = random.Random(3)
    files = sorted(folder.iterdir())
    assert len(files) == 9
    for path in files:
        bits = path.stat().st_size * 8
        for position in {0, bits - 1, *(chance.randrange(bits) for _ in range(30))}:
            flip_bit(path, position)
            told = problems(folder)
            assert told, f"bit {position} of {path.name}"
            flip_bit(path, position)
    assert problems(folder) == []


def test_a_flipped_bit_in_a_local_shard_is_found(tmp_path: Path) -> None:
    local = local_save_of(tmp_path, "n0", A, ranks=[0, 1])
    chance = random.Random(4)
    for path in sorted(local.iterdir()):
        rank = int(path.name[2])
        bits = path.stat().st_size * 8
        for position in {0, bits - 1, *(chance.randrange(bits) for _ in range(30))}:
            flip_bit(path, position)
            assert verify_shard(local, rank), f"bit {position} of {path.name}"
            assert verify_shard(local, 1 - rank) == []
            flip_bit(path, position)
    assert verify_shard(local, 0) == verify_shard(local, 1) == []


def test_every_bit_of_a_sidecar_counts(tmp_path: Path) -> None:
    small_shard(tmp_path, A, 0, 2)
    data = (tmp_path / "__0.shard").read_bytes()
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(BadFormat):
            decode_sidecar(bytes(flipped))
    for end in range(len(data)):
        with pytest.raises(BadFormat):
            decode_sidecar(data[:end])


@pytest.mark.parametrize(
    "name", ["__1.shard", "__1_0.distcp", "__0_1.distcp", ".metadata", "metadata.json", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["lost", "longer", "shorter", "empty"])
def test_a_file_that_is_lost_or_not_as_long_is_named(folder: Path, name: str, harm: str) -> None:
    path = folder / name
    if harm == "lost":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"longer": size + 1, "shorter": size - 1, "empty": 0}[harm])
    told = problems(folder)
    assert told
    assert any(name in each or (name == "__1.shard" and each.startswith("rank 1: ")) for each in told)


def test_whole_files_of_another_save_are_found(folder: Path, tmp_path: Path) -> None:
    """Each file is in order by itself, but is not of this save."""
    small_shard(folder, SaveId(100, 5, 2), 1, 2)
    told = problems(folder)
    assert "the sidecars are not those that manifest.json names" in told
    assert "rank 1: its shard is of step 100 (round 2), world size 2" in told


def test_a_folder_under_another_name_is_found(folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "iter_0000200")
    assert problems(tmp_path / "iter_0000200") == ["iter_0000200 has the manifest.json of step 100"]


def test_a_folder_that_is_no_save(tmp_path: Path) -> None:
    assert "manifest.json" in problems(tmp_path)[0]
    assert "__3.shard" in verify_shard(tmp_path, 3)[0]


def test_files_of_several_chunks(tmp_path: Path) -> None:
    ours = tmp_path / saving_name(A)
    size = 2 * CHUNK + 5
    item = Item("w", ("w",), (size,), (0,), (size,), "uint8", None, 0, 0, size, 0, size)
    data = random.Random(5).randbytes(4096) * (size // 4096) + b"tail!"
    assert len(data) == size
    digest = write_shard(ours, A, 0, 1, [item], data)
    publish(tmp_path, Publish(A, 1, digest_of_save([digest])), created=1.0)
    folder = tmp_path / "iter_0000100"
    steps = list(verify_save(folder))
    assert [each.done for each in steps] == [0, CHUNK, 2 * CHUNK, size, size]
    assert {each.total for each in steps} == {size}
    assert not any(each.problem for each in steps)
    flip_bit(folder / "__0_0.distcp", (CHUNK + 7) * 8)
    assert problems(folder) == [
        f"__0_0.distcp: bytes {CHUNK} to {2 * CHUNK} are not what was written: their digest differs"
    ]
    flip_bit(folder / "__0_0.distcp", (size - 1) * 8)
    assert len(problems(folder)) == 2
    assert len(verify_shard(folder, 0)) == 2


def test_it_can_be_left_half_way(folder: Path) -> None:
    steps = verify_save(folder)
    next(steps)
    steps.close()
