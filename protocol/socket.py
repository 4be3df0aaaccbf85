"""A ZeroMQ socket for trio: no thread, no background task, no lost wake-up.

libzmq gives one file descriptor per socket. It becomes readable when the socket's *state may have changed*, once per
change, and every operation (send, receive, reading EVENTS) consumes that notice, also when another task was waiting for
it. Hence:

* After every operation, and whenever EVENTS was read, tasks that the state concerns are woken (`_notify`, `_wait`).
* Nothing yields between finding the socket not ready and waiting for the descriptor.
* trio lets one task at a time wait for a descriptor. The first waiter leads; the others are parked, and all of them are
  woken when the leader leaves, whatever its reason, so that one of them leads next.
* A message is taken or given as the last act that can be cancelled: a cancelled receive has taken nothing, a cancelled
  send has sent nothing.
* trio is told before a descriptor is closed.

A socket belongs to the thread that runs trio.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import trio
import zmq
from trio.lowlevel import ParkingLot, cancel_shielded_checkpoint, checkpoint_if_cancelled, notify_closing, wait_readable

T = TypeVar("T")

BATCH = 512
"""Messages taken at most by one `recv_many`: a flood must not keep the other tasks from running."""

_GONE = (zmq.ENOTSOCK, zmq.ETERM)


class UnknownPeer(LookupError):
    """A ROUTER has no connection to this peer."""


class Socket:
    """One ZeroMQ socket.

    Options are set, and bind and connect called, on `raw`; messages go through this object only.
    """

    def __init__(self, context: "zmq.Context[Any]", kind: int) -> None:
        self.raw: zmq.Socket[bytes] = context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, 0)
        self._fd = int(self.raw.getsockopt(zmq.FD))
        self._is_router = kind == zmq.ROUTER
        self._readers = 0
        self._writers = 0
        self._wakes = 0
        self._leader: trio.CancelScope | None = None
        self._followers = ParkingLot()

    @property
    def closed(self) -> bool:
        return self.raw.closed

    # ---- receiving ----

    async def recv(self) -> list[bytes]:
        """The next message, as its frames."""
        return (await self.recv_many(1))[0]

    async def recv_many(self, limit: int = BATCH) -> list[list[bytes]]:
        """The messages that are there, at least one and at most `limit`."""
        return await self._when(zmq.POLLIN, lambda: self._take(limit))

    def recv_nowait(self, limit: int = BATCH) -> list[list[bytes]]:
        """The messages that are there; perhaps none. Fewer than `limit` means that the socket was found empty."""
        return self._drain(lambda: self.raw.recv_multipart(zmq.DONTWAIT), limit)

    def recv_frames_nowait(self, limit: int = BATCH) -> list[list[zmq.Frame]]:
        """Like `recv_nowait`, as `zmq.Frame`, which know more than their bytes (the connection that they came by)."""
        return self._drain(lambda: self.raw.recv_multipart(zmq.DONTWAIT, copy=False), limit)

    async def readable(self) -> None:
        """Wait until a receive would find something, or until `wake`."""
        await checkpoint_if_cancelled()
        if not await self._wait(zmq.POLLIN):
            await cancel_shielded_checkpoint()

    def wake(self) -> None:
        """Let every waiting task look again. `readable` returns; the others go on waiting if they find nothing."""
        self._wakes += 1
        self._wake_all()

    # ---- sending ----

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send when there is room. Not for a ROUTER, which is writable when *some* peer is: waiting would spin."""
        if self._is_router:
            raise TypeError("a ROUTER cannot wait for one peer: use send_nowait")
        await self._when(zmq.POLLOUT, lambda: self.raw.send_multipart(frames, zmq.DONTWAIT))

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """True: handed to libzmq.

        False: no room. On a ROUTER, frames[0] names the peer, and `UnknownPeer` says that it is gone.
        """
        try:
            if self._try_send(frames):
                return True
            # libzmq looks at its mailbox only now and then while sending, so a full queue may be old news; EVENTS
            # looks.
            return bool(self._events() & zmq.POLLOUT) and self._try_send(frames)
        finally:
            self._notify()

    def _try_send(self, frames: Sequence[bytes]) -> bool:
        try:
            self.raw.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise UnknownPeer(frames[0]) from None
            raise _translated(error) from error
        return True

    # ---- life ----

    def close(self) -> None:
        """Close at once; tasks that wait get `trio.ClosedResourceError`. Unsent messages are dropped."""
        if self.raw.closed:
            return
        notify_closing(self._fd)
        self.raw.close(0)
        self._followers.unpark_all()

    # ---- waiting ----

    async def _when(self, flag: int, operation: Callable[[], T]) -> T:
        await checkpoint_if_cancelled()
        waited = False
        while True:
            try:
                result = operation()
            except zmq.Again:
                waited = await self._wait(flag) or waited
                continue
            except zmq.ZMQError as error:
                raise _translated(error) from error
            finally:
                self._notify()
            if not waited:
                await cancel_shielded_checkpoint()
            return result

    async def _wait(self, flag: int) -> bool:
        """Return when EVENTS has `flag`, or after `wake`: whether other tasks could run meanwhile."""
        wakes = self._wakes
        waited = False
        self._count(flag, 1)
        try:
            while self._wakes == wakes:
                events = self._events()
                if events & flag:
                    break
                self._wake_concerned(events)  # reading EVENTS may have consumed the notice that others wait for
                waited = True
                if self._leader is None:
                    await self._lead()
                else:
                    await self._followers.park()
        finally:
            self._count(flag, -1)
        return waited

    async def _lead(self) -> None:
        try:
            with trio.CancelScope() as self._leader:
                await wait_readable(self._fd)
        finally:
            self._leader = None
            self._followers.unpark_all()

    def _count(self, flag: int, change: int) -> None:
        if flag == zmq.POLLIN:
            self._readers += change
        else:
            self._writers += change

    def _events(self) -> int:
        try:
            return int(self.raw.getsockopt(zmq.EVENTS))
        except zmq.ZMQError as error:
            raise _translated(error) from error

    def _notify(self) -> None:
        """To be called after every operation: it may have consumed the notice that a waiting task needs."""
        if (self._readers or self._writers) and not self.raw.closed:
            self._wake_concerned(self._events())

    def _wake_concerned(self, events: int) -> None:
        if (events & zmq.POLLIN and self._readers) or (events & zmq.POLLOUT and self._writers):
            self._wake_all()

    def _wake_all(self) -> None:
        if self._leader is not None:
            self._leader.cancel()
        self._followers.unpark_all()

    # ---- taking ----

    def _take(self, limit: int) -> list[list[bytes]]:
        """At least one message; raises zmq.Again if there is none."""
        receive = self.raw.recv_multipart
        messages = [receive(zmq.DONTWAIT)]
        try:
            while len(messages) < limit:
                messages.append(receive(zmq.DONTWAIT))
        except zmq.Again:
            pass
        return messages

    def _drain(self, receive: Callable[[], T], limit: int) -> list[T]:
        messages: list[T] = []
        try:
            while len(messages) < limit:
                messages.append(receive())
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise _translated(error) from error
        finally:
            self._notify()
        return messages


def _translated(error: zmq.ZMQError) -> Exception:
    return trio.ClosedResourceError("the ZeroMQ socket is closed") if error.errno in _GONE else error
