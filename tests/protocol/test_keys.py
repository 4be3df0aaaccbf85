"""The job's keys: created once, private, checked."""

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from perdure.protocol.keys import (
    ENVIRONMENT,
    JobKeys,
    KeysError,
    create_keys,
    keys_from_environment,
    load_keys,
    new_keys,
)


def test_keys_are_created_once_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            created = set(pool.map(create_keys, [path] * 8))
    finally:
        os.umask(old)
    assert len(created) == 1
    assert load_keys(path) in created
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


def test_secrets_are_not_printed() -> None:
    keys = new_keys()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in f"{keys} {[keys]}"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o777])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    create_keys(path)
    path.chmod(mode)
    for use in (load_keys, create_keys):
        with pytest.raises(KeysError, match=f"keys.json has mode {mode:04o}.*must be 0600"):
            use(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_owner_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_keys(path)
    os.chown(path, 12_345, -1)
    with pytest.raises(KeysError, match="belongs to user 12345"):
        load_keys(path)


def test_what_is_not_a_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(KeysError, match="not a regular file"):
        load_keys(fifo)
    create_keys(tmp_path / "keys.json")
    link.symlink_to(tmp_path / "keys.json")
    with pytest.raises(KeysError, match="cannot read"):
        load_keys(link)
    with pytest.raises(KeysError, match="No such file"):
        load_keys(tmp_path / "absent")
    with pytest.raises(KeysError, match="must be writable"):
        create_keys(tmp_path / "absent" / "keys.json")


def test_damaged_keys_are_refused(tmp_path: Path) -> None:
    keys = new_keys()
    damaged = {
        "does not hold a job's keys": b"{",
        "missing required field": b'{"server_public": "x"}',
        "longer than": b" " * 5000,
        "server_public is not a CURVE key": msgspec.json.encode(msgspec.structs.replace(keys, server_public="short")),
        "client_secret is not a CURVE key": msgspec.json.encode(
            msgspec.structs.replace(keys, client_secret="\u00e9" * 40)
        ),
        "does not belong to client_secret": msgspec.json.encode(
            msgspec.structs.replace(keys, client_public=keys.server_public)
        ),
    }
    path = tmp_path / "keys.json"
    for message, data in damaged.items():
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(KeysError, match=message):
            load_keys(path)


def test_keys_from_the_environment() -> None:
    keys = new_keys()
    plain = msgspec.json.encode(keys).decode()
    assert keys_from_environment({}) is None
    assert keys_from_environment({ENVIRONMENT: " "}) is None
    for text in (plain, f"  {plain}\n", keys.text(), base64.b64encode(plain.encode()).decode()):
        assert keys_from_environment({ENVIRONMENT: text}) == keys
    for text in ("{", "not base64!", "AAAA", "\u00e9"):
        with pytest.raises(KeysError, match=ENVIRONMENT):
            keys_from_environment({ENVIRONMENT: text})
    assert isinstance(keys, JobKeys)
