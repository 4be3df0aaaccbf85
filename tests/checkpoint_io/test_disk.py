"""Writing one shard: all of it or nothing, on real file systems."""

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from perdure.checkpoint_io.disk import Copy, DamagedCopy, Memory, Shard, Unwritable, write_shard
from perdure.checkpoint_io.formats import CHUNK, DataFile, digest_of

SIDECAR = b"the sidecar"


def write(folder: Path, *files: bytes, rank: int = 0) -> Shard:
    return write_shard(str(folder), rank, [Memory(data) for data in files], lambda _: SIDECAR, lambda: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], check=True, timeout=10)
    yield place
    subprocess.run(["umount", "-l", place], check=True, timeout=10)


def test_files_hold_the_bytes_and_the_digests_are_theirs(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 12_345)
    shard = write(tmp_path / "a" / "b", data, b"values", rank=3)
    folder = tmp_path / "a" / "b"
    assert names(folder) == ["__3.shard", "__3_0.distcp", "__3_1.distcp"]
    assert (folder / "__3_0.distcp").read_bytes() == data
    assert (folder / "__3_1.distcp").read_bytes() == b"values"
    assert (folder / "__3.shard").read_bytes() == SIDECAR
    assert shard.files == (
        DataFile(len(data), (xxh3_64_intdigest(data[:CHUNK]), xxh3_64_intdigest(data[CHUNK:]))),
        DataFile(6, (xxh3_64_intdigest(b"values"),)),
    )
    assert shard.digest == digest_of(SIDECAR)
    assert shard.nbytes == len(data) + 6


def test_an_empty_share_is_an_empty_file(tmp_path: Path) -> None:
    assert write(tmp_path, b"").files == (DataFile(0, ()),)
    assert names(tmp_path) == ["__0.shard", "__0_0.distcp"]


def test_leftovers_of_a_killed_attempt_are_replaced_and_not_written_into(tmp_path: Path) -> None:
    for name in ("__0_0.distcp", ".__0_0.distcp.tmp", "__0_1.distcp", ".__0.shard.tmp"):
        (tmp_path / name).write_bytes(b"x" * 100)
    with open(tmp_path / ".__0_0.distcp.tmp", "r+b") as held:
        write(tmp_path, b"new")
        held.write(b"from a process that is stuck in the kernel")
    assert names(tmp_path) == ["__0.shard", "__0_0.distcp"]
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"new"


def test_what_check_raises_ends_the_attempt_without_a_trace(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    calls = iter(range(100))

    def check() -> None:
        if next(calls) == 2:
            raise Stop

    with pytest.raises(Stop):
        write_shard(str(tmp_path / "f"), 0, [Memory(bytes(3 * CHUNK))], lambda _: SIDECAR, check)
    assert names(tmp_path) == []


def test_a_disk_that_is_too_small_is_named_and_nothing_is_left(tmpfs: Path) -> None:
    with pytest.raises(Unwritable) as caught:
        write(tmpfs / "f", bytes(5 << 20))
    assert caught.value.code == errno.ENOSPC
    for part in (str(tmpfs), "ENOSPC", str(5 << 20), f"{4 << 20} were free"):
        assert part in str(caught.value)
    assert names(tmpfs) == []
    write(tmpfs / "f", bytes(3 << 20))


def test_a_disk_that_fills_up_between_two_files_keeps_neither(tmpfs: Path) -> None:
    """The space is there when it is asked for, and taken by others before it is used."""
    taken = tmpfs / "others"

    class Greedy(Memory):
        def chunks(self) -> Iterator[memoryview]:
            taken.write_bytes(bytes(1536 << 10))
            return super().chunks()

    sources = [Greedy(bytes(2 << 20)), Memory(bytes(1 << 20))]
    with pytest.raises(Unwritable, match="ENOSPC"):
        write_shard(str(tmpfs / "f"), 0, sources, lambda _: SIDECAR, lambda: None)
    assert names(tmpfs) == ["others"]


def test_a_file_system_that_became_read_only(tmpfs: Path) -> None:
    write(tmpfs / "before", b"good")
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True, timeout=10)
    with pytest.raises(Unwritable, match="EROFS") as caught:
        write(tmpfs / "f", b"data")
    assert caught.value.code == errno.EROFS
    subprocess.run(["mount", "-o", "remount,rw", tmpfs], check=True, timeout=10)
    write(tmpfs / "f", b"data")
    assert (tmpfs / "before" / "__0_0.distcp").read_bytes() == b"good"


def test_a_limit_on_the_size_of_files_is_an_error_like_any_other(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(Unwritable, match="EFBIG"):
            write(tmp_path / "f", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"mine")
    with pytest.raises(Unwritable, match="f"):
        write(tmp_path / "f" / "g", b"data")
    assert (tmp_path / "f").read_bytes() == b"mine"


def test_many_ranks_make_one_folder_at_once_while_some_of_them_fail(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    failed: list[BaseException] = []
    begin = threading.Barrier(8)

    class Broken(Exception):
        pass

    def fail(_: object) -> bytes:
        raise Broken

    def work(rank: int) -> None:
        begin.wait(10)
        for _ in range(6):
            try:
                if rank % 2:
                    write_shard(str(folder), rank, [Memory(b"x")], fail, lambda: None)
                else:
                    write(folder, b"data", rank=rank)
            except Broken:
                pass
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert names(folder) == sorted(f"__{rank}{end}" for rank in (0, 2, 4, 6) for end in (".shard", "_0.distcp"))


# ---- copies ---------------------------------------------------------------------------------------------------


def test_a_copy_is_verified_and_may_be_shorter(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 5_000)
    shard = write(tmp_path / "local", data)
    copy = Copy(str(tmp_path / "local" / "__0_0.distcp"), shard.files[0], CHUNK + 100, bytearray(CHUNK))
    # Pruned before its turn came: the copy holds it open.
    (tmp_path / "local" / "__0_0.distcp").unlink()
    copied = write_shard(str(tmp_path / "durable"), 0, [copy], lambda _: SIDECAR, lambda: None)
    copy.close()
    assert (tmp_path / "durable" / "__0_0.distcp").read_bytes() == data[: CHUNK + 100]
    assert copied.files == (
        DataFile(CHUNK + 100, (xxh3_64_intdigest(data[:CHUNK]), xxh3_64_intdigest(data[CHUNK : CHUNK + 100]))),
    )


@pytest.mark.parametrize("harm", ["a bit", "the end"])
def test_a_damaged_file_is_not_copied(tmp_path: Path, harm: str) -> None:
    shard = write(tmp_path / "local", os.urandom(100_000))
    path = tmp_path / "local" / "__0_0.distcp"
    if harm == "a bit":
        with open(path, "r+b") as file:
            file.seek(5_000)
            byte = file.read(1)[0]
            file.seek(5_000)
            file.write(bytes([byte ^ 1]))
    else:
        os.truncate(path, 99_999)
    copy = Copy(str(path), shard.files[0], 100_000, bytearray(CHUNK))
    with pytest.raises(DamagedCopy, match="__0_0"):
        write_shard(str(tmp_path / "durable"), 0, [copy], lambda _: SIDECAR, lambda: None)
    copy.close()
    assert names(tmp_path) == ["local"]
