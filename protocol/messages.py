"""Every message between a controller and its agents.

Both directions speak in *states*, not in deltas: a `SlotState` says all that is known of a slot, a `Directive` says all
that an agent should be doing. So a message that comes twice changes nothing, and after any loss the newest one mends
everything.
Reliability (sequence, acknowledgement, resend) is in `link.py`; fencing is here: `job` and `incarnation` are on the
envelope, `round` and `life` on every state.
"""

from enum import Enum

import msgspec

from .checkpoints import NO_ORDERS, DepotOrders, Fact, Resume, SaveId
from .faults import Fault
from .names import NO_ROUND, AgentName, ProcessId, Slot
from .settings import Settings

PROTOCOL_VERSION = 1


class Stage(str, Enum):
    """Where the process in a slot stands."""

    STARTING = "starting"
    """Spawned; has not reached the gate."""
    GATE = "gate"
    """Waits for a seat: a fresh process, a reserve, or a rank that has quiesced after `round`."""
    RUNNING = "running"
    """Inside the training function, in `round`."""
    RETURNED = "returned"
    """The training function of `round` returned; waits for the others."""
    OUTSIDE = "outside"
    """Released after a completed round: runs the trainer's own code, and will exit or come to the gate again."""
    DYING = "dying"
    """The kernel is tearing the process down: it will do nothing more, but its memory and devices are not yet free."""
    GONE = "gone"
    """The process is dead."""


class ExitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a process ended.

    code: its exit code, or minus the signal. oom: the kernel's OOM killer did it.
    killed_by: why we killed it, empty if we did not. stderr: its last lines.
    """

    code: int
    oom: bool = False
    killed_by: str = ""
    stderr: str = ""


class SlotState(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All that is known of one slot.

    life: which process (1, 2, ...). round: the last round that it entered. port: TCP port that this process holds open
    for the next round's rendezvous store, valid at the gate. step: last step reached, -1 unknown.
    fault: the first fault of this process in `round`, kept until it enters another one. exit: set when stage is GONE.
    passed: the last step that it had passed in `round` when it was told to hold, -1 none; None: not told, or no answer.
    functions: how many resilient functions this process has been through. change: how often its state has changed; of
    two states the one with the higher number is the newer.
    """

    slot: Slot
    index: int
    life: int
    stage: Stage
    round: int = NO_ROUND
    port: int = 0
    step: int = -1
    pid: int = 0
    fault: Fault | None = None
    exit: ExitRecord | None = None
    functions: int = 0
    change: int = 0
    passed: int | None = None


# ---- agent -> controller --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello", omit_defaults=True):
    """First message after every connect: who I am and all that I know.

    order: where this agent's ranks stand in the initial rank order (SLURM_PROCID, else 0; ties are broken by name).
    group: nodes that are near each other (a switch, a rack); empty if unknown.
    expected: how many agents the launcher started, 0 if it does not say. address: where peers reach this host.
    incarnation: the highest controller incarnation that this agent has obeyed.
    pending: states that no controller has acknowledged, oldest first; they precede `slots`.
    """

    version: int
    agent: AgentName
    node: str
    host: str
    address: str
    order: int
    expected: int
    process: ProcessId
    incarnation: int
    slots: tuple[SlotState, ...]
    pending: tuple[SlotState, ...] = ()
    group: str = ""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Slots whose state changed, in the order in which it did."""

    slots: tuple[SlotState, ...]


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """The agent lives, and its ranks' progress: slot index -> (step, seconds since the last progress)."""

    ranks: tuple[tuple[int, int, float], ...] = ()


class StopRequest(msgspec.Struct, frozen=True, tag="stop"):
    """Somebody asked this agent to end the job (a signal, an operator)."""

    code: int
    reason: str


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """What became of checkpoints, as this agent's ranks and its depot saw it. Delivered to this controller or the
    next."""

    facts: tuple[Fact, ...]


class Stock(msgspec.Struct, frozen=True, tag="stock"):
    """Which checkpoints this agent's depot found: those of its node's local tier, and published ones, where it is one
    of those that look for them. Told after every Welcome, and by a depot that replaces a dead one; with the newest
    steps, if they are too many for one message: what more of it follows adds to it.

    address: where depots of other nodes, and restoring ranks, can read this node's shards; empty if nowhere.
    durable: whether it has looked through the durable tier as well.
    """

    address: str
    facts: tuple[Fact, ...]
    durable: bool = True


class Remark(msgspec.Struct, frozen=True, tag="remark", omit_defaults=True):
    """A line for the job's log. Not acknowledged: a lost one changes nothing."""

    event: str
    text: str
    level: str = "info"
    slot: str = ""


class Acknowledge(msgspec.Struct, frozen=True, tag="ack"):
    """Says nothing but what its envelope does: how far everything has arrived. Goes both ways."""


# ---- controller -> agent --------------------------------------------------------------------------------------


class Phase(str, Enum):
    """What an agent should be doing."""

    HOLD = "hold"
    """Keep processes at the gate."""
    RUN = "run"
    """Seated processes run `round`."""
    ABORT = "abort"
    """`round` is over: bring every process that runs it to the gate."""
    RELEASE = "release"
    """`round` is complete: its function's value is returned to the trainer, and reserves leave the gate."""
    END = "end"
    """The job is over, with `code`."""


class Seat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot's place in a round. `life` fences: another process in that slot must not take the seat."""

    slot: Slot
    life: int
    rank: int


class Kill(msgspec.Struct, frozen=True, array_like=True):
    slot: Slot
    life: int
    why: str


class Directive(msgspec.Struct, frozen=True, tag="directive", omit_defaults=True):
    """All that one agent should be doing; it replaces every earlier one.

    seats: this agent's seats of `round`. local_world_size: seats of its node, other agents' included.
    kill: processes to kill now. lives: slot -> the life that should be there: an agent that has an earlier one, dead,
    spawns the next. cause: one line that says why the round ends or the job ends.
    completed: resilient functions that the job is through with; a process that was started later is let through them.
    hold: the job is asked to stop: no rank of `round` passes a further step, and each says which was its last.
    stop_step: after this step all ranks leave the function, -1 while it is not agreed.
    epoch, resume: for saves of `round`, and from which save it resumes. depot: what the agent's depot is to do.
    vain: saves of `round` that cannot be complete any more: ranks give up what they have not written of them.
    """

    round: int
    phase: Phase
    seats: tuple[Seat, ...] = ()
    world_size: int = 0
    local_world_size: int = 0
    master_addr: str = ""
    master_port: int = 0
    kill: tuple[Kill, ...] = ()
    lives: dict[Slot, int] = {}
    cause: str = ""
    code: int = 0
    completed: int = 0
    hold: bool = False
    stop_step: int = -1
    epoch: int = 0
    resume: Resume | None = None
    depot: DepotOrders = NO_ORDERS
    vain: tuple[SaveId, ...] = ()


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The controller accepts the agent. `settings` are the job's, so that no rank disagrees."""

    incarnation: int
    settings: Settings


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The controller does not want this agent; it must not try again. The reason is for people."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The session is not, or no longer, known here: begin another one, with a Hello. So is told an agent that was
    given up because it was silent, and is heard again on the same connection.
    """


FromAgent = Hello | Report | Beat | StopRequest | Saved | Stock | Remark | Acknowledge
FromController = Welcome | Directive | Refused | Unknown | Acknowledge
