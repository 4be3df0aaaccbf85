"""Tells the agent that a rank is dying in the instant in which it begins to, before the kernel tears its memory down.

A rank that dies with 2 GB in memory closes its sockets some 300 ms later, one with 100 GB many seconds later. But the
first thing that the kernel does for a dying thread, memory still in place, is to give up the robust mutexes that it
held, and to wake who waits for them. So the rank's main thread holds one for life, in the last bytes of its beat page,
and a thread of the agent sleeps on its word. No polling, no cost in the rank.

The word: 0 until the rank holds it, then its thread's number and WAITERS; OWNER_DIED is set by the kernel at death and
at exec (so the agent checks), or by the agent to stop its own thread. Layout: glibc's pthread_mutex_t, whose word comes
first.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

PAGE_BYTES = 4096
OFFSET = PAGE_BYTES - 64
"""Where the mutex lies: it has 40 bytes on x86-64, 48 on aarch64."""
WAITERS = 0x80000000
OWNER_DIED = 0x40000000
FUTEX_WAIT = 0
FUTEX_WAKE = 1
FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
"""The futex system call, by machine."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FUTEX = FUTEX_NUMBERS.get(os.uname().machine)


def _map(descriptor: int) -> int:
    address = _libc.mmap(None, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map the beat page")
    return address


def _futex(address: int, operation: int, value: int) -> None:
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), None, None, 0)


def hold(descriptor: int) -> bool:
    """By the rank's main thread, once: hold the mutex in the beat page `descriptor` until death. False if it cannot."""
    if _FUTEX is None:
        return False
    address = _map(descriptor) + OFFSET  # Mapped for life: the kernel follows this address at death.
    kind = ctypes.create_string_buffer(64)
    mutex = ctypes.c_void_p(address)
    shared = robust = 1
    if _libc.pthread_mutexattr_init(kind) or _libc.pthread_mutexattr_setpshared(kind, shared):
        return False
    if _libc.pthread_mutexattr_setrobust(kind, robust) or _libc.pthread_mutex_init(mutex, kind):
        return False
    if _libc.pthread_mutex_lock(mutex):
        return False
    # The kernel wakes nobody unless somebody is known to wait.
    ctypes.c_uint32.from_address(address).value |= WAITERS
    _futex(address, FUTEX_WAKE, 1)
    return True


class LastBreath:
    """The agent's side: calls `told`, in a thread of its own, once the word says that its owner died or that we
    stopped.
    """

    def __init__(self, descriptor: int, told: Callable[[], None]) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._over = _FUTEX is None
        if not self._over:
            self._base = _map(descriptor)
            threading.Thread(target=self._watch, name="perdure-last-breath", daemon=True).start()

    def _watch(self) -> None:
        address = self._base + OFFSET
        word = ctypes.c_uint32.from_address(address)
        while not (value := word.value) & OWNER_DIED:
            _futex(address, FUTEX_WAIT, value)
        self._told()
        with self._lock:
            self._over = True
            _libc.munmap(self._base, PAGE_BYTES)

    def stop(self) -> None:
        """Let the thread end. Only for a rank that is dead, or that nobody will ask about again."""
        with self._lock:
            if not self._over:
                ctypes.c_uint32.from_address(self._base + OFFSET).value |= OWNER_DIED
                _futex(self._base + OFFSET, FUTEX_WAKE, 1)
