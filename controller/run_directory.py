"""The run directory: where a job's controller keeps everything that others look for, and nothing stale.

It is shared between nodes and belongs to one user: the keys in it open every connection of the job, so a directory
that others may write into is refused.

Files appear whole or not at all: they are written beside their name, synced, then renamed. A draft has a fixed name,
so that a writer that was killed a hundred times leaves one behind, not a hundred.

An *attempt* is one life of the job as a whole, counted from 1; a requeued job has several. A controller that ends a
job writes the verdict; the next attempt then starts clean, and what the last one left is moved into `attempt-N/`. A
journal without a verdict belongs to a controller that crashed, and stays where it is for recovery.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..protocol.exit_codes import ExitCode
from ..protocol.folders import sync_folder
from ..protocol.verdict import Verdict
from .journal import JournalError, read_header
from .logbook import READABLE_NAME, STRUCTURED_NAME

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class RunDirectoryError(Exception):
    """The run directory cannot be used. The text names it, the reason and the fix."""


class RunDirectory:
    """A run directory, made if it is not there, that is ours to write into."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.journal = self.path / "journal"
        self.endpoint = self.path / "endpoint.json"
        self.keys = self.path / "keys.json"
        self.lock = self.path / "lock"
        self.verdict = self.path / "verdict.json"
        self.log = self.path / READABLE_NAME
        self.log_json = self.path / STRUCTURED_NAME
        _make(self.path)
        _check_ours(self.path)
        _check_writable(self.path)

    def write_file(self, path: Path, content: bytes) -> None:
        """`content` under `path`, a name in this directory, for its owner only: after a crash all of it or none."""
        draft = self.path / f".{path.name}.tmp"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.rename(draft, path)
            sync_folder(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error

    def write_verdict(self, code: int, reason: str, cause: str = "") -> Verdict:
        """The last word on this attempt. reason: one line; cause: all that is known, for people."""
        verdict = Verdict(code, reason, cause, time.time())
        self.write_file(self.verdict, msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")
        return verdict

    def read_verdict(self) -> Verdict | None:
        """How this attempt ended; None while it has not."""
        try:
            return Verdict.read(self.verdict)
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self.verdict}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise RunDirectoryError(
                f"{self.verdict} cannot be understood ({error}); it is only ever written whole, so somebody "
                "changed it: remove it to go on with the journal beside it"
            ) from error

    def rotate_finished(self) -> int:
        """Put a finished attempt away; the number of the attempt that is to run now. Call it with the lease held.

        Can be interrupted anywhere and called again: files are collected in `attempt-N.moving`, the verdict last, and
        only then does it become `attempt-N`.
        """
        interrupted = self._numbers(r"attempt-(\d+)\.moving")
        free = 1 + max(self._numbers(r"attempt-(\d+)"), default=0)
        if not interrupted and not self.verdict.exists():
            return free
        number = max(interrupted) if interrupted else max(free, self.unfinished_attempt())
        moving = self.path / f"attempt-{number}.moving"
        try:
            moving.mkdir(mode=0o700, exist_ok=True)
            if self.verdict.exists():
                self._collect(moving)
            os.rename(moving, self.path / f"attempt-{number}")
            sync_folder(self.path)
        except OSError as error:
            raise RunDirectoryError(
                f"cannot put the finished attempt {number} of {self.path} away: {error.strerror} ({error.filename})"
            ) from error
        return number + 1

    def _numbers(self, pattern: str) -> list[int]:
        return [int(match[1]) for name in os.listdir(self.path) if (match := re.fullmatch(pattern, name))]

    def unfinished_attempt(self) -> int:
        """The attempt whose journal is here, 0 if there is none.

        A scheduler may count attempts too, and some may have left nothing here: the journal knows its own number.
        """
        try:
            return read_header(self.journal).attempt
        except JournalError:
            return 0

    def _collect(self, moving: Path) -> None:
        """Move all that belongs to the attempt. Its address goes first, so that nobody calls a dead controller."""
        for path in (self.endpoint, self.journal, self.log, self.log_json):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, moving / path.name)
        # Its keys open nothing any more, and an old secret is not worth keeping.
        self.keys.unlink(missing_ok=True)
        sync_folder(self.path)
        os.rename(self.verdict, moving / self.verdict.name)
        sync_folder(moving)


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryError(f"cannot make the run directory {path}: {error.filename} is no directory") from None
    except OSError as error:
        raise RunDirectoryError(f"cannot make the run directory {path}: {error.strerror}; name another one") from error


def _check_ours(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise RunDirectoryError(f"cannot look at the run directory {path}: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        raise RunDirectoryError(
            f"the run directory {path} belongs to user {status.st_uid} and this process runs as user {os.geteuid()}; "
            "the job's keys are kept there, so it must be your own: name another one"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise RunDirectoryError(
            f"others may write into the run directory {path} (mode {mode:04o}), and so replace the job's keys; "
            f"run: chmod go-w {path}"
        )


def _check_writable(path: Path) -> None:
    """Try it: permission bits say nothing of a read-only file system, and nothing at all to root."""
    probe = path / f".probe.{os.uname().nodename}.{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
    except OSError as error:
        raise RunDirectoryError(f"cannot write into {path}: {error.strerror}; name another one") from error


def attempt_number(directory: RunDirectory, environ: Callable[[str], str | None]) -> int:
    """Which attempt of the job this is: the run directory counts them; a scheduler's own count wins if it is higher.

    A scheduler that starts the job again has ended everything of the attempt before, whose controller may have had no
    time for a verdict: its journal is not one to recover from.
    """
    counted = directory.rotate_finished()
    restarts = environ("SLURM_RESTART_COUNT")
    scheduled = int(restarts) + 1 if restarts and restarts.isdigit() else 1
    left = directory.unfinished_attempt()
    if 0 < left < scheduled:
        reason = f"attempt {left} ended without a verdict: the scheduler has started attempt {scheduled} of the job"
        directory.write_verdict(int(ExitCode.CONTROLLER_LOST), reason)
        counted = directory.rotate_finished()
    return max(counted, scheduled)
