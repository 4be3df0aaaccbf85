"""How an attempt of a job ended: `verdict.json` in the run directory.

Written once, whole, by the controller that ends the job. Agents that could not be told look for it there.
"""

from pathlib import Path

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """How an attempt ended. `ended` is wall time, for people."""

    code: int
    reason: str
    cause: str
    ended: float

    @staticmethod
    def read(path: Path) -> "Verdict | None":
        """The verdict; None if there is none. Raises OSError, and msgspec.MsgspecError if it is none of ours."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Verdict)
        except FileNotFoundError:
            return None
