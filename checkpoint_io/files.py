"""Changing folders so that a crash at any moment leaves either the old state or the new one.

A file appears by the rename of a finished, fsynced temporary one; a folder disappears by a rename to a name that says
so, and is emptied afterwards. Temporary names begin with `NEW` and are unique, so that two processes that write the
same file do not meet; one that a killed process left behind is swept by name (`prune.sweep`).
"""

import os
import secrets
import stat
from pathlib import Path

from .names import TRASH

NEW = ".new-"


def write_atomic(path: Path, data: bytes) -> None:
    """`path` holds `data`, or what it held before. The rename is durable once the folder is synced."""
    temporary = path.with_name(f"{NEW}{secrets.token_hex(4)}-{path.name}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise


def remove_file(path: Path) -> None:
    """Best effort: what cannot be removed is left to the next sweep."""
    try:
        os.unlink(path)
    except OSError:
        pass


def delete_tree(path: Path) -> list[str]:
    """Delete a folder or a file. Its name is gone at once, even if the rest is not. Returns what went wrong."""
    trash = path
    if not path.name.startswith(TRASH):
        trash = path.with_name(f"{TRASH}{secrets.token_hex(4)}-{path.name}")
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return []
        except OSError as error:
            return [f"{path} cannot be deleted: {error}"]
    problems: list[str] = []
    _remove(trash, problems)
    return problems


def _remove(path: Path, problems: list[str]) -> None:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            _remove(path / name, problems)
        os.rmdir(path)
    except FileNotFoundError:
        pass  # somebody else deletes the same tree
    except OSError as error:
        problems.append(f"{path} cannot be deleted: {error}")
