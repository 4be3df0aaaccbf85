"""Brings shards of other nodes here for one restore of a rank: the rank's side of its fetching process.

Rules:
- One process does it for the whole restore, since each costs the start of an interpreter: started at the first shard,
  given one after the other, ended with the restore. Ranks do not load ZeroMQ.
- A process that dies, says what it must not, or has not answered GRACE_S after its deadline fails the shard it was
  at, and no other: it is ended, and the next shard gets a new one. So does the next shard after an exception (the
  interrupt of the round) that left one in the middle.
- The rank's end of a socket is all that keeps the process alive, so it never outlives the rank. It is a plain child:
  whoever kills the rank's tree kills it too.
- The interrupt may come anywhere in the main thread, but not between the start of a process and our knowledge of it.
  `close` may be torn, and is to be called again then.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress

from ..protocol.checkpoints import Fact, Place, SaveId, Tier, What
from .children import collect
from .fetch_task import PACKET_LIMIT, Answer, BadPacket, Task, decode_answer, encode
from .settings import CheckpointSettings
from .turn import Turn

FETCH_S = 600.0
"""For one shard of another node. A depot that is silent is given up much sooner, by the process itself."""
GRACE_S = 5.0
"""How much later than its deadline the process may answer."""
END_S = 2.0
"""For the process to end by itself, and remove what is unfinished. One that was killed is given as much to be gone."""
COMMAND = (sys.executable, "-P", "-m", "perdure.checkpoint_io.fetch")


class Fetching:
    """The `fetch` of one restore. `close` it whatever happens."""

    def __init__(
        self, settings: CheckpointSettings, turn: Turn, tell: Callable[[Fact], None], limit_s: float = FETCH_S
    ) -> None:
        self._settings = settings
        self._turn = turn
        self._tell = tell
        self._limit_s = limit_s
        self._one = threading.Lock()
        """One task at a time. A restore looks for shards in several threads."""
        self._process: _Process | None = None
        self._closed = False

    def fetch(self, save: SaveId, place: Place) -> None:
        """Bring the shard from `place` into this node's folder of the local tier. Raises OSError if it cannot."""
        settings, turn = self._settings, self._turn
        task = Task(place.address, save, place.rank, str(settings.local), self._limit_s, settings.keys)
        limit_s = self._limit_s + GRACE_S
        try:
            # A large shard takes its time, which is no hang.
            with self._one, turn.pause(limit_s):
                answer = self._present().ask(encode(task), limit_s)
        except (BadPacket, _Broken) as error:
            raise OSError(f"reading from {place.address} into {settings.local}: {error}") from None
        if answer.error:
            raise OSError(answer.error)
        world_size = turn.resume.world_size if turn.resume is not None else 0
        # It is one more copy, which must be known to be deleted one day.
        self._tell(Fact(save, What.WRITTEN, Tier.LOCAL, place.rank, settings.node, world_size, nbytes=answer.nbytes))

    def close(self) -> None:
        """End the process; a fetch that is under way in another thread fails at once."""
        self._closed = True
        process = self._process
        if process is not None:
            process.hang_up()
            with self._one:
                # One that has nothing to do has nothing to remove either, and need not be waited for.
                process.end(END_S if process.busy else 0)

    def _present(self) -> "_Process":
        """The process, if it can be given a task; else a new one."""
        self._refuse_if_closed()
        if self._process is not None:
            if self._process.is_ready():
                return self._process
            self._process.end(END_S)
        is_main = threading.current_thread() is threading.main_thread()
        with self._turn.atomic() if is_main else nullcontext():
            self._process = process = _Process()
        try:
            # Once more: `close` found no process if it came before there was this one.
            self._refuse_if_closed()
        except OSError:
            process.end(END_S)
            raise
        return process

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise OSError("the restore is over")


class _Broken(Exception):
    """A process was of no use any more, and is gone. The text says why."""


class _Process:
    """One process, which does one task after the other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                popen = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
            self._pidfd = os.pidfd_open(popen.pid)
            # We collect the status ourselves; the object must not look for a process that is gone.
            popen.returncode = 0
        except BaseException:
            ours.close()
            raise
        self._socket = ours
        self.busy = False
        self._how = ""

    def is_ready(self) -> bool:
        return not self.busy and self._pidfd >= 0 and not self._is_gone(0)

    def ask(self, task: bytes, limit_s: float) -> Answer:
        """Raises _Broken."""
        self.busy = True
        try:
            self._socket.settimeout(limit_s)
            self._socket.send(task)
            if packet := self._socket.recv(PACKET_LIMIT):
                answer = decode_answer(packet)
                self.busy = False
                return answer
        except TimeoutError:
            self.end(0)
            raise _Broken(f"no answer in {limit_s:g} s; the process for it was killed") from None
        except BadPacket as error:
            self.end(0)
            raise _Broken(f"the process for it says what it must not: {error}") from None
        except OSError:
            pass  # it is gone
        raise _Broken(f"the process for it {self.end(END_S)}")

    def hang_up(self) -> None:
        """It reads its end, and so does whoever waits for its answer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, within_s: float) -> str:
        """Have it gone, killed if it does not end within so long; how it ended. May be called again."""
        self.hang_up()
        self._socket.close()
        if self._pidfd >= 0:
            if not self._is_gone(within_s):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                self._is_gone(END_S)
            self._how = collect(self._pidfd) or "is stuck in the kernel, killed"
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)
        return self._how

    def _is_gone(self, within_s: float) -> bool:
        waiter = select.poll()
        waiter.register(self._pidfd, select.POLLIN)
        return bool(waiter.poll(within_s * 1000))
