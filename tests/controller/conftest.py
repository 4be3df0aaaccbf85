"""A real, small disk, so that 'full' is what the kernel says and not what a test pretends."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB; needs root."""
    with mounted(tmp_path / "disk", "tmpfs", "size=2m,mode=0700"):
        yield tmp_path / "disk"


@pytest.fixture
def ram_disk(tmp_path: Path) -> Iterator[Path]:
    """A ramfs, which cannot reserve space; needs root."""
    with mounted(tmp_path / "ram", "ramfs", "mode=0700"):
        yield tmp_path / "ram"


@contextlib.contextmanager
def mounted(place: Path, kind: str, options: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip(f"mounting a {kind} needs root")
    place.mkdir()
    done = subprocess.run(["mount", "-t", kind, "-o", options, kind, str(place)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def read_only_disk(small_disk: Path) -> Path:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk


@pytest.fixture
def fill() -> Callable[[Path], Path]:
    """Use up every free block of a file system; gives the file to remove to get them back."""

    def fill_disk(disk: Path) -> Path:
        filler = disk / "filler"
        with open(filler, "wb", buffering=0) as file:
            for size in (65536, 4096):
                while _write(file, size) == size:
                    pass
        return filler

    return fill_disk


@pytest.fixture
def grow() -> Callable[[Path], None]:
    """Give a small disk room again."""

    def grow_disk(disk: Path) -> None:
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)

    return grow_disk


def _write(file: FileIO, size: int) -> int:
    try:
        return file.write(b"x" * size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return 0
