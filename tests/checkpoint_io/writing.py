"""A trainer that has a writer process, as the tests of the writer use it. Imports nothing of the tests' own."""

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from perdure.checkpoint_io.formats import CHUNK, Item, Sidecar, decode_sidecar
from perdure.checkpoint_io.writer_client import Outcome, Writer
from perdure.checkpoint_io.writer_messages import Failed, Released, UseLayout, Value, Write
from perdure.protocol.checkpoints import SaveId

SIZE = 3 << 20
SHARE = 2 << 20
DEADLINE_S = 30.0


def item(number: int, at: int, length: int) -> Item:
    return Item(f"w{number}", (f"w{number}",), (length,), (0,), (length,), "uint8", 0, 0, at, length, at, length)


LAYOUT = UseLayout(1, (item(0, 0, SHARE), item(1, SHARE, SIZE - SHARE)), 1, SHARE, SIZE, ("left.to.others",))
VALUES: tuple[Value, ...] = (("step", ("step",), b"7" * 70), ("extra", ("extra",), b"e" * 9))


class Image:
    """Memory as the trainer shares it."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.fd = os.memfd_create("image")
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)

    def fill(self) -> bytes:
        data = os.urandom(1 << 20) * (self.size >> 20)
        self.memory[:] = data
        return data

    def close(self) -> None:
        if not self.memory.closed:
            self.memory.close()
            os.close(self.fd)


class Trainer:
    """A writer, its images, and everything that it told."""

    def __init__(self, size: int = SIZE) -> None:
        self.told: list[Outcome] = []
        self.notes: list[str] = []
        self.news = threading.Condition()
        self.writer = Writer(self._fact, self._note)
        self.images = [Image(size), Image(size)]
        self.writer.start()
        self.writer.use_layout(LAYOUT if size == SIZE else UseLayout(1, (), 0, size, size))
        for index, image in enumerate(self.images):
            self.writer.use_image(index, image.fd, image.size)

    def _fact(self, outcome: Outcome) -> None:
        with self.news:
            self.told.append(outcome)
            self.news.notify_all()

    def _note(self, level: str, text: str) -> None:
        with self.news:
            self.notes.append(f"{level}: {text}")
            self.news.notify_all()

    def until(self, done: Callable[[], object], limit_s: float = 20) -> None:
        with self.news:
            assert self.news.wait_for(done, limit_s), (self.told, self.notes)

    def of(self, step: int) -> list[Outcome]:
        return [each for each in self.told if each.save.step == step]

    def why(self, step: int) -> str:
        """Of the first failure."""
        return next(each.why for each in self.of(step) if isinstance(each, Failed))

    def is_free(self, step: int) -> bool:
        return any(isinstance(each, Released) for each in self.of(step))

    def write(
        self,
        step: int,
        local: Path | None = None,
        durable: Path | None = None,
        image: int = 0,
        deadline_s: float = DEADLINE_S,
        values: tuple[Value, ...] = (),
        layout: int = 1,
        round: int = 4,
    ) -> None:
        folders = [None if each is None else str(each) for each in (local, durable)]
        shares = min(len(values), 1)
        now = time.monotonic()
        self.writer.write(Write(SaveId(step, 9, round), 2, 3, layout, image, now, deadline_s, values, shares, *folders))

    def finish(self, step: int) -> list[Outcome]:
        """Wait for all outcomes of a step."""
        assert self.writer.wait(time.monotonic() + 20) == ()
        self.until(lambda: self.is_free(step))
        return self.of(step)

    def pid(self) -> int:
        """Of the process that runs now."""
        return children()[-1]

    def close(self) -> None:
        self.writer.close(0)
        for image in self.images:
            image.close()


def children() -> list[int]:
    """Writer processes of this process that live."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(stat[1]) == os.getpid() and b"checkpoint_io.writer" in command:
            found.append(int(name))
    return sorted(found)


@contextmanager
def training(size: int = SIZE) -> Iterator[Trainer]:
    trainer = Trainer(size)
    try:
        yield trainer
    finally:
        trainer.close()
    assert children() == []


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def sidecar_of(folder: Path) -> Sidecar:
    return decode_sidecar((folder / "__2.shard").read_bytes())


def check_shard(folder: Path, tensors: bytes, values: int, extra: int) -> Sidecar:
    """The files of a shard hold what they should, and the sidecar says so."""
    files = ["__2_0.distcp", *(["__2_1.distcp"] if values else [])]
    assert names(folder) == ["__2.shard", *files]
    assert (folder / "__2_0.distcp").read_bytes() == tensors
    sidecar = sidecar_of(folder)
    assert sidecar.extra == extra
    assert len(sidecar.files) == len(files)
    for name, file in zip(files, sidecar.files, strict=True):
        data = (folder / name).read_bytes()
        assert len(data) == file.size
        assert file.digests == tuple(xxh3_64_intdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))
    return sidecar


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True, timeout=10)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=10)
