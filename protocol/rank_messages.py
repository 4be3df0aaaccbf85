"""Every message between an agent and the worker runtime in one of its ranks.

They travel over a private pair of connected SOCK_SEQPACKET sockets, inherited by the rank: one message a packet,
ordered, never lost while both live, and the kernel tells each side at once when the other is gone.
"""

import msgspec

from .checkpoints import Fact, Resume, SaveId
from .faults import Fault
from .names import NO_ROUND

RANK_MESSAGE_LIMIT = 131_072
"""Bytes of the largest packet."""

# ---- rank -> agent --------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready", omit_defaults=True):
    """At the gate. round: the last one entered. port: held open for the next round's store.

    fault: why this process came back from `round`; None if it was merely interrupted, or never ran.
    where: `file:line` at which the interrupt found the main thread. in_collective: whether that was in a collective.
    swallowed: `file:line`s that caught the interrupt and went on.
    timings: seconds spent in abort, unwind, finalize, health. torch: it is imported in this process.
    """

    round: int = NO_ROUND
    port: int = 0
    fault: Fault | None = None
    where: str = ""
    in_collective: bool = False
    swallowed: tuple[str, ...] = ()
    timings: dict[str, float] = {}
    torch: bool = False


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The training function is entered for `round`."""

    round: int


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The training function failed. Comes before the clean-up, so that peers learn of it at once; `Ready` follows."""

    fault: Fault


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The training function of `round` returned."""

    round: int


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """Answer to Hold. step: the last one for which `should_stop` returned False in `round`, -1 if there is none."""

    round: int
    step: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Last words: this process is about to exit, on its own will. `fault` says why, if the training function was
    left."""

    code: int
    fault: Fault | None = None


class Facts(msgspec.Struct, frozen=True, tag="facts"):
    """What became of this rank's part of checkpoints."""

    facts: tuple[Fact, ...]


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A line for the log."""

    level: str
    text: str


# ---- agent -> rank --------------------------------------------------------------------------------------------


class Enter(msgspec.Struct, frozen=True, tag="enter", omit_defaults=True):
    """Take this seat: set the environment and call the training function.

    rank is RESERVE for a process that stays at the gate. epoch, resume: for saves of this round, and from which save it
    resumes.
    """

    round: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    job: str
    epoch: int = 0
    resume: Resume | None = None


class Interrupt(msgspec.Struct, frozen=True, tag="interrupt"):
    """Round `round` is over: abort communicators, leave the training function, come to the gate."""

    round: int
    cause: str


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """The job is asked to stop: pass no further step of `round`, and say which was the last."""

    round: int


class StopAt(msgspec.Struct, frozen=True, tag="stop_at"):
    """All ranks leave the training function of `round` after `step`."""

    round: int
    step: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """These saves cannot be complete any more, since another rank did not save them: give up what is not written."""

    saves: tuple[SaveId, ...]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The job is over. A process whose function returned, and a reserve with code 0, return from the decorator; the
    others exit with `code`."""

    code: int
    reason: str


FromRank = Ready | Entered | Raised | Returned | Passed | Leaving | Facts | Note
ToRank = Enter | Interrupt | Hold | StopAt | Drop | Finish
