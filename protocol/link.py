"""Delivery in spite of loss: sequence numbers, acknowledgement, resending. No IO and no clock; `now` is an argument.

TCP loses nothing while a connection lasts; what is lost is what was under way when it broke, and what did not fit into
a full queue. So resending is rare, and simple: when the oldest unacknowledged message is overdue, all of them go again,
in order (go-back-N), and the receiver drops what it already has. Each time the wait doubles, up to `BACKOFF` times the
first, until something is acknowledged: a peer that stands still must not find a pile of copies when it wakes.

Numbers belong to a session (one connect of the agent). `reset` ends it and hands back what was not acknowledged.
"""

from collections import deque

LIMIT = 10_000
"""Unacknowledged messages that a queue holds."""

BACKOFF = 8


class LinkFull(Exception):
    """The peer has acknowledged nothing for so long that the queue is at its limit: treat the peer as lost."""


class _Timer:
    """When to send again: the waiting time doubles until there is progress."""

    def __init__(self, first_s: float) -> None:
        if first_s <= 0:
            raise ValueError(f"resend_after_s is {first_s}; it must be positive")
        self._first_s = first_s
        self._wait_s = first_s
        self.at: float | None = None

    def start(self, now: float) -> None:
        self.at = now + self._wait_s

    def expired(self, now: float) -> bool:
        return self.at is not None and now >= self.at

    def back_off(self) -> None:
        self._wait_s = min(self._wait_s * 2, self._first_s * BACKOFF)

    def stop(self) -> None:
        self.at = None
        self._wait_s = self._first_s


class ReliableQueue:
    """Every body arrives, once, in order (with an ordered `ReceiveWindow` at the other end)."""

    def __init__(self, resend_after_s: float, limit: int = LIMIT) -> None:
        self._timer = _Timer(resend_after_s)
        self._limit = limit
        self._last_seq = 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._new: deque[tuple[int, bytes]] = deque()
        self._pushed_at = 0.0

    def __len__(self) -> int:
        return len(self._sent) + len(self._new)

    def push(self, body: bytes, now: float) -> int:
        """Take a body, due at once; returns its number. At the limit it raises `LinkFull` and takes nothing."""
        if len(self) >= self._limit:
            raise LinkFull(f"{self._limit} messages are unacknowledged")
        self._last_seq += 1
        if not self._new:
            self._pushed_at = now
        self._new.append((self._last_seq, body))
        return self._last_seq

    def acknowledge(self, seq: int) -> None:
        """The peer has everything up to and including `seq`.

        A number that was never sent is ignored: it is of another session, or a lie.
        """
        if not self._sent or not self._sent[0][0] <= seq <= self._sent[-1][0]:
            return
        while self._sent and self._sent[0][0] <= seq:
            self._sent.popleft()
        restart = self._timer.at
        self._timer.stop()
        if self._sent and restart is not None:
            self._timer.at = restart

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """What must be sent now, in order; it counts as sent, also if there was no room for it."""
        batch: list[tuple[int, bytes]] = []
        if self._timer.expired(now):
            batch.extend(self._sent)
            self._timer.back_off()
            self._timer.start(now)
        if self._new:
            batch.extend(self._new)
            self._sent.extend(self._new)
            self._new.clear()
            if self._timer.at is None:
                self._timer.start(now)
        return batch

    def deadline(self) -> float | None:
        """When `due` will have something again if nothing is acknowledged; None: never."""
        return self._pushed_at if self._new else self._timer.at

    def reset(self) -> list[bytes]:
        """Start a new session, numbers from 1; returns the unacknowledged bodies, which are no longer in the queue."""
        bodies = [body for _, body in (*self._sent, *self._new)]
        self._sent.clear()
        self._new.clear()
        self._last_seq = 0
        self._timer.stop()
        return bodies


class LatestQueue:
    """Only the newest body matters: it says all, and replaces what was not delivered.

    It is used as a `ReliableQueue`; the other end has an unordered `ReceiveWindow`.
    """

    def __init__(self, resend_after_s: float) -> None:
        self._timer = _Timer(resend_after_s)
        self._last_seq = 0
        self._body: bytes | None = None
        self._unsent_since: float | None = None

    def __len__(self) -> int:
        return self._body is not None

    def push(self, body: bytes, now: float) -> int:
        self._last_seq += 1
        self._body = body
        self._unsent_since = now
        self._timer.stop()
        return self._last_seq

    def acknowledge(self, seq: int) -> None:
        if self._body is not None and self._unsent_since is None and seq == self._last_seq:
            self._body = None
            self._timer.stop()

    def due(self, now: float) -> list[tuple[int, bytes]]:
        if self._body is None:
            return []
        if self._unsent_since is None:
            if not self._timer.expired(now):
                return []
            self._timer.back_off()
        self._unsent_since = None
        self._timer.start(now)
        return [(self._last_seq, self._body)]

    def deadline(self) -> float | None:
        return self._timer.at if self._unsent_since is None else self._unsent_since

    def reset(self) -> list[bytes]:
        bodies = [] if self._body is None else [self._body]
        self._body = None
        self._unsent_since = None
        self._last_seq = 0
        self._timer.stop()
        return bodies


class ReceiveWindow:
    """Decides which received numbers are new. `acked` is what to acknowledge: the last one accepted.

    ordered: exactly the next number is accepted, duplicates and gaps are refused (the sender goes back).
    Else any higher number is accepted: newer state replaces older.
    """

    def __init__(self, ordered: bool) -> None:
        self._ordered = ordered
        self.acked = 0
        self.refused = 0

    def accept(self, seq: int) -> bool:
        fresh = seq == self.acked + 1 if self._ordered else seq > self.acked
        if fresh:
            self.acked = seq
        else:
            self.refused += 1
        return fresh

    def reset(self) -> None:
        """A new session: numbers start again."""
        self.acked = 0
