"""Everything that can happen to a job, as the core is told it. The journal holds exactly these, in order."""

import msgspec

from ...protocol import messages
from ...protocol.checkpoints import Fact
from ...protocol.messages import Hello, SlotState
from ...protocol.names import AgentName
from ...protocol.settings import Settings


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A controller starts to lead: the first one, or one that has replayed the journal of those before it.

    incarnation: 1 for the first, then higher each time. expected: agents that the launcher starts, 0 if only they know.
    wall: seconds since 1970 when it did, for people who read the journal; decides nothing.
    """

    job: str
    attempt: int
    incarnation: int
    expected: int
    settings: Settings
    wall: float = 0.0


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """An agent introduced itself, for the first time or again."""

    hello: Hello


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """An agent told of slots that changed."""

    agent: AgentName
    slots: tuple[SlotState, ...]


class LinkLost(msgspec.Struct, frozen=True, tag="link_lost"):
    """The connection to an agent closed. A living agent comes back at once. dead: its process has been seen to end."""

    agent: AgentName
    dead: bool = False


class Silent(msgspec.Struct, frozen=True, tag="silent"):
    """Nothing was heard from an agent for `heartbeat_timeout`."""

    agent: AgentName
    age_s: float


class StopAsked(msgspec.Struct, frozen=True, tag="stop_asked"):
    """Somebody wants the job to end. agent: who passed it on, and passes it on again to the next controller if the
    last one died before it had acknowledged it.
    """

    code: int
    reason: str
    agent: str = ""


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """An agent tells what became of checkpoints."""

    agent: AgentName
    facts: tuple[Fact, ...]


class Stocked(msgspec.Struct, frozen=True, tag="stocked"):
    """An agent's depot has started: which checkpoints it found, and where it can be read from; empty if nowhere.

    durable: whether it has looked through the durable tier as well.
    """

    agent: AgentName
    address: str
    facts: tuple[Fact, ...]
    durable: bool = True


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """A deadline that `Job.deadline` named has come."""


Event = Opened | Attached | Reported | LinkLost | Silent | StopAsked | Saved | Stocked | Tick


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One record of the journal: an event and when the core was told of it, in seconds of that controller's clock."""

    now: float
    event: Event


def event_of(agent: AgentName, message: messages.FromAgent) -> Event | None:
    """What a message of an agent that the job has accepted is to the core; None: nothing."""
    match message:
        case messages.Report():
            return Reported(agent, message.slots)
        case messages.StopRequest():
            return StopAsked(message.code, message.reason, agent)
        case messages.Saved():
            return Saved(agent, message.facts)
        case messages.Stock():
            return Stocked(agent, message.address, message.facts, message.durable)
        case _:
            return None
