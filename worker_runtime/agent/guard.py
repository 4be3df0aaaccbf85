"""The guard: if the agent is killed, it kills what the agent leaves, so that no orphan holds a GPU.

It is a tiny process in a session of its own, without the marks by which it hunts. It holds a pipe from the agent, and
the kernel closes that pipe however the agent dies. Goodbye said before: nothing to do. Else everything that carries the
agent's token is ended: SIGTERM, a short grace, SIGKILL until nothing is left.

The agent's side is in `guarding.py`. This file and `tree.py` are all that the guard's process loads.
"""

import os
import signal
import time

from .tree import is_exiting, kill_all, marked, send

GOODBYE = b"goodbye\n"
GRACE_S = 1.0
HUNT_S = 20.0
"""How long it goes on trying."""
PAUSE_S = 0.02


def main() -> None:
    """The guard's program: standard input is the pipe, the first line is the token."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Whoever ends the whole job signals the guard too; it has to outlive the agent. The end of its pipe ends it.
        signal.signal(number, signal.SIG_IGN)
    said = b""
    while chunk := os.read(0, 4096):
        said += chunk
    token, _, rest = said.partition(b"\n")
    if token and rest != GOODBYE:
        hunt(b"PERDURE_TOKEN=" + token)


def hunt(mark: bytes) -> None:
    """End every process that carries `mark`."""
    started = time.monotonic()
    for entry in marked((mark,)):
        send(entry.key, signal.SIGTERM)
        send(entry.key, signal.SIGCONT)
    while (left := marked((mark,))) and time.monotonic() < started + HUNT_S:
        if time.monotonic() > started + GRACE_S and not all(is_exiting(entry.pid) for entry in left):
            kill_all(lambda: marked((mark,)))
        time.sleep(PAUSE_S)


BOOT = (
    "import sys, types; p = types.ModuleType('perdure_guard'); p.__path__ = [sys.argv[1]]; "
    "sys.modules['perdure_guard'] = p; from perdure_guard.guard import main; main()"
)
"""Runs this file as part of a package made up on the spot: the real one imports more."""
