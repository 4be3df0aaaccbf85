"""Where the job's controller is: `endpoint.json` in the run directory.

Written by a controller when it listens, whole or not at all, and read by agents whenever they look for a controller.
A file that is there speaks of the last controller; whether it still lives is for the connection to find out.
"""

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from .folders import sync_folder
from .names import ProcessId

_LIMIT = 65_536


class EndpointError(Exception):
    """The file cannot be used; the text says why and what to do."""


class Endpoint(msgspec.Struct, frozen=True):
    """One controller. attempt: which start of the job (SLURM_RESTART_COUNT), address: `tcp://host:port`.

    server_public: the CURVE key with which it answers, empty if the job was told to run in plain text.
    """

    job: str
    attempt: int
    incarnation: int
    address: str
    process: ProcessId
    server_public: str = ""

    def publish(self, path: Path) -> None:
        """Replace the file; a reader sees the old one or the new one."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            with contextlib.suppress(OSError):
                # The name is there; whether it survives a power cut, when the job does not, matters little.
                sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise EndpointError(
                f"cannot write {path}: {error.strerror}; the run directory must be writable and not full"
            ) from error

    @staticmethod
    def read(path: Path) -> "Endpoint | None":
        """The endpoint, or None if no controller has written one."""
        try:
            with open(path, "rb") as file:
                data = file.read(_LIMIT + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EndpointError(f"cannot read {path}: {error.strerror}") from error
        if len(data) > _LIMIT:
            raise EndpointError(
                f"{path} is longer than {_LIMIT} bytes, so it is no endpoint; remove it and restart the controller"
            )
        try:
            return msgspec.json.decode(data, type=Endpoint)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EndpointError(f"{path} is no endpoint: {error}; remove it and restart the controller") from None
