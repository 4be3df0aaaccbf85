"""Everything that the agent machine can want done; the service carries it out."""

from dataclasses import dataclass

from ...protocol.checkpoints import DepotOrders, Fact
from ...protocol.messages import SlotState
from ...protocol.names import Slot
from ...protocol.rank_messages import ToRank


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process in `slot`. spare: it replaces a dead one, so the fork server may make it."""

    slot: Slot
    life: int
    spare: bool


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the process in `slot`."""

    slot: Slot
    life: int
    message: ToRank


@dataclass(frozen=True, slots=True)
class KillProcess:
    """SIGCONT, SIGTERM, grace, SIGKILL, for the process in `slot` and everything it started. at_once: only SIGKILL."""

    slot: Slot
    life: int
    why: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the controller of slots that changed, in this order, reliably."""

    states: tuple[SlotState, ...]


@dataclass(frozen=True, slots=True)
class TellSaved:
    """Tell the controller what became of checkpoints, reliably."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class OrderDepot:
    """From now on this is all that this agent's depot should have done."""

    orders: DepotOrders


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the controller to end the job."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Write:
    """A line for the log."""

    event: str
    text: str
    level: str = "info"
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """All is done: the agent ends with this code."""

    code: int
    reason: str


Action = Spawn | Say | KillProcess | Tell | TellSaved | OrderDepot | AskStop | Write | Leave
