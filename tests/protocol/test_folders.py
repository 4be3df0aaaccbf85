"""Syncing folders, on file systems that can and on those that say they cannot."""

import errno
import os
from pathlib import Path

import pytest

from perdure.protocol.folders import sync_folder


class Answer:
    """In the place of fsync: remembers what was synced, or fails."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.synced: list[str] = []

    def __call__(self, fd: int) -> None:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        self.synced.append(os.readlink(f"/proc/self/fd/{fd}"))


def test_a_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer()
    monkeypatch.setattr(os, "fsync", answer)
    sync_folder(tmp_path)
    sync_folder(str(tmp_path))
    assert answer.synced == [str(tmp_path)] * 2
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_has_no_such_call_is_taken_as_it_is(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Answer(code))
    sync_folder(tmp_path)


def test_a_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Answer(errno.EIO))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)
