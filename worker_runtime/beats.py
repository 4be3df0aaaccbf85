"""The beat page: 4096 bytes shared by one rank and its agent, by which the agent sees progress without asking.

Owns the layout. One writer (the rank), one reader (the agent), no locks and no system calls but the clock: every word
is 64 bits, aligned, and written with one store, so a reader sees an old or a new value and never a mixture. Words that
are written at different rates live in different cache lines. Stamps are CLOCK_MONOTONIC in nanoseconds, which both
processes share because they run on one machine.

The page is a memfd, so nothing lies in a file system and nothing can be left behind. Its size is sealed: a rank that
truncates it cannot make the agent die of SIGBUS.

Imported by the agent as well: nothing heavy here.
"""

import ctypes
import fcntl
import mmap
import os
from time import monotonic_ns
from typing import NamedTuple

PAGE_BYTES = 4096
MAGIC = 0x3154_4145_4250_0001
"""Names the layout below; it changes with it."""

SECTIONS = ("setup", "step", "checkpointing")
"""The sections that a trainer may open. A section's id in the page is its index here plus 1."""

SECTIONS_RECORDED = 16
"""How deep the stack of open sections is recorded; deeper ones are counted only."""

# Stages of the process, as the page states them.
STARTING, GATE, RUNNING, RETURNED = 0, 1, 2, 3

# Dying words: what the process was about to do when it wrote the last word of its life.
ALIVE, EXITING, RAISED = 0, 1, 2

# Word indices; eight words are one cache line.
W_MAGIC = 0
W_STEP = 8
W_PING = 9
W_AUTO = 16
W_PAUSE_UNTIL = 24
W_ROUND = 32
W_STAGE = 33
W_DYING = 40
W_CODE = 41
W_DEPTH = 48
W_SECTIONS = 56
"""From here on: for each open section, outermost first, its id and the stamp at which it was entered."""

STEP_MAX = (1 << 63) - 1


class Beat(NamedTuple):
    """What the page says at one instant. Stamps are nanoseconds of CLOCK_MONOTONIC, 0 if there was none in this round.

    step: -1 if the rank never said. sections: open ones, outermost first, each with the stamp at which it was entered.
    dying: ALIVE, EXITING or RAISED; code: the exit code that goes with EXITING.
    """

    step: int
    ping_ns: int
    auto_ns: int
    pause_until_ns: int
    round: int
    stage: int
    sections: tuple[tuple[str, int], ...]
    dying: int
    code: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map(address: int | None, flags: int, fd: int) -> int:
    # Not Python's mmap: that keeps a duplicate of the fd open, and cannot be replaced in place after a fork.
    found = _libc.mmap(address, PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map the beat page (fd {fd}): {os.strerror(code)}")
    return found


class BeatPage:
    """One mapping of a beat page. `words` is the page as signed 64-bit words; hot writers bind it once."""

    __slots__ = ("_address", "fd", "words")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._address = _map(None, mmap.MAP_SHARED, fd)
        raw = (ctypes.c_char * PAGE_BYTES).from_address(self._address)
        self.words: memoryview[int] = memoryview(raw).cast("B").cast("q")

    @classmethod
    def create(cls, name: str = "perdure-beat") -> "BeatPage":
        """A new page, by the agent. Its fd is not inheritable until the caller makes it so."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            page = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        page.words[W_STEP] = -1
        page.words[W_ROUND] = -1
        page.words[W_MAGIC] = MAGIC
        return page

    @classmethod
    def attach(cls, fd: int) -> "BeatPage":
        """The page behind an inherited fd, by the rank; ValueError if that is not a beat page of this version."""
        size = os.fstat(fd).st_size
        if size != PAGE_BYTES:
            raise ValueError(f"fd {fd} is not a beat page: it has {size} bytes, not {PAGE_BYTES}")
        page = cls(fd)
        if page.words[W_MAGIC] != MAGIC:
            found = page.words[W_MAGIC]
            page.unmap()
            raise ValueError(f"fd {fd} is not a beat page of this version: magic {found:#x}, not {MAGIC:#x}")
        return page

    def begin_round(self, index: int) -> None:
        """A new round: its sections, pause and step are unknown yet. The stage is written last."""
        words = self.words
        now = monotonic_ns()
        words[W_DEPTH] = 0
        words[W_PAUSE_UNTIL] = 0
        words[W_STEP] = -1
        words[W_PING] = 0
        words[W_AUTO] = now
        words[W_DYING] = ALIVE
        words[W_ROUND] = index
        words[W_STAGE] = RUNNING

    def set_stage(self, stage: int) -> None:
        self.words[W_STAGE] = stage

    def last_words(self, dying: int, code: int) -> None:
        """Written just before the process leaves; the agent reads it long before the kernel reports the death."""
        self.words[W_CODE] = code
        self.words[W_DYING] = dying

    def read(self) -> Beat:
        """A snapshot. Words are read one after the other while the rank writes, so two of them may differ by one
        beat."""
        words = self.words
        depth = min(max(words[W_DEPTH], 0), SECTIONS_RECORDED)
        sections: list[tuple[str, int]] = []
        for at in range(W_SECTIONS, W_SECTIONS + 2 * depth, 2):
            name = words[at] - 1
            # A rank may scribble over its own page; the agent must not fall over it.
            sections.append((SECTIONS[name] if 0 <= name < len(SECTIONS) else "unknown", words[at + 1]))
        return Beat(
            step=words[W_STEP],
            ping_ns=words[W_PING],
            auto_ns=words[W_AUTO],
            pause_until_ns=words[W_PAUSE_UNTIL],
            round=words[W_ROUND],
            stage=words[W_STAGE],
            sections=tuple(sections),
            dying=words[W_DYING],
            code=words[W_CODE],
        )

    def detach_after_fork(self) -> None:
        """In a forked child: put private memory in the page's place, at the same address.

        Whoever holds `words` then writes into the void, so that a child's `ping` cannot pass for its parent's.
        """
        _map(self._address, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)

    def unmap(self) -> None:
        """Drop the mapping; the fd stays. `words` refuses access from here on."""
        self.words.release()
        _libc.munmap(self._address, PAGE_BYTES)

    def close(self) -> None:
        """Drop the mapping and the fd (by the one who created it)."""
        self.unmap()
        os.close(self.fd)
