"""The endpoint file: whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from perdure.protocol.endpoint import Endpoint, EndpointError
from perdure.protocol.names import this_process


def an_endpoint(incarnation: int = 1) -> Endpoint:
    return Endpoint("job", 0, incarnation, "tcp://10.0.0.1:4242", this_process(), "k" * 40)


def test_it_comes_back_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    assert Endpoint.read(path) is None
    for incarnation in (1, 2):
        an_endpoint(incarnation).publish(path)
        assert Endpoint.read(path) == an_endpoint(incarnation)
    assert os.listdir(tmp_path) == ["endpoint.json"]


def test_a_reader_never_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.json"
    an_endpoint(0).publish(path)
    writer = threading.Thread(target=lambda: [an_endpoint(i).publish(path) for i in range(1, 200)])
    writer.start()
    seen = [0]
    while writer.is_alive():
        endpoint = Endpoint.read(path)
        assert endpoint is not None
        seen.append(endpoint.incarnation)
    writer.join()
    assert seen == sorted(seen)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"job": 1}', b"\xff\xff", b" " * 100_000])
def test_what_is_no_endpoint_is_one_error_that_names_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "endpoint.json"
    path.write_bytes(data)
    with pytest.raises(EndpointError, match=r"endpoint\.json"):
        Endpoint.read(path)


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="cannot read"):
        Endpoint.read(tmp_path)
    with pytest.raises(EndpointError, match="must be writable"):
        an_endpoint().publish(tmp_path / "absent" / "endpoint.json")
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(EndpointError):
        an_endpoint().publish(target)
    assert os.listdir(tmp_path) == ["directory"]
