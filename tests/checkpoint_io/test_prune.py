"""Deleting the save that was named, all that crashes left behind, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.checkpoint_io.catalog import mark_bad
from perdure.checkpoint_io.files import delete_tree, write_atomic
from perdure.checkpoint_io.prune import prune, sweep
from perdure.checkpoint_io.publish import publish, read_tracker
from perdure.protocol.checkpoints import SaveId, Tier

from .made_saves import local_save_of, written_save

A = SaveId(100, 5, 1)
B = SaveId(100, 6, 0)
TRACKER = "latest_checkpointed_iteration.txt"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_published_save_and_what_is_named_after_it(tmp_path: Path) -> None:
    for step in (80, 100):
        publish(tmp_path, written_save(tmp_path, SaveId(step, 5, 1)), created=1.0)
    written_save(tmp_path, A)
    assert prune(tmp_path, A, Tier.DURABLE) == []
    assert names(tmp_path) == ["iter_0000080", TRACKER]
    assert read_tracker(tmp_path) == 80
    assert prune(tmp_path, A, Tier.DURABLE) == []


def test_only_the_save_that_was_named(tmp_path: Path) -> None:
    publish(tmp_path, written_save(tmp_path, A), created=1.0)
    written_save(tmp_path, B)
    assert prune(tmp_path, SaveId(100, 5, 2), Tier.DURABLE) == []
    assert prune(tmp_path, B, Tier.DURABLE) == []
    assert names(tmp_path) == ["iter_0000100", TRACKER]
    mark_bad(tmp_path / "iter_0000100", "bad")
    publish(tmp_path, written_save(tmp_path, B), created=1.0)
    assert prune(tmp_path, A, Tier.DURABLE) == []
    assert names(tmp_path) == ["iter_0000100", TRACKER]


def test_what_does_not_say_whose_it_is_stays(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / ".metadata").write_bytes(b"of dcp.save")
    assert prune(tmp_path, A, Tier.DURABLE) == []
    assert names(tmp_path / "iter_0000100") == [".metadata"]


def test_one_of_perdure_that_does_not_say_whose_it_is_is_told(tmp_path: Path) -> None:
    publish(tmp_path, written_save(tmp_path, A), created=1.0)
    for name in ("manifest.json", "__0.shard", "__1.shard"):
        os.truncate(tmp_path / "iter_0000100" / name, 5)
    (told,) = prune(tmp_path, A, Tier.DURABLE)
    assert "iter_0000100 is not deleted: it cannot be told which save it is (manifest.json: " in told


def test_one_without_manifest_is_still_known(tmp_path: Path) -> None:
    publish(tmp_path, written_save(tmp_path, A), created=1.0)
    (tmp_path / "iter_0000100" / "manifest.json").unlink()
    assert prune(tmp_path, A, Tier.DURABLE) == []
    assert names(tmp_path) == [TRACKER]


def test_the_local_tier_of_one_node(tmp_path: Path) -> None:
    for node in ("n0", "n1"):
        local_save_of(tmp_path, node, A, ranks=[0, 1])
        local_save_of(tmp_path, node, B, ranks=[0, 1])
    assert prune(tmp_path, A, Tier.LOCAL, "n0") == []
    assert (names(tmp_path / "n0"), names(tmp_path / "n1")) == (
        ["iter_0000100.6-0"],
        ["iter_0000100.5-1", "iter_0000100.6-0"],
    )
    assert prune(tmp_path, A, Tier.LOCAL, "n7") == []


def test_sweeping(tmp_path: Path) -> None:
    publish(tmp_path, written_save(tmp_path, SaveId(80, 5, 1)), created=1.0)
    for save in (A, B, SaveId(120, 6, 0)):
        written_save(tmp_path, save)
    deep = tmp_path / ".trash-1-iter_0000001" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    os.symlink(tmp_path / "iter_0000080", deep / "link")
    (tmp_path / f".new-12-{TRACKER}").touch()
    (tmp_path / "notes").mkdir()
    assert sweep(tmp_path, keep=[B, SaveId(120, 6, 0)]) == []
    kept = ["iter_0000080", "iter_0000100.saving-6-0", "iter_0000120.saving-6-0", TRACKER, "notes"]
    assert names(tmp_path) == kept
    assert len(names(tmp_path / "iter_0000080")) == 9, "a link in what is deleted is not followed"
    assert sweep(tmp_path / "nowhere") == []


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Path]:
    """A local save of which the folder `x` cannot be deleted: something is mounted there."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = local_save_of(tmp_path, "n0", A, ranks=[0, 1])
    (folder / "x").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder / "x"]
    if subprocess.run(command, check=False, timeout=10).returncode != 0:
        pytest.skip("this machine does not allow to mount a file system")
    yield folder
    for mounted in tmp_path.rglob("x"):
        if mounted.is_mount():
            subprocess.run(["umount", mounted], check=True, timeout=10)


def test_what_cannot_be_deleted_is_told_and_swept_later(tmp_path: Path, busy: Path) -> None:
    told = prune(tmp_path, A, Tier.LOCAL, "n0")
    assert any("/x cannot be deleted" in each and "busy" in each for each in told)
    assert not busy.exists(), "its name is gone: nobody takes it for a save"
    (left,) = names(tmp_path / "n0")
    assert left.startswith(".trash-")
    assert sweep(tmp_path / "n0") != []
    subprocess.run(["umount", tmp_path / "n0" / left / "x"], check=True, timeout=10)
    assert sweep(tmp_path / "n0") == []
    assert names(tmp_path / "n0") == []


def test_a_mounted_folder_itself(busy: Path) -> None:
    (told,) = delete_tree(busy / "x")
    assert "busy" in told
    assert (busy / "x").is_mount()


def test_two_delete_the_same(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / ".trash-1" / str(number)).mkdir(parents=True)
    code = "import sys, pathlib, perdure.checkpoint_io.prune as p; sys.exit(len(p.sweep(pathlib.Path(sys.argv[1]))))"
    both = [subprocess.Popen([sys.executable, "-c", code, tmp_path]) for _ in range(2)]
    assert [each.wait(30) for each in both] == [0, 0]
    assert names(tmp_path) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"old")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "f", "text")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "f", b"new")
    assert names(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"
    write_atomic(tmp_path / "f", b"new" * 1000)
    assert (tmp_path / "f").read_bytes() == b"new" * 1000
