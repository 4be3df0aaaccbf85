"""Frames over a stream: four bytes of length, then so many bytes. Between an agent and its depot."""

import struct

import trio

from .depot_messages import FRAME_LIMIT, BadFrame

_LENGTH = struct.Struct("!I")


async def send_frame(stream: trio.SocketStream, data: bytes) -> None:
    """Raises trio.BrokenResourceError if the other side is gone. Cancelled, it may have sent a part: the end."""
    await stream.send_all(_LENGTH.pack(len(data)) + data)


class Frames:
    """The frames that arrive by a stream. A cancelled `next` has lost nothing."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next frame; None at the end of the stream."""
        while (frame := self._complete()) is None:
            try:
                chunk = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if not chunk:
                return None
            self._buffer += chunk
        return frame

    def _complete(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > FRAME_LIMIT:
            raise BadFrame(f"a frame of {length} bytes, at most {FRAME_LIMIT} are allowed")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame
