"""Publishing: what ends under the final name, killed anywhere, done by two at once, with a full disk."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from perdure.checkpoint_io.catalog import look_published, mark_bad, scan_durable
from perdure.checkpoint_io.formats import BadFormat, decode_manifest, encode_manifest
from perdure.checkpoint_io.names import bad_name, published_name, saving_name
from perdure.checkpoint_io.prune import sweep
from perdure.checkpoint_io.publish import PublishFailed, point_tracker, publish, read_tracker
from perdure.checkpoint_io.verify import verify_save
from perdure.protocol.checkpoints import Publish, SaveId

from .made_saves import small_shard, written_save

A = SaveId(100, 5, 1)
B = SaveId(100, 6, 0)


def problems(folder: Path) -> list[str]:
    return [each.problem for each in verify_save(folder) if each.problem]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_written_save_gets_its_name(tmp_path: Path) -> None:
    order = written_save(tmp_path, A)
    manifest = publish(tmp_path, order, created=1234.5)
    assert (manifest.step, manifest.epoch, manifest.round, manifest.world_size) == (100, 5, 1, 2)
    assert manifest.nbytes == 2 * 4096 + 70
    assert manifest.digest == order.digest.hex()
    assert names(tmp_path) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"100"
    folder = tmp_path / "iter_0000100"
    shards = ["__0.shard", "__0_0.distcp", "__0_1.distcp", "__1.shard", "__1_0.distcp"]
    assert names(folder) == [".metadata", *shards, "manifest.json", "metadata.json", "sidecars.bundle"]
    assert json.loads((folder / "metadata.json").read_bytes()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert decode_manifest((folder / "manifest.json").read_bytes()).created == 1234.5
    assert problems(folder) == []


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    order = written_save(tmp_path, A)
    first = publish(tmp_path, order, created=1.0)
    before = {name: (tmp_path / "iter_0000100" / name).stat().st_mtime_ns for name in names(tmp_path / "iter_0000100")}
    assert publish(tmp_path, order, created=2.0) == first
    after = {name: (tmp_path / "iter_0000100" / name).stat().st_mtime_ns for name in names(tmp_path / "iter_0000100")}
    assert after == before


def test_many_shards(tmp_path: Path) -> None:
    assert publish(tmp_path, written_save(tmp_path, A, world_size=40), created=1.0).world_size == 40
    assert problems(tmp_path / "iter_0000100") == []


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("digest", "the sidecars in .* have the digest .*, the ranks reported 0000"),
        ("truncated", "rank 1: __1_0.distcp has 4000 bytes, its sidecar says 4096"),
        ("lost", "rank 0: __0_1.distcp is missing"),
        ("torn sidecar", "rank 1: not a sidecar of perdure, or damaged"),
        ("other rank", "rank 1: __1.shard is the sidecar of rank 0"),
        ("other save", "rank 1: its shard is of step 100 .round 7., world size 2"),
        ("other world", "rank 1: its shard is of step 100 .round 1., world size 3"),
        ("never written", "there is no .*saving-5-1, and .*iter_0000100 is not there either"),
    ],
)
def test_what_is_not_as_reported_is_not_published(tmp_path: Path, harm: str, says: str) -> None:
    order = written_save(tmp_path, A)
    ours = tmp_path / saving_name(A)
    if harm == "digest":
        order = Publish(A, 2, bytes(16))
    elif harm == "truncated":
        os.truncate(ours / "__1_0.distcp", 4000)
    elif harm == "lost":
        (ours / "__0_1.distcp").unlink()
    elif harm == "torn sidecar":
        os.truncate(ours / "__1.shard", 60)
    elif harm == "other rank":
        (ours / "__1.shard").write_bytes((ours / "__0.shard").read_bytes())
    elif harm == "other save":
        small_shard(ours, SaveId(100, 5, 7), 1, 2)
    elif harm == "other world":
        small_shard(ours, A, 1, 3)
    else:
        ours.rename(tmp_path / "elsewhere")
    with pytest.raises(PublishFailed, match=says):
        publish(tmp_path, order, created=1.0)
    assert not (tmp_path / "iter_0000100").exists()
    assert read_tracker(tmp_path) is None


def test_a_lost_sidecar_is_named(tmp_path: Path) -> None:
    order = written_save(tmp_path, A)
    (tmp_path / saving_name(A) / "__1.shard").unlink()
    with pytest.raises(FileNotFoundError, match=r"__1\.shard"):
        publish(tmp_path, order, created=1.0)


def test_a_step_is_published_once(tmp_path: Path) -> None:
    first = publish(tmp_path, written_save(tmp_path, A), created=1.0)
    assert publish(tmp_path, written_save(tmp_path, B), created=2.0) == first
    assert names(tmp_path) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert problems(tmp_path / "iter_0000100") == []


def test_a_good_one_makes_room_if_it_is_named(tmp_path: Path) -> None:
    """Its bytes were found bad, or the job has gone back behind it."""
    publish(tmp_path, written_save(tmp_path, A), created=1.0)
    order = msgspec.structs.replace(written_save(tmp_path, B), over=A)
    assert publish(tmp_path, order, created=2.0).digest == order.digest.hex()
    assert problems(tmp_path / "iter_0000100") == []
    assert (tmp_path / bad_name(A) / "BAD").read_text() != ""
    assert publish(tmp_path, order, created=3.0).created == 2.0


@pytest.mark.parametrize("harm", ["marked", "shard marked", "truncated", "no manifest", "nothing readable"])
def test_an_unusable_one_makes_room(tmp_path: Path, harm: str) -> None:
    publish(tmp_path, written_save(tmp_path, A), created=1.0)
    old = tmp_path / "iter_0000100"
    if harm == "marked":
        mark_bad(old, "a bit flipped")
    elif harm == "shard marked":
        mark_bad(old, "a bit flipped", 1)
    elif harm == "truncated":
        os.truncate(old / "__1_0.distcp", 0)
    else:
        (old / "manifest.json").unlink()
    if harm == "nothing readable":
        for rank in range(2):
            os.truncate(old / f"__{rank}.shard", 3)
    order = written_save(tmp_path, B)
    assert publish(tmp_path, order, created=2.0).digest == order.digest.hex()
    assert problems(old) == []
    moved = tmp_path / bad_name(B if harm == "nothing readable" else A)
    assert (moved / "__0_0.distcp").stat().st_size == 4096
    assert (moved / "BAD").read_text() != "" or harm == "shard marked"
    assert read_tracker(tmp_path) == 100


def test_what_is_not_perdures_stays(tmp_path: Path) -> None:
    order = written_save(tmp_path, A)
    final = tmp_path / "iter_0000100"
    final.mkdir()
    (final / ".metadata").write_bytes(b"of dcp.save")
    with pytest.raises(
        PublishFailed, match=r"iter_0000100 exists and is not perdure's \(not written by perdure\); move it"
    ):
        publish(tmp_path, order, created=1.0)
    (final / ".metadata").rename(final / "notes.txt")
    with pytest.raises(PublishFailed, match="neither a manifest nor DCP's"):
        publish(tmp_path, order, created=1.0)
    assert (final / "notes.txt").read_bytes() == b"of dcp.save"
    (final / "notes.txt").unlink()
    publish(tmp_path, order, created=1.0)  # an empty folder is nobody's loss
    assert problems(final) == []


def test_the_tracker_names_the_newest_good_one(tmp_path: Path) -> None:
    steps = [SaveId(step, 5, 1) for step in (300, 100, 200)]
    named: list[int | None] = []
    for save in steps:
        publish(tmp_path, written_save(tmp_path, save), created=1.0)
        named.append(read_tracker(tmp_path))
    assert named == [300, 300, 300]
    mark_bad(tmp_path / "iter_0000300", "bad")
    point_tracker(tmp_path)
    assert read_tracker(tmp_path) == 200
    (tmp_path / "iter_9999999").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("torn\x00")
    point_tracker(tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"200"


# ---- killed anywhere ------------------------------------------------------------------------------------------

DRIVER = '''
import os, shutil, signal, sys
from pathlib import Path
from perdure.checkpoint_io.publish import publish
from perdure.protocol.checkpoints import Publish, SaveId

root, orders, processes = Path(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])
CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
seen = 0

def run(folder, kill_at, order):
    """Publishes in a child that kills itself before its n-th call that may change something."""
    child = os.fork()
    if child:
        return child
    def hook(event, args):
        global seen
        if event in CHANGES:
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    try:
        publish(folder, order, created=1.0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

number, killed = 0, True
while killed:
    number += 1
    folder = root / str(number)
    shutil.copytree(root / "start", folder)
    children = [run(folder, number, orders[each % len(orders)]) for each in range(processes)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(number, *ends, flush=True)
    killed = -signal.SIGKILL in ends
'''


def killed_everywhere(root: Path, orders: list[Publish], processes: int = 1) -> list[tuple[Path, list[int]]]:
    """What `publish` leaves when it is killed before its first, second, ... step, and how its processes ended."""
    command = [sys.executable, "-c", DRIVER, str(root), repr(orders), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return [(root / str(number), ends) for number, *ends in lines]


def only_whole_ones(folder: Path, named: int | None) -> None:
    """Whatever has a final name is whole, and the tracker names one of them, or what it `named` before."""
    good = {each.step for each in scan_durable(folder) if each.usable}
    for name in names(folder):
        if name.startswith("iter_") and "." not in name:
            whole = look_published(folder / name)
            assert whole is not None
            assert whole.bad or problems(folder / name) == []
    assert read_tracker(folder) in good | {named}


@pytest.mark.parametrize("before", ["nothing", "an older one", "a bad one", "a good one"])
def test_killed_anywhere_it_ends_well(tmp_path: Path, before: str) -> None:
    start = tmp_path / "start"
    start.mkdir()
    if before != "nothing":
        publish(start, written_save(start, SaveId(80, 5, 0)), created=1.0)
    if before in ("a bad one", "a good one"):
        publish(start, written_save(start, A), created=1.0)
    if before == "a bad one":
        mark_bad(start / "iter_0000100", "a bit flipped")
        point_tracker(start)
    order = written_save(start, B)
    named = read_tracker(start)
    runs = killed_everywhere(tmp_path, [order])
    assert len(runs) > 20
    assert [ends for _, ends in runs] == [[-signal.SIGKILL]] * (len(runs) - 1) + [[0]]
    for folder, _ in runs:
        only_whole_ones(folder, named)
        manifest = publish(folder, order, created=2.0)
        assert (manifest.epoch, manifest.round) == ((5, 1) if before == "a good one" else (6, 0))
        assert problems(folder / "iter_0000100") == []
        assert read_tracker(folder) == 100
        assert sweep(folder) == []
        others = {"nothing": [], "a bad one": ["iter_0000080", "iter_0000100.bad-5-1"]}.get(before, ["iter_0000080"])
        assert names(folder) == sorted([*others, "iter_0000100", "latest_checkpointed_iteration.txt"])
        assert not [name for name in names(folder / "iter_0000100") if name.startswith(".new-")]


@pytest.mark.parametrize("replaced", [False, True])
def test_several_at_once_and_all_killed_somewhere(tmp_path: Path, replaced: bool) -> None:
    start = tmp_path / "start"
    start.mkdir()
    if replaced:
        publish(start, written_save(start, B), created=1.0)
        mark_bad(start / "iter_0000100", "a bit flipped")
    orders = [written_save(start, A), written_save(start, SaveId(120, 5, 1))]
    named = read_tracker(start)
    for folder, ends in killed_everywhere(tmp_path, orders, processes=4):
        assert set(ends) <= {0, -signal.SIGKILL}
        only_whole_ones(folder, named)
        if 0 in ends[1::2] and not any(ends[::2]):
            assert read_tracker(folder) == 120, "the older one's publishers do not have the last word"
        for order in orders:
            publish(folder, order, created=2.0)
            assert problems(folder / published_name(order.save.step)) == []
        assert read_tracker(folder) == 120


# ---- no room --------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False, timeout=10)
    if mounted.returncode != 0:
        pytest.skip("this machine does not allow to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True, timeout=10)


@pytest.mark.parametrize("room", range(5))
def test_a_full_disk_publishes_nothing(tiny: Path, room: int) -> None:
    """room: so many pages are left: bundle, .metadata, metadata.json and manifest need one each, and the tracker."""
    publish(tiny, written_save(tiny, SaveId(80, 5, 0)), created=1.0)
    order = written_save(tiny, A)
    filler = tiny / "filler"
    free = os.statvfs(tiny)
    filler.write_bytes(bytes((free.f_bavail - room) * free.f_bsize))
    with pytest.raises(OSError, match="No space"):
        publish(tiny, order, created=1.0)
    assert read_tracker(tiny) == 80
    assert (tiny / "iter_0000100").exists() == (room == 4), "with four pages only the tracker has no room"
    assert problems(tiny / "iter_0000080") == []
    assert not list(tiny.rglob(".new-*"))
    filler.unlink()
    publish(tiny, order, created=2.0)
    assert problems(tiny / "iter_0000100") == []
    assert read_tracker(tiny) == 100


# ---- the manifest ---------------------------------------------------------------------------------------------


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    data = encode_manifest(publish(tmp_path, written_save(tmp_path, A), created=1234.567))
    assert data == (tmp_path / "iter_0000100" / "manifest.json").read_bytes()
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(BadFormat):
            decode_manifest(bytes(flipped))
    for end in range(len(data)):
        with pytest.raises(BadFormat):
            decode_manifest(data[:end])
