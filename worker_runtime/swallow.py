"""Who caught an interrupt and went on: read from the stack at which it was raised and the stack that is there now.

The frames between the two that are gone have either let the exception pass or caught it and returned. The innermost one
whose code has, around the instruction that it was at, an `except` clause that takes a BaseException, is the one that
caught it. If none has, the innermost frame that is still there did. Frames are remembered by identity and line, never
by reference: a reference would keep their locals, and so tensors, alive.
"""

import dis
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .evidence import name_of_frame


class Spot(NamedTuple):
    """Where one frame of the stack was."""

    identity: int
    code: CodeType
    instruction: int
    place: str


def spots(frame: FrameType | None) -> list[Spot]:
    """The stack, innermost frame first."""
    found: list[Spot] = []
    while frame is not None:
        found.append(Spot(id(frame), frame.f_code, frame.f_lasti, name_of_frame(frame)))
        frame = frame.f_back
    return found


def swallower(then: list[Spot], now: list[Spot]) -> str:
    """`file:line` of the frame of `then` that caught the exception raised there; empty if none of it is left."""
    there = {(spot.identity, spot.code) for spot in now}
    gone = list(takewhile(lambda spot: (spot.identity, spot.code) not in there, then))
    for spot in gone:
        if _catches(spot):
            return spot.place
    return then[len(gone)].place if len(gone) < len(then) else ""


def _catches(spot: Spot) -> bool:
    # Typeshed does not know `exception_entries`; where a later Python has none, nothing is claimed.
    bytecode: Any = dis.Bytecode(spot.code)
    instructions = {each.offset: each for each in bytecode}
    order = sorted(instructions)
    for entry in getattr(bytecode, "exception_entries", ()):
        if not entry.start <= spot.instruction < entry.end or instructions[entry.target].opname != "PUSH_EXC_INFO":
            continue
        handler = [instructions[offset] for offset in order if offset > entry.target][:12]
        if _takes_all(handler):
            return True
    return False


def _takes_all(handler: list[dis.Instruction]) -> bool:
    """Whether these instructions, after the exception was pushed, are a bare `except:` or one that names
    BaseException."""
    if handler[0].opname == "POP_TOP":
        return True
    until_match = list(takewhile(lambda each: each.opname != "CHECK_EXC_MATCH", handler))
    named = {each.argval for each in until_match if each.opname.startswith("LOAD_")}
    return len(until_match) < len(handler) and bool(named & {"BaseException", "RoundInterrupted"})
