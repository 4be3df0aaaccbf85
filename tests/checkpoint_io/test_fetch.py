"""A shard comes from another node's depot whole and verified, or not at all; and nobody waits for ever."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from perdure.checkpoint_io import fetch
from perdure.checkpoint_io.catalog import scan_local
from perdure.checkpoint_io.depot_messages import READ_LIMIT, WINDOW, No, Piece, Read, decode_reply, encode
from perdure.checkpoint_io.fetch import TEMPORARY, FetchError, fetch_shard, sweep
from perdure.checkpoint_io.fetch_task import PACKET_LIMIT, Answer, Task, decode_answer
from perdure.checkpoint_io.fetch_task import encode as encode_task
from perdure.checkpoint_io.formats import CHUNK
from perdure.checkpoint_io.names import data_name, local_name, sidecar_name
from perdure.protocol.checkpoints import SaveId
from perdure.protocol.keys import JobKeys, new_keys

from .depots import DepotProcess
from .made_saves import flip_bit, local_save_of, write_shard

SAVE = SaveId(150, 0xAB, 2)
KEYS = new_keys()
FETCH = [sys.executable, "-P", "-m", "perdure.checkpoint_io.fetch"]


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[DepotProcess]:
    """Of node n0; shard 1 of SAVE lies there."""
    local_save_of(tmp_path / "a", "n0", SAVE, [1])
    with DepotProcess("n0", KEYS, local=tmp_path / "a") as process:
        yield process


def home(tmp_path: Path) -> Path:
    """Where node n1 keeps its shards."""
    folder = tmp_path / "b" / "n1"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_a_shard_is_brought_whole(depot: DepotProcess, tmp_path: Path) -> None:
    into = home(tmp_path) / local_name(SAVE)
    assert fetch_shard(depot.address, KEYS, SAVE, 1, home(tmp_path), 20.0) == 4096
    for name in (data_name(1, 0), sidecar_name(1)):
        assert (into / name).read_bytes() == (tmp_path / "a" / "n0" / local_name(SAVE) / name).read_bytes()
    assert len(names_in(into)) == 2
    assert [found.usable for found in scan_local(tmp_path / "b", "n1")] == [True]


@pytest.mark.parametrize("size", [0, 1, READ_LIMIT, CHUNK, CHUNK + 1, 2 * CHUNK + 3 * READ_LIMIT + 5])
def test_every_size(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = write_shard(tmp_path / "a" / "n0" / local_name(SAVE), SAVE, 0, 1, [], data, b"values")
    into = home(tmp_path) / local_name(SAVE)
    with DepotProcess("n0", KEYS, local=tmp_path / "a") as depot:
        assert fetch_shard(depot.address, KEYS, SAVE, 0, home(tmp_path), 20.0, digest) == size + 6
    assert (into / data_name(0, 0)).read_bytes() == data
    assert (into / data_name(0, 1)).read_bytes() == b"values"


@pytest.mark.parametrize("name", [data_name(1, 0), sidecar_name(1)])
def test_one_flipped_bit_is_found_and_nothing_is_left(depot: DepotProcess, tmp_path: Path, name: str) -> None:
    flip_bit(tmp_path / "a" / "n0" / local_name(SAVE) / name, 777)
    into = home(tmp_path) / local_name(SAVE)
    with pytest.raises(FetchError, match=r"shard 1 of step 150 .* from the depot at tcp://127\.0\.0\.1:\d+: "):
        fetch_shard(depot.address, KEYS, SAVE, 1, home(tmp_path), 20.0)
    assert names_in(into) == []


def test_a_sidecar_that_is_intact_but_not_the_one_that_was_written(depot: DepotProcess, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="not the one that was written"):
        fetch_shard(depot.address, KEYS, SAVE, 1, home(tmp_path), 20.0, b"0" * 16)


def test_a_shorter_file_is_found(depot: DepotProcess, tmp_path: Path) -> None:
    os.truncate(tmp_path / "a" / "n0" / local_name(SAVE) / data_name(1, 0), 4000)
    with pytest.raises(FetchError, match="file 0 has 4000 bytes there, 4096 were expected"):
        fetch_shard(depot.address, KEYS, SAVE, 1, home(tmp_path), 20.0)


def test_what_is_not_there(depot: DepotProcess, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="No such file"):
        fetch_shard(depot.address, KEYS, SAVE, 0, home(tmp_path), 20.0)
    with pytest.raises(FetchError, match="No such file"):
        fetch_shard(depot.address, KEYS, SaveId(151, 0xAB, 2), 1, home(tmp_path), 20.0)


STRANGER = new_keys()


@pytest.mark.parametrize(
    "keys", [STRANGER, JobKeys(KEYS.server_public, "", STRANGER.client_public, STRANGER.client_secret), None]
)
def test_who_has_not_the_jobs_keys_gets_nothing(depot: DepotProcess, tmp_path: Path, keys: JobKeys | None) -> None:
    started = time.monotonic()
    with pytest.raises(FetchError, match=r"our key|no depot of this job|during the handshake|connection is lost"):
        fetch_shard(depot.address, keys, SAVE, 1, home(tmp_path), 15.0)
    assert time.monotonic() - started < 10


def test_a_job_in_plain_text(tmp_path: Path) -> None:
    local_save_of(tmp_path / "a", "n0", SAVE, [1])
    with DepotProcess("n0", None, local=tmp_path / "a") as depot:
        assert fetch_shard(depot.address, None, SAVE, 1, home(tmp_path), 20.0) == 4096


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(FetchError, match=f"{address}: nobody listens there"):
            fetch_shard(address, KEYS, SAVE, 1, tmp_path, 20.0)
    with pytest.raises(FetchError, match="must look like tcp://host:port"):
        fetch_shard("nonsense", KEYS, SAVE, 1, tmp_path, 20.0)


def test_a_depot_that_stands_still_is_left_after_the_deadline(depot: DepotProcess, tmp_path: Path) -> None:
    address = depot.address
    depot.stop()
    try:
        started = time.monotonic()
        with pytest.raises(FetchError, match=f"{address}: not here within the time given"):
            fetch_shard(address, KEYS, SAVE, 1, tmp_path, 0.5)
        assert time.monotonic() - started < 2
    finally:
        depot.go_on()


# ---- as a process ---------------------------------------------------------------------------------------------


class Rank:
    """The fetching process, and the rank's end of its standard input."""

    def __init__(self, run_dir: Path, address: str, into: Path) -> None:
        self.keys = run_dir / "keys.json"
        self.keys.touch(mode=0o600)
        self.keys.write_bytes(msgspec.json.encode(KEYS))
        self.address, self.into = address, into
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(20)
        with theirs:
            self.process = subprocess.Popen(FETCH, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ask(self, rank: int, digest: bytes = b"") -> None:
        task = Task(self.address, SAVE, rank, str(self.into), 20.0, str(self.keys), digest)
        self.socket.send(encode_task(task))

    def hear(self) -> Answer:
        return decode_answer(self.socket.recv(PACKET_LIMIT))

    def wait_begun(self, folder: Path) -> None:
        """Until something of a shard is here."""
        until = time.monotonic() + 20
        while not names_in(folder):
            assert time.monotonic() < until
            os.sched_yield()

    def end(self) -> tuple[int, bytes]:
        """Hang up; the exit code, and what it has printed."""
        self.socket.close()
        out, errors = self.process.communicate(timeout=5)
        return self.process.returncode, out + errors


@contextmanager
def rank_that_asks(run_dir: Path, address: str, into: Path) -> Iterator[Rank]:
    rank = Rank(run_dir, address, into)
    try:
        yield rank
    finally:
        rank.process.kill()
        rank.end()


def test_one_process_does_one_task_after_the_other(depot: DepotProcess, tmp_path: Path) -> None:
    """With the keys of the run directory. One that fails is not the last."""
    with rank_that_asks(tmp_path, depot.address, home(tmp_path)) as rank:
        for number, digest, why in (
            (1, b"", ""),
            (0, b"", "No such file"),
            (1, b"0" * 16, "not the one"),
            (1, b"", ""),
        ):
            rank.ask(number, digest)
            answer = rank.hear()
            assert answer.nbytes == (0 if why else 4096)
            assert why in answer.error
            assert bool(why) == bool(answer.error)
        assert rank.end() == (0, b"")


@contextmanager
def in_mid_task(depot: DepotProcess, tmp_path: Path) -> Iterator[tuple[Rank, Path]]:
    """A rank whose process has begun with a shard that takes a while, and the folder that it goes to."""
    write_shard(tmp_path / "a" / "n0" / local_name(SAVE), SAVE, 3, 4, [], bytes(64 << 20))
    into = home(tmp_path) / local_name(SAVE)
    with rank_that_asks(tmp_path, depot.address, into.parent) as rank:
        rank.ask(3)
        rank.wait_begun(into)
        yield rank, into


def test_a_depot_that_is_killed_is_left_at_once(depot: DepotProcess, tmp_path: Path) -> None:
    with in_mid_task(depot, tmp_path) as (rank, into):
        depot.process.kill()
        error = rank.hear().error
        assert "the connection is lost" in error or "nobody listens" in error
        assert names_in(into) == []
        assert rank.end() == (0, b"")


def test_a_process_whose_rank_is_gone_ends_in_the_middle_of_a_task(depot: DepotProcess, tmp_path: Path) -> None:
    with in_mid_task(depot, tmp_path) as (rank, into):
        depot.stop()
        try:
            assert rank.end() == (0, b"")
        finally:
            depot.go_on()
    assert names_in(into) == []


def test_a_task_that_is_none_ends_the_process(tmp_path: Path) -> None:
    with rank_that_asks(tmp_path, "", tmp_path) as rank:
        rank.socket.send(b"x" * 99)
        code, said = rank.end()
    assert code == 1
    assert b"BadPacket: 99 bytes that are no task" in said


def test_the_process_loads_no_torch() -> None:
    modules = "perdure.checkpoint_io.fetch, perdure.checkpoint_io.depot"
    code = f"import sys, {modules}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "set()"


def test_a_full_disk_leaves_nothing(depot: DepotProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes no byte."""
    full = os.open("/dev/full", os.O_WRONLY)
    real = fetch._write  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(fetch, "_write", lambda descriptor, data: real(full, data))
    into = home(tmp_path) / local_name(SAVE)
    try:
        with pytest.raises(FetchError, match="No space left on device"):
            fetch_shard(depot.address, KEYS, SAVE, 1, home(tmp_path), 20.0)
    finally:
        os.close(full)
    assert names_in(into) == []


def test_what_a_killed_fetch_left_is_swept_and_what_is_under_way_is_not(tmp_path: Path) -> None:
    folder = home(tmp_path) / local_name(SAVE)
    folder.mkdir()
    (folder / f"{TEMPORARY}left").write_bytes(b"x")
    (folder / data_name(0, 0)).write_bytes(b"x")
    with fetch._Temporaries(folder) as files:  # pyright: ignore[reportPrivateUsage]
        files.new("now")
        assert sweep(folder.parent) == 1
        assert len(names_in(folder)) == 2
    assert names_in(folder) == [data_name(0, 0)]


# ---- what a client may ask ------------------------------------------------------------------------------------


class RawClient:
    """Sends what it likes."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, KEYS.server_public.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, KEYS.client_public.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, KEYS.client_secret.encode())
        self.socket.connect(address)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def ask(self, request: bytes) -> Piece | No:
        self.socket.send(request)
        return decode_reply(self.socket.recv())


def test_no_request_reaches_another_file(depot: DepotProcess, tmp_path: Path) -> None:
    """There is no path in a request; what could make one lead elsewhere is refused."""
    node = tmp_path / "a" / "n0"
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    folder = node / local_name(SAVE)
    (folder / data_name(7, 0)).symlink_to(secret)
    os.mkfifo(folder / data_name(8, 0))
    (folder / data_name(9, 0)).mkdir()
    (node / local_name(SaveId(1, 1, 1))).symlink_to(tmp_path)
    with RawClient(depot.address) as client:
        good = Read(1, SAVE, 1, 0, 0, 100)
        assert isinstance(client.ask(encode(good)), Piece)
        for rank, why in (
            (7, "Too many levels of symbolic links"),
            (8, "not a regular file"),
            (9, "not a regular file"),
        ):
            answer = client.ask(encode(Read(1, SAVE, rank, 0, 0, 100)))
            assert isinstance(answer, No)
            assert why in answer.why
        for save in (SaveId(1, 1, 1), SaveId(-1, 1, 1), SaveId(1, -1, 1), SaveId(1, 1, -1), SaveId(10**18, 1, 1)):
            assert isinstance(client.ask(encode(Read(1, save, 1, 0, 0, 100))), No)
        for bad in (
            Read(1, SAVE, -1, 0, 0, 100), Read(1, SAVE, 1, -2, 0, 100), Read(1, SAVE, 1, 0, -1, 100),
            Read(1, SAVE, 1, 0, 0, READ_LIMIT + 1), Read(1, SAVE, 1, 0, 0, 0), Read(1, SAVE, 1, 99, 0, 1),
        ):  # fmt: skip
            assert isinstance(client.ask(encode(bad)), No)
        for junk in (b"", b"\xff" * 50, encode(good).replace(b"\x96", b"\x95"), b"[" * 900):
            assert isinstance(client.ask(junk), No)
        assert isinstance(client.ask(encode(good)), Piece), "it serves on"
        assert b"secret" not in bytes(str(depot.lines), "utf-8")


def test_a_client_that_asks_too_much_at_once_is_refused_the_rest(depot: DepotProcess) -> None:
    with RawClient(depot.address) as client:
        count = 20 * WINDOW
        for id in range(count):
            client.socket.send(encode(Read(id, SAVE, 1, 0, 0, 100)))
        answers = [decode_reply(client.socket.recv()) for _ in range(count)]
        refused = [answer for answer in answers if isinstance(answer, No)]
        assert all("requests at once" in answer.why for answer in refused)
        assert len(answers) - len(refused) >= WINDOW
        assert isinstance(client.ask(encode(Read(1, SAVE, 1, 0, 0, 100))), Piece)
