"""Everything that the core can want done. The shell carries the commands out in order, after the journal is safe."""

from typing import Any

import msgspec

from ...protocol.messages import Directive
from ...protocol.names import AgentName


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """Answer an agent's Hello with Welcome."""

    agent: AgentName


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Answer an agent's Hello with Refused."""

    agent: AgentName
    reason: str


class Direct(msgspec.Struct, frozen=True, tag="direct"):
    """Send an agent its directive; it replaces any that was not delivered yet."""

    agent: AgentName
    directive: Directive


class Tell(msgspec.Struct, frozen=True, tag="tell", omit_defaults=True):
    """Write one line of the log."""

    event: str
    text: str
    level: str = "info"
    round: int | None = None
    rank: int | None = None
    slot: str | None = None
    host: str | None = None
    fields: dict[str, Any] = {}


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The job has ended: write the verdict and leave."""

    code: int
    reason: str


Command = Accept | Refuse | Direct | Tell | Finished
