"""Ends waits in gloo that nothing else would end.

When a connection breaks while gloo's loop answers the peer's "I am ready" with the data, the operation is in none of
gloo's lists: its waiter is told neither of success nor of failure, and sleeps until its timeout, half an hour by
default (seen with torch 2.13: about one SIGKILL in fifteen left a survivor in `UnboundBuffer::waitSend`). gloo has a
call that ends exactly such a wait, `UnboundBuffer::abortWaitSend`, and torch exports it; what it does not hand out is
the buffer.

So the buffer is found by its waiter. The kernel says on which futex each of our threads sleeps; a condition variable
of a buffer has its futex at a known place, and the buffer its condition variables. What is found so counts only if
the word at its start is the address of that class's table of virtual functions, and only if the same thread sleeps at
the same place in two looks, a repetition of the interrupt apart. If anything differs (another libc, another gloo),
nothing is done.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_IN_CONDITION = (32, 36, 40, 44)
"""Where pthread_cond_t has the words that its waiters sleep on: glibc 2.41 and newer, and older ones."""

RECEIVE_CONDITION, SEND_CONDITION = 0x58, 0x88
"""Where an UnboundBuffer has its condition variables: after the pointer to its virtual functions, the data's address
and size, the context (16 bytes), a spare byte (8) and the mutex (40).
"""

_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_TABLE_HEADER = 16
"""An object points behind the first two words of its class's table."""

Sleeper = tuple[int, int]
"""A thread and the futex that it sleeps on."""


class LostWaits:
    """Call `end` each time an interrupt is repeated; what sleeps through two calls is woken."""

    def __init__(self) -> None:
        self._seen: set[Sleeper] = set()
        self._library: Any = None

    def end(self) -> int:
        """Wake the waits that have lasted since the last call; how many."""
        number = FUTEX_NUMBERS.get(os.uname().machine)
        library = self._torch()
        if number is None or library is None:
            return 0
        sleepers = set(_sleepers(number))
        lasting, self._seen = sleepers & self._seen, sleepers
        return sum(_wake(library, futex) for _, futex in lasting) if lasting else 0

    def _torch(self) -> Any:
        """The library that contains gloo, if torch has loaded it."""
        if self._library is None:
            file: str | None = getattr(sys.modules.get("torch"), "__file__", None)
            if file is not None:
                path = os.path.join(os.path.dirname(file), "lib", "libtorch_cpu.so")
                with suppress(OSError):
                    self._library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return self._library


def _sleepers(number: int) -> Iterator[Sleeper]:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/self/task/{thread}/syscall") as file:
                words = file.read().split()
            if int(words[0]) == number:
                yield int(thread), int(words[1], 16)


def _wake(library: Any, futex: int) -> bool:
    """End the wait on `futex`, if it is that of a buffer of gloo."""
    try:
        table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{_CLASS}E")) + _TABLE_HEADER
        ways = (
            (SEND_CONDITION, getattr(library, f"_Z{_CLASS}13abortWaitSendEv")),
            (RECEIVE_CONDITION, getattr(library, f"_Z{_CLASS}13abortWaitRecvEv")),
        )
    except (AttributeError, ValueError):
        return False
    for inside in FUTEX_IN_CONDITION:
        for condition, abort in ways:
            buffer = futex - inside - condition
            if _word_at(buffer) == table:
                abort(ctypes.c_void_p(buffer))
                return True
    return False


def _word_at(address: int) -> int | None:
    """The 8 bytes at `address`, None if nothing is there."""
    with suppress(OSError, OverflowError, ValueError):
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int.from_bytes(os.pread(memory, 8, address), sys.byteorder)
        finally:
            os.close(memory)
    return None
