"""What is known of a failure: exceptions and frames turned into a `Fault`.

Only names, lines and text are taken: nothing here keeps a frame, and so no tensor, alive.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType

from ..protocol.faults import Fault, FaultKind, clip
from ..protocol.names import Slot

MESSAGE_LIMIT = 500
CHAIN_LIMIT = 32

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("worker_runtime", "protocol", "checkpoint_io"))
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_COLLECTIVE = f"{os.sep}torch{os.sep}distributed{os.sep}"

# Exception types that torch raises only for communication.
_PEER_TYPES = frozenset({"DistBackendError", "DistStoreError", "DistNetworkError"})

# What gloo, NCCL and the store say when the other side is gone. Plain errors of the operating system of these kinds
# count only with an exception of torch's, or RuntimeError: a trainer's own broken pipe to its logger is its own fault.
_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "application timeout caused pair closure",
    "remote process exited",
    "ncclremoteerror",
    "ncclsystemerror",
    "unhandled system error",
    "watchdog caught collective operation timeout",
    "communicator was aborted",
    "/gloo/transport/",
)


def clean(text: str) -> str:
    """`text` without what cannot be sent (lone surrogates)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def name_of_frame(frame: FrameType) -> str:
    return clean(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def _is_user(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<frozen") or any(mark in file for mark in _INSTALLED):
        return False
    return not file.startswith(_OURS) and not file.startswith(_STDLIB)


def user_place(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of user code, of the innermost one at all if there is none."""
    innermost = frame
    while frame is not None:
        if _is_user(frame.f_code):
            return name_of_frame(frame)
        frame = frame.f_back
    return name_of_frame(innermost) if innermost is not None else ""


def frame_in_collective(frame: FrameType | None) -> bool:
    while frame is not None:
        if _COLLECTIVE in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what led to it, newest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < CHAIN_LIMIT:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _place_of_error(error: BaseException) -> tuple[str, bool]:
    place = last = ""
    collective = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        last = clean(f"{frame.f_code.co_filename}:{line}")
        if _is_user(frame.f_code):
            place = last
        collective = collective or _COLLECTIVE in frame.f_code.co_filename
    return place or last, collective


def is_peer_error(error: BaseException) -> bool:
    """Whether `error`, or what led to it, is what a rank sees when another one is gone."""
    return any(_is_peer_error(each) for each in chain(error))


def _is_peer_error(error: BaseException) -> bool:
    kind = type(error)
    if any(base.__name__ in _PEER_TYPES for base in kind.__mro__):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = _message(error).lower()
    return any(words in text for words in _PEER_WORDS)


def _message(error: BaseException) -> str:
    try:
        return clean(str(error))
    except Exception as broken:
        return f"(its message cannot be made: {type(broken).__name__})"


def _detail(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename.startswith(_OURS):
        at = at.tb_next  # the frames through which we called the function say nothing
    try:
        return clip(clean("".join(traceback.format_exception(type(error), error, at))))
    except Exception as broken:
        return f"(its traceback cannot be made: {type(broken).__name__})"


class Witness:
    """States faults of this process: who it is, and which step it had reached."""

    def __init__(self, slot: Slot, life: int) -> None:
        self._slot = slot
        self._life = life

    def exception(self, error: BaseException, index: int, step: int, *, entered: bool = True) -> Fault:
        """The training function failed with `error`."""
        name = type(error).__name__
        text = _message(error)
        place, collective = _place_of_error(error)
        return Fault(
            slot=self._slot,
            life=self._life,
            round=index,
            kind=FaultKind.EXCEPTION,
            message=clip(f"{name}: {text}" if text else name, MESSAGE_LIMIT),
            detail=_detail(error),
            error=name,
            place=place,
            step=step,
            entered=entered,
            peer_error=is_peer_error(error),
            in_collective=collective,
        )

    def exit(self, error: BaseException, code: int, index: int, step: int) -> Fault:
        """The training function asked for the process to end with `code`."""
        place, _ = _place_of_error(error)
        return Fault(
            slot=self._slot,
            life=self._life,
            round=index,
            kind=FaultKind.EXIT,
            message=clip(f"{type(error).__name__}: the process leaves with code {code}", MESSAGE_LIMIT),
            code=code,
            error=type(error).__name__,
            place=place,
            step=step,
        )

    def unhealthy(self, what: str, detail: str, index: int, step: int) -> Fault:
        """A finalize step or a health check failed: this process is not fit for another round."""
        message = clip(clean(what), MESSAGE_LIMIT)
        kind = FaultKind.HEALTH_CHECK
        return Fault(self._slot, self._life, index, kind, message, clip(clean(detail)), step=step)


def forget(error: BaseException) -> None:
    """Empty the frames that `error` holds, so that the tensors in their locals go now and not at the next
    collection."""
    for each in chain(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def exit_status(error: BaseException) -> int:
    """The exit code that the interpreter makes of `SystemExit` or `KeyboardInterrupt`."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = getattr(error, "code", None)
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
