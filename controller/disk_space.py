"""Space on a file system: reserved ahead of use, and described when there is none.

A journal that finds the disk full just when a rank dies loses the one record that matters. So blocks are reserved
before they are needed, beyond the end of the file: its size stays what was written, and a reader never meets reserved
zeros.
"""

import ctypes
import errno
import os
from pathlib import Path

_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE of <linux/falloc.h>. `os.posix_fallocate` has no flags and would move the end of the file."""

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean 'no room': the file system's, or the user's quota."""

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fallocate.restype = ctypes.c_int


def reserve(fd: int, offset: int, length: int) -> bool:
    """Reserve blocks for `length` bytes at `offset` without changing the file's size.

    False if this file system cannot reserve (NFS before 4.2, FAT, some FUSE); OSError if it has no room.
    """
    while _fallocate(fd, _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def describe_space(path: Path) -> str:
    """The file system under `path` and what is free on it, for an error message."""
    mount = path.absolute()
    try:
        while not os.path.ismount(mount) and mount != mount.parent:
            mount = mount.parent
        free = os.statvfs(mount)
    except OSError as error:
        return f"the file system of {path} ({error.strerror})"
    return f"{_type_of(mount)} at {mount}: {free.f_bavail * free.f_frsize} bytes and {free.f_favail} inodes free"


def _type_of(mount: Path) -> str:
    found = "file system"
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
        for row in table:
            fields = row.split()
            # Spaces in a mount point are written as \040. The last row of a mount point is the one on top.
            if len(fields) > 2 and fields[1].replace("\\040", " ") == str(mount):
                found = fields[2]
    return found
