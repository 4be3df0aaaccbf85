"""The rendezvous store of one round: a port held open at the gate, and the TCPStore that takes it over on rank 0.

Holding the listening socket from before the plan until the store serves it means that no other process can take the
port, and that a peer that connects early waits in the backlog instead of being refused.
"""

import contextlib
import socket
import sys
from typing import Any

BACKLOG = 4096
"""Connections that may wait until the store serves; the kernel lowers it to net.core.somaxconn."""


class Port:
    """A TCP port of this host, on all interfaces, held for the next round."""

    def __init__(self) -> None:
        try:
            held = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        except (OSError, ValueError):
            held = socket.create_server(("", 0), family=socket.AF_INET, backlog=BACKLOG)
        self._held: socket.socket | None = held
        self.number: int = held.getsockname()[1]

    def take_over(self) -> int:
        """The listening fd; from here on it belongs to the caller."""
        held, self._held = self._held, None
        return held.detach() if held is not None else -1

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def host_store(port: Port | None, address: str, number: int) -> Any:
    """Serve the round's store on `number`, on rank 0. None where torch is not imported: the trainer serves it then."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        if port is not None:
            port.close()
        return None
    fd = None
    if port is not None and port.number == number:
        fd = port.take_over()
    with contextlib.ExitStack() as undo:
        if fd is not None:
            undo.callback(socket.close, fd)
        store = distributed.TCPStore(
            address,
            number,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
        undo.pop_all()
    return store
