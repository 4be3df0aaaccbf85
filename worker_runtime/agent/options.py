"""What one agent is told by its command."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.names import AgentName
from ...protocol.settings import Settings


@dataclass(frozen=True, slots=True)
class Options:
    """Who this agent is, and what it runs.

    order, expected, group: see `Hello`. controller: the command of a controller to keep running, empty where somebody
    else does that. first_index: the local index of its first slot. signalled: signals that came before we listened.
    """

    job: str
    agent: AgentName
    node: str
    host: str
    order: int
    expected: int
    group: str
    run_dir: Path
    command: tuple[str, ...]
    slots: int
    settings: Settings
    first_index: int = 0
    controller: tuple[str, ...] = ()
    signalled: Sequence[int] = ()
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
