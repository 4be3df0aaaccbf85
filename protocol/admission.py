"""Who may connect: libzmq asks, for every CURVE handshake, over an inproc socket (ZAP, ZeroMQ RFC 27).

Only the job's client key is admitted. The answer does not depend on the address or on the name that a peer gives
itself.
"""

from typing import Any

import zmq
from zmq.utils import z85

from .socket import Socket

_ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"perdure"


class Admission:
    """Answers libzmq's questions. Must be created before the first socket with CURVE binds."""

    def __init__(self, context: "zmq.Context[Any]", client_public: str) -> None:
        self._key = z85.decode(client_public.encode())
        self._socket = Socket(context, zmq.REP)
        self._socket.raw.bind(_ADDRESS)
        self.admitted = 0
        self.refused = 0

    async def run(self) -> None:
        while True:
            request = await self._socket.recv()
            await self._socket.send(self._answer(request))

    def close(self) -> None:
        self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, _address, _routing_id, mechanism = request[:6]
        if (domain, mechanism, request[6:]) == (DOMAIN, b"CURVE", [self._key]):
            self.admitted += 1
            return [version, request_id, b"200", b"OK", b"job", b""]
        self.refused += 1
        return [version, request_id, b"400", b"not a key of this job", b"", b""]
