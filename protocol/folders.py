"""Making a change to a folder durable: a new name, or that one is gone."""

import errno
import os
from pathlib import Path

NO_SUCH_CALL = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What a file system answers that does not have what is asked for."""


def sync_folder(path: str | Path) -> None:
    """What was renamed in it stays renamed, whatever happens to the machine. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems cannot, and need not.
        if error.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(folder)
