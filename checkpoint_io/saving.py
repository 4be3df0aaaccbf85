"""One save, as the trainer that asked for it sees it."""

import threading
from collections.abc import Iterable

from ..protocol.checkpoints import SaveId, Tier


class Saving:
    """Follows this rank's part of one save until it is durable on every tier, or has failed there.

    It says nothing of the other ranks: whether the whole save is complete is the controller's to know.
    """

    def __init__(self, save: SaveId, tiers: Iterable[Tier]) -> None:
        self.save = save
        self._open = set(tiers)
        self._failed: dict[Tier, str] = {}
        self._settling = threading.Lock()
        # Held while it is not done. A bare lock and no condition: the end of a round may be raised in whoever waits,
        # and must not leave anything behind that the writer's thread could stumble over.
        self._gate = threading.Lock()
        self._gate.acquire()

    def __repr__(self) -> str:
        state = "failed" if self.failures else "done" if self.done else "being written"
        return f"<Saving step={self.step} {state}>"

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it."""
        return not self._open

    @property
    def failures(self) -> dict[Tier, str]:
        """Why it could not be written, by tier. Empty while it is being written, and after it has been."""
        return dict(self._failed)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; whether it is."""
        if not self.done and self._gate.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            self._gate.release()
        return self.done

    def settle(self, tier: Tier, why: str = "") -> None:
        """By whoever hears of the writer: it is written there, or has failed for the reason `why`."""
        with self._settling:
            if tier not in self._open:
                return
            if why:
                self._failed[tier] = why
            self._open.discard(tier)
            if not self._open:
                self._gate.release()
