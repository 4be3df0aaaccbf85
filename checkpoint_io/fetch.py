"""Brings a shard from another node's depot here, verified.

Used by a depot, in a thread, and by a restoring rank as a process of its own (`python -m perdure.checkpoint_io.fetch`),
since ranks do not load ZeroMQ. The process does one task of its rank (`fetch_task`) after the other, and ends when the
rank closes its standard input or is gone, in the middle of a task too.

Rules. Every byte is compared with the digests in the shard's sidecar before anything gets its final name; the sidecar
is the last to get it, so a shard that is cut off is none. Several requests are under way at once, or the time of the
round trips would limit the speed. Every wait ends: by an overall deadline, by SILENCE_S without a sign of the other
side, or at once if the connection is refused or breaks, or if nobody wants the shard any more; the error names the
address.
"""

import contextlib
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash
import zmq

from ..protocol.checkpoints import SaveId
from ..protocol.endpoint import Endpoint, EndpointError
from ..protocol.folders import sync_folder
from ..protocol.keys import JobKeys, KeysError, keys_from_environment, load_keys
from ..protocol.wire import new_context, parse_monitor_event, set_common_options
from .depot_messages import (
    FILE_LIMIT,
    READ_LIMIT,
    REPLY_LIMIT,
    SIDECAR,
    WINDOW,
    BadFrame,
    No,
    Piece,
    Read,
    decode_reply,
    encode,
)
from .fetch_task import ERROR_LIMIT, PACKET_LIMIT, Answer, Task, decode_task
from .fetch_task import encode as encode_answer
from .formats import CHUNK, BadFormat, DataFile, Sidecar, decode_sidecar, digest_of
from .names import data_name, local_name, local_save, sidecar_name

SILENCE_S = 20.0
"""How long the other side may take for its next sign. A depot gives up a read, and says so, before that."""

HEARTBEAT_S = 10.0
SIDECAR_LIMIT = 256 << 20
TEMPORARY = ".fetch-"
"""Names that begin so are files that are being fetched, locked by whoever fetches them."""

_FAILURES = {
    int(zmq.EVENT_CONNECT_RETRIED): "nobody listens there",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it does not know our key",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "what listens there is no depot of this job",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it closed the connection during the handshake: another job's, perhaps",
    int(zmq.EVENT_DISCONNECTED): "the connection is lost",
}


class FetchError(Exception):
    """A shard could not be brought here. The text says which, from where, and why."""


def fetch_shard(
    address: str,
    keys: JobKeys | None,
    save: SaveId,
    rank: int,
    into: Path,
    deadline_s: float,
    digest: bytes = b"",
    wanted: int | None = None,
) -> int:
    """Bring the shard of `rank` from the depot at `address`, over whatever is here of it; its size.

    into: a node's folder of the local tier, made if need be; the shard goes to the folder of its save in there.
    keys: None if the job runs in plain text. digest: of the sidecar, if it is known. wanted: a descriptor, which has
    something to read, be it its end, when nobody wants the shard any more. Raises FetchError.
    """
    client = _Client(address, keys, save, rank, time.monotonic() + deadline_s, wanted)
    try:
        data = client.whole(SIDECAR)
        sidecar = _checked(data, save, rank, digest)
        folder = into / local_name(save)
        folder.mkdir(parents=True, exist_ok=True)
        with _Temporaries(folder) as files:
            for number, file in enumerate(sidecar.files):
                _receive(client, files.new(data_name(rank, number)), number, file)
            last = files.new(sidecar_name(rank))
            _write(last, data)
            os.fsync(last)
            files.give_names()
        return sum(file.size for file in sidecar.files)
    except BadFormat as error:
        raise FetchError(f"{client.what}: {error}") from None
    except (OSError, zmq.ZMQError) as error:
        raise FetchError(f"{client.what}: {error.strerror or error} ({into})") from None
    finally:
        client.close()


def sweep(folder: Path) -> int:
    """Remove what fetches that were killed have left in the saves of the local tier `folder`; how many files."""
    count = 0
    with contextlib.suppress(OSError), os.scandir(folder) as saves:
        for entry in saves:
            if local_save(entry.name) is not None and entry.is_dir(follow_symlinks=False):
                count += sum(_remove_abandoned(path) for path in Path(entry.path).glob(f"{TEMPORARY}*"))
    return count


# ---- the other side -------------------------------------------------------------------------------------------


class _Client:
    """One connection to one depot, for one shard."""

    def __init__(
        self, address: str, keys: JobKeys | None, save: SaveId, rank: int, until: float, wanted: int | None
    ) -> None:
        self.what = f"shard {rank} of {save} from the depot at {address}"
        self._save, self._rank, self._until, self._wanted = save, rank, until, wanted
        self._next = 0
        self._context = new_context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._monitor = self._context.socket(zmq.PAIR)
        try:
            self._connect(address, keys)
        except zmq.ZMQError as error:
            self.close()
            raise FetchError(f"{self.what}: {error.strerror}; it must look like tcp://host:port") from None

    def _connect(self, address: str, keys: JobKeys | None) -> None:
        dealer = self._dealer
        set_common_options(dealer, HEARTBEAT_S)
        dealer.setsockopt(zmq.MAXMSGSIZE, REPLY_LIMIT + 1024)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, round(SILENCE_S * 1000))
        if keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
            dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
        dealer.monitor("inproc://fetch-monitor", sum(_FAILURES))
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect("inproc://fetch-monitor")
        self._poller = zmq.Poller()
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if self._wanted is not None:
            self._poller.register(self._wanted, zmq.POLLIN)
        dealer.connect(address)

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)
        self._context.term()

    def whole(self, number: int) -> bytes:
        """A whole file of unknown size."""
        self._ask(number, 0, READ_LIMIT)
        first = self._hear()
        if first.size > SIDECAR_LIMIT:
            raise FetchError(f"{self.what}: its sidecar has {first.size} bytes, at most {SIDECAR_LIMIT} are allowed")
        return b"".join((first.data, *self.pieces(number, first.size, len(first.data))))

    def pieces(self, number: int, size: int, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `offset` to `size`, in order; WINDOW requests are kept under way."""
        under_way: dict[int, int] = {}
        arrived: dict[int, bytes] = {}
        asked = offset
        while offset < size:
            while asked < size and len(under_way) + len(arrived) < WINDOW:
                length = min(READ_LIMIT, size - asked)
                under_way[self._ask(number, asked, length)] = asked
                asked += length
            piece = self._hear()
            at = under_way.pop(piece.id, None)
            if at is None or piece.size != size or len(piece.data) != min(READ_LIMIT, size - at):
                raise FetchError(f"{self.what}: file {number} has {piece.size} bytes there, {size} were expected")
            arrived[at] = piece.data
            while (data := arrived.pop(offset, None)) is not None:
                offset += len(data)
                yield data

    def _ask(self, number: int, offset: int, length: int) -> int:
        self._next += 1
        self._dealer.send(encode(Read(self._next, self._save, self._rank, number, offset, length)))
        return self._next

    def _hear(self) -> Piece:
        while True:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise FetchError(f"{self.what}: not here within the time given")
            ready = dict(self._poller.poll(round(min(left_s, SILENCE_S) * 1000) + 1))
            if self._wanted in ready:
                raise FetchError(f"{self.what}: nobody wants it any more")
            if self._dealer in ready:
                return self._reply(self._dealer.recv())
            if self._monitor in ready:
                kind = parse_monitor_event(self._monitor.recv_multipart()).kind
                raise FetchError(f"{self.what}: {_FAILURES.get(kind, 'the connection failed')}")
            if not ready and left_s > SILENCE_S:
                raise FetchError(f"{self.what}: no sign of it for {SILENCE_S:g} s")

    def _reply(self, frame: bytes) -> Piece:
        try:
            reply = decode_reply(frame)
        except BadFrame as error:
            raise FetchError(f"{self.what}: {error}") from None
        if isinstance(reply, No):
            raise FetchError(f"{self.what}: {reply.why}")
        return reply


def _checked(data: bytes, save: SaveId, rank: int, digest: bytes) -> Sidecar:
    sidecar = decode_sidecar(data)
    if digest and digest_of(data) != digest:
        raise BadFormat("its sidecar is not the one that was written")
    if (sidecar.save, sidecar.rank) != (save, rank):
        raise BadFormat(f"its sidecar is that of shard {sidecar.rank} of {sidecar.save}")
    if len(sidecar.files) > FILE_LIMIT or any(
        file.size < 0 or len(file.digests) != -(-file.size // CHUNK) for file in sidecar.files
    ):
        raise BadFormat("its sidecar names files that cannot be")
    return sidecar


# ---- this side ------------------------------------------------------------------------------------------------


class _Temporaries:
    """New files of one folder, each locked as long as it is open; those that have not got their names are removed, and
    the folder with them, if there is nothing else in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[tuple[int, Path, str]] = []

    def __enter__(self) -> "_Temporaries":
        return self

    def new(self, name: str) -> int:
        """The descriptor of a file that is to be called `name`."""
        path = self._folder / f"{TEMPORARY}{name}.{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._files.append((descriptor, path, name))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    def give_names(self) -> None:
        """In the order in which they were made."""
        for _, path, name in self._files:
            os.replace(path, self._folder / name)
        sync_folder(self._folder)

    def __exit__(self, *_: object) -> None:
        for descriptor, path, _name in self._files:
            with contextlib.suppress(OSError):
                path.unlink()  # one that has its name is no longer there
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _receive(client: _Client, descriptor: int, number: int, file: DataFile) -> None:
    """Write one file, compared with its digests and durable."""
    covered, chunk, digest = 0, 0, xxhash.xxh3_64()
    for data in client.pieces(number, file.size):
        _write(descriptor, data)
        digest.update(data)
        covered += len(data)
        # A piece never reaches beyond a chunk: the one's length is a multiple of the other's.
        if covered % CHUNK == 0 or covered == file.size:
            if digest.intdigest() != file.digests[chunk]:
                raise BadFormat(f"bytes {chunk * CHUNK} to {covered} of file {number} are not those that were written")
            chunk, digest = chunk + 1, xxhash.xxh3_64()
    os.fsync(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _remove_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    except OSError:
        return False  # somebody is at it
    finally:
        os.close(descriptor)


# ---- as a process ---------------------------------------------------------------------------------------------


def find_keys(path: str, environ: Mapping[str, str]) -> JobKeys | None:
    """As agents find them: the endpoint beside the file says if the job runs in plain text. Raises FetchError."""
    if not path:
        return None
    try:
        endpoint = Endpoint.read(Path(path).with_name("endpoint.json"))
        if endpoint is not None and not endpoint.server_public:
            return None
        return keys_from_environment(environ) or load_keys(Path(path))
    except (EndpointError, KeysError) as error:
        raise FetchError(f"no keys to speak to depots with: {error}") from None


def main() -> int:
    """Do what the rank at the other end of standard input, a socket, asks, until it asks no more."""
    rank = sys.stdin.fileno()
    with contextlib.suppress(ConnectionError):
        while packet := os.read(rank, PACKET_LIMIT):
            os.write(rank, encode_answer(_done(decode_task(packet), rank)))
    return 0


def _done(task: Task, rank: int) -> Answer:
    # Between a task and its answer the rank sends nothing: what there is to read then is its end.
    try:
        keys, into = find_keys(task.keys, os.environ), Path(task.into)
        nbytes = fetch_shard(task.address, keys, task.save, task.rank, into, task.deadline_s, task.digest, wanted=rank)
    except FetchError as error:
        return Answer(error=str(error)[:ERROR_LIMIT])
    return Answer(nbytes)


if __name__ == "__main__":
    sys.exit(main())
