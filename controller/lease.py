"""The lease: an exclusive lock beside the journal, so that only one controller leads a job.

The lock is an *open file description lock* (F_OFD_SETLK) over the whole file. Against the other two:

- `flock` is local or emulated on network file systems, depending on version and mount options. OFD locks go the way of
  POSIX locks: the same server, the same conflicts between nodes, so they hold on NFS as far as `lockf` does.
- A POSIX lock (`lockf`) belongs to the process and is lost when *any* descriptor of that file is closed anywhere in
  it, and a second `lockf` of the same process succeeds. An OFD lock belongs to the one open file: only closing that
  gives it up.

The kernel releases it when the holder dies, however it dies. A program that the holder starts does not inherit it: the
descriptor is close-on-exec, and a forked child of Python closes it first thing (else the lock would outlive its
holder).

A stopped holder (SIGSTOP) still holds it. That is right: it would go on where it was. The refusal says so, and what to
do. On NFS a node that is cut off loses its locks after the server's lease time; the fence against such a holder is the
incarnation in every message, not this lock.

The file is never deleted: whoever had it open would then hold a lock on nothing.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
import weakref
from enum import Enum
from pathlib import Path

import msgspec

from ..protocol.names import ProcessId, boot_id, this_process

_HOLDER_LIMIT = 65_536

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of <fcntl.h>: l_type, l_whence, l_start, l_len, l_pid (zero for OFD locks)."""


class LeaseError(Exception):
    """The lock cannot be used at all. The text says why and what to do."""


class Condition(str, Enum):
    """What can be told of a holder from here."""

    ALIVE = "alive"
    STOPPED = "stopped"
    ZOMBIE = "zombie"
    GONE = "gone"
    """Not to be seen on this machine: another pid namespace, or a child process keeps the lock."""
    ELSEWHERE = "elsewhere"
    """On another machine."""


_IN_WORDS = {
    Condition.ALIVE: "it is running; let it lead, or end it first",
    Condition.STOPPED: "it is stopped (SIGSTOP or a debugger); continue it with kill -CONT, or end it with kill -KILL",
    Condition.ZOMBIE: "its main thread has ended but the process has not; end it with kill -KILL",
    Condition.GONE: "it is not to be seen here: it is in another pid namespace, or a child of it keeps the lock",
    Condition.ELSEWHERE: "it is on another machine, look there; the lock is free as soon as it ends",
}


class Holder(msgspec.Struct, frozen=True):
    """Who holds a lease, as written into its file by the holder. `since` is wall time, for people."""

    who: str
    host: str
    process: ProcessId
    since: float

    def condition(self) -> Condition:
        if self.process.boot != boot_id():
            return Condition.ELSEWHERE
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return Condition.GONE
        if int(fields[19]) != self.process.start:
            return Condition.GONE
        return _CONDITION_OF_STATE.get(fields[0], Condition.ALIVE)

    def describe(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.who}, pid {self.process.pid} on {self.host}, since {since}"


_CONDITION_OF_STATE = {b"T": Condition.STOPPED, b"t": Condition.STOPPED, b"Z": Condition.ZOMBIE, b"X": Condition.GONE}


class LeaseHeld(Exception):
    """Somebody else leads. `holder` is None if the file does not say who; `condition` is then None too."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        self.path = path
        self.holder = holder
        self.condition = holder.condition() if holder else None
        if holder is None or self.condition is None:
            text = "by a process that has not said who it is"
        else:
            text = f"by {holder.describe()}: {_IN_WORDS[self.condition]}"
        super().__init__(f"the lease {path} is held {text}")


class Lease:
    """A held lease. Give it back with `release`, or by ending the process."""

    def __init__(self, path: Path, fd: int, holder: Holder) -> None:
        self.path = path
        self.holder = holder
        self._fd = fd
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, who: str) -> "Lease":
        """Take the lease, or raise LeaseHeld at once. `who` is for people: "controller 3 of job llama", say."""
        try:
            # O_NONBLOCK: opening a FIFO must not wait for its other end. It means nothing to a regular file.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise LeaseError(f"{path} is not a regular file; remove it")
            _lock(fd, path)
            holder = Holder(who, socket.gethostname(), this_process(), time.time())
            # The lock is what counts. A full disk may keep the holder's name from being written, no more.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, msgspec.json.encode(holder) + b"\n", 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, holder)

    def release(self) -> None:
        """Give the lease back. Doing it twice is fine."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lease in list(_held):
        lease._close()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forget_in_child)


def read_holder(path: Path) -> Holder | None:
    """Who wrote itself into the lease's file; None if nobody did. It may be dead by now, or have given it back."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_HOLDER_LIMIT), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise LeaseHeld(path, read_holder(path)) from None
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> LeaseError:
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
        return LeaseError(
            f"the file system of {path} has no file locks ({error.strerror}), so two controllers could lead one job; "
            "mount it with locks (Lustre: -o flock; NFS: without nolock), or name a run directory elsewhere"
        )
    return LeaseError(f"cannot open the lease {path}: {error.strerror}; check that its directory exists and is yours")
