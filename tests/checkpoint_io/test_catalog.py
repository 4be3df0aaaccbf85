"""What a folder of checkpoints is said to hold: whole ones, and for all others why they do not count."""

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from perdure.checkpoint_io.catalog import (
    Found,
    Kind,
    bad_mark,
    facts_of,
    look_published,
    mark_bad,
    newest_usable,
    read_sidecar,
    scan_durable,
    scan_local,
)
from perdure.checkpoint_io.files import delete_tree
from perdure.checkpoint_io.formats import digest_of
from perdure.checkpoint_io.publish import publish
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What

from .made_saves import flip_bit, local_save_of, small_shard, write_shard, written_save

A = SaveId(100, 5, 1)


def only(founds: list[Found]) -> Found:
    (found,) = founds
    return found


def published(save_dir: Path, step: int = 100) -> Path:
    publish(save_dir, written_save(save_dir, SaveId(step, 5, 1)), created=1.0)
    return save_dir / f"iter_{step:07d}"


def test_a_published_save(tmp_path: Path) -> None:
    order = written_save(tmp_path, A)
    publish(tmp_path, order, created=1.0)
    found = only(scan_durable(tmp_path))
    assert (found.kind, found.save, found.step, found.world_size) == (Kind.PUBLISHED, A, 100, 2)
    assert (found.digest, found.nbytes) == (order.digest, 2 * 4096 + 70)
    assert found.usable
    assert found.why == ""
    assert 0 <= found.age < 60
    assert facts_of([found]) == (
        Fact(A, What.PUBLISHED, Tier.DURABLE, world_size=2, nbytes=2 * 4096 + 70, digest=order.digest),
    )


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("truncated", "rank 1: __1_0.distcp has 4000 bytes, its sidecar says 4096"),
        ("lost data", "rank 0: __0_1.distcp is missing"),
        ("lost sidecar", "No such file.*__1.shard"),
        ("lost .metadata", "No such file.*/.metadata"),
        ("lost manifest", "manifest.json is missing"),
        ("torn manifest", "manifest.json: "),
        ("flipped sidecar", "rank 1: not a sidecar of perdure, or damaged"),
        ("another's sidecar", "its sidecars are not those that manifest.json names"),
        ("renamed", "its manifest.json is of step 100"),
    ],
)
def test_what_is_not_whole_does_not_count(tmp_path: Path, harm: str, says: str) -> None:
    folder = published(tmp_path)
    if harm == "truncated":
        os.truncate(folder / "__1_0.distcp", 4000)
    elif harm == "torn manifest":
        os.truncate(folder / "manifest.json", 100)
    elif harm == "flipped sidecar":
        flip_bit(folder / "__1.shard", 300)
    elif harm == "another's sidecar":
        sidecar, _ = read_sidecar(folder, 1)
        write_shard(folder, A, 1, 2, sidecar.items, bytes(4096), held=sidecar.held)
    elif harm == "renamed":
        folder.rename(tmp_path / "iter_0000200")
    else:
        lost = {"lost data": "__0_1.distcp", "lost sidecar": "__1.shard", "lost .metadata": ".metadata"}
        (folder / lost.get(harm, "manifest.json")).unlink()
    found = next(each for each in scan_durable(tmp_path) if each.kind is Kind.PUBLISHED)
    assert not found.usable
    assert not found.unsure
    assert found.save == A, "whose it is can be told by what is left"
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.why)
    (fact,) = facts_of([found])
    assert (fact.what, fact.save, fact.tier, fact.why) == (What.BAD, A, Tier.DURABLE, found.why)
    assert newest_usable(tmp_path) is None


def test_all_that_is_no_published_save_of_perdure(tmp_path: Path) -> None:
    (tmp_path / "iter_0009999").mkdir()
    (tmp_path / "iter_0000300").mkdir()
    (tmp_path / "iter_0000300" / ".metadata").write_bytes(b"a pickle")
    (tmp_path / "iter_0000400").write_text("a file")
    (tmp_path / "iter_00000500").mkdir()
    (tmp_path / "iter_0000600.old").mkdir()
    (tmp_path / ".trash-12-iter_0000001").mkdir()
    (tmp_path / "iter_0000050.bad-5-0").mkdir()
    (tmp_path / "runs").mkdir()
    os.symlink("nowhere", tmp_path / "iter_0000700")
    written_save(tmp_path, SaveId(200, 5, 1))
    told = {each.path.name: (each.kind, each.why) for each in scan_durable(tmp_path)}
    assert told == {
        "iter_0009999": (Kind.OTHER, "neither a manifest nor DCP's .metadata is in it"),
        "iter_0000300": (Kind.FOREIGN, "not written by perdure"),
        "iter_0000400": (Kind.OTHER, told["iter_0000400"][1]),
        "iter_00000500": (Kind.OTHER, "its name is none of perdure's"),
        "iter_0000600.old": (Kind.OTHER, "its name is none of perdure's"),
        ".trash-12-iter_0000001": (Kind.OTHER, "is being deleted"),
        "iter_0000050.bad-5-0": (Kind.OTHER, "found bad, and replaced"),
        "iter_0000200.saving-5-1": (Kind.SAVING, "not published: it is being written, or was left unfinished"),
    }
    assert "Not a directory" in told["iter_0000400"][1]
    assert facts_of(scan_durable(tmp_path)) == ()
    assert newest_usable(tmp_path) == 300, "one of dcp.save counts for the tracker"


def test_newest_first(tmp_path: Path) -> None:
    for step in (100, 1_000_000, 12_345_678, 300):
        published(tmp_path, step)
    assert [each.step for each in scan_durable(tmp_path)] == [12_345_678, 1_000_000, 300, 100]
    assert newest_usable(tmp_path) == 12_345_678


def test_a_root_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert scan_durable(tmp_path / "none") == []
    assert scan_local(tmp_path / "none", "n0") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        scan_durable(tmp_path / "file")


def test_what_cannot_be_read_is_not_called_bad(tmp_path: Path) -> None:
    """A loop of links stands for every error that says nothing of what was written."""
    folder = published(tmp_path)
    published(tmp_path, 80)
    (folder / "__1.shard").rename(tmp_path / "kept")
    os.symlink("__1.shard", folder / "__1.shard")
    found = look_published(folder)
    assert found is not None
    assert (found.complete, found.unsure) == (False, True)
    assert "symbolic links" in found.why
    assert facts_of([found]) == ()
    with pytest.raises(OSError, match="iter_0000100 cannot be read now"):
        newest_usable(tmp_path)
    with pytest.raises(OSError, match="iter_0000100 cannot be read now"):
        publish(tmp_path, written_save(tmp_path, SaveId(100, 6, 0)), created=1.0)
    (folder / "__1.shard").unlink()
    (tmp_path / "kept").rename(folder / "__1.shard")
    assert newest_usable(tmp_path) == 100


def test_shards_of_a_node(tmp_path: Path) -> None:
    folder = local_save_of(tmp_path, "n0", A, ranks=[1, 3], world_size=4)
    local_save_of(tmp_path, "n1", A, ranks=[0], world_size=4)
    local_save_of(tmp_path, "n0", SaveId(150, 5, 1), ranks=[1], world_size=4)
    founds = scan_local(tmp_path, "n0")
    assert [(each.step, each.rank, each.usable) for each in founds] == [(150, 1, True), (100, 1, True), (100, 3, True)]
    data = (folder / "__3.shard").read_bytes()
    assert facts_of(founds)[2] == Fact(
        A, What.WRITTEN, Tier.LOCAL, rank=3, node="n0", world_size=4, nbytes=4096, digest=digest_of(data)
    )


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("truncated", "__1_0.distcp has 0 bytes, its sidecar says 4096"),
        ("lost", "__1_0.distcp is missing"),
        ("flipped", "damaged: its last bytes are not the digest"),
        ("torn", "damaged: its last bytes are not the digest"),
        ("other", "its sidecar is of step 100"),
        ("marked", "I do not like it"),
        ("all marked", "I do not like it"),
    ],
)
def test_a_shard_that_is_not_whole(tmp_path: Path, harm: str, says: str) -> None:
    folder = local_save_of(tmp_path, "n0", A, ranks=[0, 1])
    if harm == "truncated":
        os.truncate(folder / "__1_0.distcp", 0)
    elif harm == "lost":
        (folder / "__1_0.distcp").unlink()
    elif harm == "flipped":
        flip_bit(folder / "__1.shard", 77)
    elif harm == "torn":
        os.truncate(folder / "__1.shard", 0)
    elif harm == "other":
        small_shard(folder, SaveId(100, 5, 2), 1, 2)
    else:
        mark_bad(folder, "I do not like it", 1 if harm == "marked" else -1)
    first, second = scan_local(tmp_path, "n0")
    assert first.usable == (harm != "all marked")
    assert not second.usable
    assert says in second.why
    fact = facts_of([second])[0]
    assert (fact.what, fact.rank, fact.node, fact.why) == (What.BAD, 1, "n0", second.why)


def test_what_else_is_on_the_local_tier(tmp_path: Path) -> None:
    root = tmp_path / "n0"
    (root / "iter_0000100.5-1").mkdir(parents=True)
    (root / "iter_0000100.5-1" / "__0_0.distcp").write_bytes(b"not yet")
    (root / "lost+found").mkdir()
    (root / "iter_0000200.5-1").write_text("a file")
    told = {each.path.name: each.why for each in scan_local(tmp_path, "n0")}
    assert told["iter_0000100.5-1"] == "no shard in it is finished"
    assert told["lost+found"] == "its name is none of perdure's"
    assert "Not a directory" in told["iter_0000200.5-1"]
    assert facts_of(scan_local(tmp_path, "n0")) == ()


def test_marks(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert bad_mark(folder) is None
    mark_bad(folder, "first\nof two lines", 1)
    mark_bad(folder, "second", 1)
    assert (folder / "BAD-1").read_text() == "first\nof two lines\n"
    assert (bad_mark(folder, 1), bad_mark(folder, 0)) == ("first\nof two lines", None)
    found = only(scan_durable(tmp_path))
    assert (found.complete, found.bad, found.usable, found.why) == (True, True, False, "first\nof two lines")
    assert facts_of([found])[0].what is What.BAD
    mark_bad(folder, "the whole")
    assert bad_mark(folder) == "the whole"
    assert bad_mark(folder, 0) == "the whole"


def test_things_that_vanish_while_one_looks(tmp_path: Path) -> None:
    """Saves are deleted and made again as fast as it goes: no error, and nothing whole is called bad."""
    order = published(tmp_path / "one")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["cp", "-r", order, tmp_path / "made"], check=True)
            os.rename(tmp_path / "made", tmp_path / "iter_0000100")
            delete_tree(tmp_path / "iter_0000100")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            for each in scan_durable(tmp_path):
                assert each.kind is not Kind.PUBLISHED or each.usable, each.why
            newest_usable(tmp_path)
    finally:
        stop.set()
        thread.join(30)


def test_ten_thousand_entries() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        for number in range(5000):
            (root / f"iter_{number:07d}").mkdir()
            (root / f"x{number}").touch()
        published(root, 7_000_000)
        founds = scan_durable(root)
        assert len(founds) == 5001
        assert [each.step for each in founds if each.usable] == [7_000_000]
