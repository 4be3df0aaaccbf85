"""The CURVE keys of a job: who may speak on its sockets.

One key pair for the controller, one for all agents; both live in `keys.json` in the run directory, readable by its
owner only. Whoever can read that file is a member of the job. Where the hosts share no file system the same text
travels in PERDURE_KEYS.
"""

import base64
import binascii
import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

ENVIRONMENT = "PERDURE_KEYS"
"""JSON, or base64 of it."""

_LIMIT = 4096


class KeysError(Exception):
    """The keys cannot be used; the text says why and what to do."""


class JobKeys(msgspec.Struct, frozen=True):
    """Four CURVE keys in Z85 (40 characters each)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return f"JobKeys(server_public={self.server_public!r}, client_public={self.client_public!r}, secrets hidden)"

    def text(self) -> str:
        """The value for PERDURE_KEYS: one word, safe in every shell."""
        return base64.b64encode(msgspec.json.encode(self)).decode()


def new_keys() -> JobKeys:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return JobKeys(server_public.decode(), server_secret.decode(), client_public.decode(), client_secret.decode())


def create_keys(path: Path) -> JobKeys:
    """The keys in `path`; new ones are written if there is no such file.

    Of several that create at once, all get the same keys.
    """
    if path.exists():
        return load_keys(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(new_keys())) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # unlike a rename, this never replaces what another process has just created
    except OSError as error:
        raise KeysError(
            f"cannot write the job's keys to {path}: {error.strerror}; the run directory must be writable"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return load_keys(path)


def load_keys(path: Path) -> JobKeys:
    """The keys in `path`, if nobody else could have read or written them."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise KeysError(f"cannot read the job's keys in {path}: {error.strerror}") from error
    return _parsed(data, str(path))


def keys_from_environment(environment: Mapping[str, str]) -> JobKeys | None:
    """The keys in PERDURE_KEYS; None if it is not set."""
    text = environment.get(ENVIRONMENT, "").strip()
    if not text:
        return None
    if text.startswith("{"):
        return _parsed(text.encode(), ENVIRONMENT)
    try:
        return _parsed(base64.b64decode(text, validate=True), ENVIRONMENT)
    except (binascii.Error, ValueError) as error:
        raise KeysError(f"{ENVIRONMENT} is neither JSON nor base64: {error}") from None


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeysError(f"{path} is not a regular file; remove it, new keys are made at the next start")
    if status.st_uid != os.geteuid():
        raise KeysError(
            f"{path} belongs to user {status.st_uid}, this process runs as {os.geteuid()}; "
            "use a run directory of your own"
        )
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise KeysError(
            f"{path} has mode {mode:04o}, so others may know the keys; the mode must be 0600: "
            "remove the file, new keys are made at the next start"
        )


def _parsed(data: bytes, source: str) -> JobKeys:
    if len(data) > _LIMIT:
        raise KeysError(f"{source} is longer than {_LIMIT} bytes; these are not a job's keys")
    try:
        keys = msgspec.json.decode(data, type=JobKeys)
    except msgspec.MsgspecError as error:
        raise KeysError(f"{source} does not hold a job's keys: {error}") from None
    for name in keys.__struct_fields__:
        _check_key(source, name, getattr(keys, name))
    for side, public, secret in (
        ("server", keys.server_public, keys.server_secret),
        ("client", keys.client_public, keys.client_secret),
    ):
        if zmq.curve_public(secret.encode()).decode() != public:
            raise KeysError(
                f"{source}: {side}_public does not belong to {side}_secret; copy all four keys from one place"
            )
    return keys


def _check_key(source: str, name: str, key: str) -> None:
    try:
        valid = len(key) == 40 and len(z85.decode(key.encode("ascii"))) == 32
    except (ValueError, KeyError):
        valid = False
    if not valid:
        raise KeysError(f"{source}: {name} is not a CURVE key (40 characters in Z85)")
