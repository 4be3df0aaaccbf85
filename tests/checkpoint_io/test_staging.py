"""Images hold whole files, are reused, block nobody, and leave nothing behind."""

import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from perdure.checkpoint_io import image as image_module
from perdure.checkpoint_io import staging as staging_module
from perdure.checkpoint_io.flatten import Flat, flatten
from perdure.checkpoint_io.layout import Layout, build_layout
from perdure.checkpoint_io.memory import Room, room
from perdure.checkpoint_io.staging import Image, Staging, StagingError


def laid_out(state: dict[str, Any]) -> tuple[Flat, Layout]:
    flat = flatten(state)
    return flat, build_layout(flat, 0, 1, shared=True, atomic=False)


def some_state(scale: int = 1) -> dict[str, Any]:
    base = torch.arange(24.0 * scale).view(4, 6 * scale)
    return {
        "f": base,
        "turned": base.t(),
        "slice": base[1:3, ::2],
        "half": base.bfloat16(),
        "bool": base > 5,
        "negative": torch.complex(base, base + 1).conj().imag,
        "medium": torch.arange(20_000.0),
        "medium turned": torch.arange(20_000.0).view(100, 200).t(),
        "large": torch.arange(2_200_000.0),
        "conjugate": torch.complex(base, base + 1).conj(),
        "eight": base.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 5),
        "grad": torch.ones(3, requires_grad=True),
    }


def check(image: Image, flat: Flat) -> None:
    """By the fd, as the writer sees it."""
    assert image.layout is not None
    for item in image.layout.items:
        raw = os.pread(image.fd, item.length, item.at)
        loaded = torch.load(io.BytesIO(raw), weights_only=True)
        tensor = flat.tensors[item.fqn].detach().resolve_conj()
        assert loaded.dtype is tensor.dtype
        if tensor.dtype is torch.float8_e4m3fn:
            loaded, tensor = loaded.float(), tensor.float()
        assert torch.equal(loaded, tensor)


@pytest.fixture
def staged() -> Iterator[list[Staging]]:
    """Whatever a test adds is closed, and then the process has what it had before."""
    threads, fds = threading.active_count(), set(os.listdir("/proc/self/fd"))
    made: list[Staging] = []
    yield made
    for each in made:
        each.close()
        each.close()
    assert threading.active_count() == threads
    assert images_mapped() == 0
    left = [os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - fds if fd_is_open(fd)]
    assert [name for name in left if "perdure-image" in name] == []


def fd_is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def images_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("perdure-image")


def taken(staging: Staging) -> Image:
    image = staging.acquire()
    assert image is not None
    return image


def test_a_filled_image_is_a_file_that_torch_reads(staged: list[Staging]) -> None:
    state = some_state()
    flat, layout = laid_out(state)
    staged.append(staging := Staging(layout))
    image = taken(staging)
    image.fill(layout.sources(flat))
    check(image, flat)
    assert os.fstat(image.fd).st_size == image.size >= layout.image_bytes
    assert not os.get_inheritable(image.fd)


def test_what_changes_after_fill_is_not_saved(staged: list[Staging]) -> None:
    state = some_state()
    flat, layout = laid_out(state)
    staged.append(staging := Staging(layout))
    image = taken(staging)
    before = flatten({name: tensor.detach().clone() for name, tensor in state.items()})
    image.fill(layout.sources(flat))
    for tensor in state.values():
        tensor.detach().zero_()
    check(image, before)


def test_images_go_round_and_none_is_given_twice(staged: list[Staging]) -> None:
    flat, layout = laid_out(some_state())
    staged.append(staging := Staging(layout))
    staging.start()
    first, second = taken(staging), taken(staging)
    assert {first.index, second.index} == {0, 1}
    assert staging.acquire() is None
    began = monotonic()
    assert not staging.wait_free(0.05)
    assert monotonic() - began < 5
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(staging.wait_free, 20)
        staging.release(second.index)
        assert waiting.result(20)
    assert taken(staging) is second
    staging.release(first.index)
    staging.release(first.index)
    assert taken(staging) is first
    assert staging.acquire() is None
    first.fill(layout.sources(flat))


def test_a_larger_layout_keeps_fds_and_a_busy_image_stays_whole(staged: list[Staging]) -> None:
    small_flat, small = laid_out(some_state())
    large_flat, large = laid_out(some_state(300))
    staged.append(staging := Staging(small))
    fds = [image.fd for image in staging.images]
    busy = taken(staging)
    busy.fill(small.sources(small_flat))
    staging.resize(large)
    other = taken(staging)
    assert other is not busy
    other.fill(large.sources(large_flat))
    check(other, large_flat)
    check(busy, small_flat)
    with pytest.raises(StagingError, match="not those of the image's layout"):
        busy.fill(large.sources(large_flat))
    staging.release(busy.index)
    assert taken(staging) is busy
    busy.fill(large.sources(large_flat))
    check(busy, large_flat)
    assert [image.fd for image in staging.images] == fds
    assert [os.fstat(fd).st_size for fd in fds] == [image.size for image in staging.images] == [large.image_bytes] * 2


def test_a_smaller_layout_reuses_the_memory_and_leaves_nothing_between_items(staged: list[Staging]) -> None:
    large_flat, large = laid_out({"w": torch.full((40_000,), -1.0)})
    small_flat, small = laid_out({"a": torch.ones(3), "b": torch.ones(5)})
    staged.append(staging := Staging(large, images=1))
    image = taken(staging)
    image.fill(large.sources(large_flat))
    staging.release(0)
    staging.resize(small)
    image = taken(staging)
    image.fill(small.sources(small_flat))
    check(image, small_flat)
    assert image.size == large.image_bytes
    fresh = Staging(small, images=1)
    staged.append(fresh)
    clean = taken(fresh)
    clean.fill(small.sources(small_flat))
    assert os.pread(image.fd, small.image_bytes, 0) == os.pread(clean.fd, small.image_bytes, 0)


def test_mappings_stay_few_when_layouts_change(staged: list[Staging]) -> None:
    staged.append(staging := Staging(laid_out({"w": torch.ones(1)})[1]))
    for size in range(1, 40):
        flat, layout = laid_out({"w": torch.ones(size * 3000)})
        staging.resize(layout)
        image = taken(staging)
        image.fill(layout.sources(flat))
        staging.release(image.index)
    assert images_mapped() <= 2


def test_a_copy_of_another_shape_or_dtype_is_refused(staged: list[Staging]) -> None:
    """torch would broadcast the one and convert the other without a word."""
    _, layout = laid_out({"w": torch.ones(3, 4)})
    staged.append(staging := Staging(layout))
    image = taken(staging)
    for wrong in ([torch.ones(4)], [torch.ones(3, 4).double()], [], [torch.ones(3, 4)] * 2):
        with pytest.raises(StagingError):
            image.fill(wrong)


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"w": torch.empty(0)}])
def test_a_rank_that_writes_no_bytes(staged: list[Staging], state: dict[str, Any]) -> None:
    flat, layout = laid_out(state)
    staged.append(staging := Staging(layout))
    image = taken(staging)
    image.fill(layout.sources(flat))
    check(image, flat)
    assert image.size > 0


def test_too_little_memory_is_one_error_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layout = laid_out({"w": torch.ones(3000)})
    monkeypatch.setattr(staging_module, "room", lambda: Room(5000, "the control group /x"))
    with pytest.raises(StagingError, match=r"needs 32,768 more bytes.*2 images of 16,384.*5,000 are left.*group /x"):
        Staging(layout)
    assert images_mapped() == 0


def test_memory_that_cannot_be_had_later_is_told_to_who_wants_it(staged: list[Staging]) -> None:
    _, layout = laid_out({"w": torch.ones(300_000)})
    staged.append(staging := Staging(layout))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(StagingError, match=r"cannot get 1,20\d,\d+ bytes of shared memory"):
                staging.acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    # Once there is enough again, a new layout is all it takes.
    staging.resize(layout)
    assert staging.acquire() is not None


def test_memory_that_other_ranks_take_meanwhile_is_noticed_before_the_kernel_kills_somebody(
    staged: list[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, layout = laid_out({"w": torch.ones(300_000)})
    staged.append(staging := Staging(layout))
    left = iter([1 << 30, 1 << 30, 1 << 27])
    monkeypatch.setattr(image_module, "_STRIDE", 1 << 19)
    monkeypatch.setattr(image_module, "room", lambda: Room(next(left), "the machine"))
    with pytest.raises(StagingError, match=r"stopped at 1,048,576 of 1,20\d,\d+ bytes.*134,217,728 bytes are left"):
        staging.acquire()
    assert os.fstat(staging.images[0].fd).st_blocks == 0
    monkeypatch.setattr(image_module, "room", lambda: Room(1 << 30, "the machine"))
    staging.resize(layout)
    assert staging.acquire() is not None


def test_an_old_kernel_is_touched_page_by_page(staged: list[Staging], monkeypatch: pytest.MonkeyPatch) -> None:
    flat, layout = laid_out(some_state(300))
    monkeypatch.setattr(image_module, "_MADV_POPULATE_WRITE", 999)
    staged.append(staging := Staging(layout))
    image = taken(staging)
    image.fill(layout.sources(flat))
    check(image, flat)


def test_memory_is_there_before_the_first_save(staged: list[Staging]) -> None:
    _, layout = laid_out({"w": torch.ones(1_000_000)})
    staged.append(staging := Staging(layout))
    taken(staging)
    resident = 0
    for block in Path("/proc/self/smaps").read_text().split("VmFlags"):
        if "perdure-image-0" in block:
            resident += int(block.split("Rss:")[1].split()[0]) << 10
    assert resident >= layout.image_bytes


def test_closing_ends_what_is_under_way() -> None:
    _, layout = laid_out({"w": torch.ones(8_000_000)})
    staging = Staging(layout)
    staging.start()
    staging.close()
    assert images_mapped() == 0
    with pytest.raises(StagingError, match="closed"):
        staging.acquire()


MANY = """
import os, resource, warnings
warnings.simplefilter("ignore")
import torch
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from perdure.checkpoint_io.flatten import flatten
from perdure.checkpoint_io.layout import build_layout
from perdure.checkpoint_io.staging import Staging
flat = flatten({f"w{n}": torch.full((5,), float(n)) for n in range(3000)})
layout = build_layout(flat, 0, 1, shared=True, atomic=False)
before = len(os.listdir("/proc/self/fd"))
staging = Staging(layout)
for _ in range(4):
    image = staging.acquire()
    image.fill(layout.sources(flat))
    staging.release(image.index)
print(len(os.listdir("/proc/self/fd")) - before, os.getpid(), image.fd, flush=True)
import sys
sys.stdin.read()
"""


def test_3000_tensors_take_no_fds_and_a_kill_leaves_nothing() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", MANY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        fds, pid, fd = map(int, process.stdout.readline().split())
        assert fds <= 4
        assert "perdure-image" in os.readlink(f"/proc/{pid}/fd/{fd}")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    assert set(os.listdir("/dev/shm")) <= shared_before


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def machine(root: Path, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def test_room_is_that_of_the_machine_or_of_the_tightest_group(tmp_path: Path) -> None:
    assert room(machine(tmp_path / "bare", "")) == Room(8000 << 10, "the machine (MemAvailable)")

    root = machine(tmp_path / "v2", "0::/job/rank\n")
    top = root / "sys/fs/cgroup"
    group(top / "job", memory__max=1_000_000, memory__current=700_000, memory__stat="anon 1\ninactive_file 100000")
    group(top / "job/rank", memory__max="max", memory__current=5, memory__stat="inactive_file 0")
    found = room(root)
    assert found.nbytes == 400_000
    assert "job (limit 1,000,000 bytes)" in found.where

    root = machine(tmp_path / "v1", "4:memory:/job\n3:cpu:/job\n0::/\n")
    stat = "inactive_file 7\ntotal_inactive_file 50"
    top = root / "sys/fs/cgroup/memory"
    group(top, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1, memory__stat=stat)
    group(top / "job", memory__limit_in_bytes=2000, memory__usage_in_bytes=1900, memory__stat=stat)
    assert room(root).nbytes == 150

    # In a container: the path is the host's, and the group is mounted at the top.
    root = machine(tmp_path / "container", "0::/kubepods/pod7/c3\n")
    group(root / "sys/fs/cgroup", memory__max=3000, memory__current=4000, memory__stat="inactive_file 0")
    assert room(root).nbytes == 0


def test_room_here() -> None:
    assert room().nbytes > 0
