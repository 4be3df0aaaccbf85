"""What this controller has turned away: strangers' connections, and messages that say nothing to it.

Anybody may knock at an open port, again and again. So each reason is told once, when it first comes up, and then
counted; the counts are told at the end.
"""

from collections import Counter

from .logbook import Logbook

REASONS_LIMIT = 1000
"""Reasons that are told apart. A peer can make up as many as it likes."""


class Refusals:
    """Counts by reason."""

    def __init__(self, log: Logbook) -> None:
        self._log = log
        self._messages: Counter[str] = Counter()
        self._connections: Counter[str] = Counter()

    def message(self, reason: str) -> None:
        """A message was refused."""
        if reason not in self._messages:
            if len(self._messages) >= REASONS_LIMIT:
                reason = "for other reasons"
            else:
                self._log.line("refused", f"refused a message: {reason}", level="warning")
        self._messages[reason] += 1

    def connections(self, counts: Counter[str]) -> None:
        """The connections that were turned away so far."""
        for reason in counts.keys() - self._connections.keys():
            self._log.line("refused", f"turned a connection away: {reason}", level="warning")
        self._connections = counts

    def tell_totals(self) -> None:
        said = [f"{count} connections ({reason})" for reason, count in sorted(self._connections.items())]
        said += [f"{count} messages ({reason})" for reason, count in sorted(self._messages.items())]
        if said:
            self._log.line("refused", f"turned away in all: {', '.join(said[:20])}", level="warning")
