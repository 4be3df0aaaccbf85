"""The agents as the controller's sockets see them: sessions, sequence numbers, when each was last heard.

A *peer* is one session of one agent process: it begins with a Hello. Orders go out newest-wins until acknowledged;
reports come in exactly once and in order.
"""

from collections import deque
from dataclasses import dataclass, field

from ..protocol.link import LatestQueue, ReceiveWindow
from ..protocol.names import AgentName, ProcessId, is_alive

RESEND_AFTER_S = 1.0

BEAT_SLACK = 1.2
"""By how much a beat may be late before it counts as missed."""
ACKNOWLEDGE_WITHIN_S = 0.1
"""A report is acknowledged by the next order that goes to its agent; if none does within this time, on its own."""


@dataclass(slots=True, eq=False)
class Peer:
    """routing_id: where its frames go. heard_at: when anything last came from it.

    process: the agent's, if it has been seen to live on this machine (in this pid namespace): so can its death be.
    """

    routing_id: bytes
    session: int
    agent: AgentName
    heard_at: float
    orders: LatestQueue = field(default_factory=lambda: LatestQueue(RESEND_AFTER_S))
    reports: ReceiveWindow = field(default_factory=lambda: ReceiveWindow(ordered=True))
    owes_ack: bool = False
    process: ProcessId | None = None

    def look_for(self, process: ProcessId) -> None:
        self.process = process if is_alive(process) else None


class Peers:
    """All present sessions."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Peer] = {}
        self._by_agent: dict[AgentName, Peer] = {}
        self._asking: dict[AgentName, deque[Peer]] = {}
        """Who has said Hello under a name and has no answer yet, in order: several may come in one batch."""
        self._owing: dict[bytes, Peer] = {}
        self._owing_since = 0.0
        self._expecting: dict[bytes, Peer] = {}
        self._look_at: float | None = None

    def __len__(self) -> int:
        return len(self._by_agent)

    def all(self) -> list[Peer]:
        """Those that the job has accepted."""
        return list(self._by_agent.values())

    def of(self, routing_id: bytes, session: int) -> Peer | None:
        peer = self._by_id.get(routing_id)
        return peer if peer is not None and peer.session == session else None

    def agent(self, name: AgentName) -> Peer | None:
        return self._by_agent.get(name)

    def greeted(self, routing_id: bytes, session: int, agent: AgentName, now: float) -> Peer:
        """A Hello came: the same session again, or a new one, which is not yet accepted."""
        peer = self.of(routing_id, session)
        if peer is None or peer.agent != agent:
            peer = self._by_id[routing_id] = Peer(routing_id, session, agent, now)
        peer.heard_at = now
        self._asking.setdefault(agent, deque()).append(peer)
        return peer

    def newcomer(self, agent: AgentName) -> Peer | None:
        """Whose Hello as `agent` is to be answered next; every Hello gets one answer. None if it is gone meanwhile."""
        waiting = self._asking.get(agent)
        if not waiting:
            return None
        peer = waiting.popleft()
        if not waiting:
            del self._asking[agent]
        return peer if self.of(peer.routing_id, peer.session) is peer else None

    def is_accepted(self, peer: Peer) -> bool:
        return self._by_agent.get(peer.agent) is peer

    def accept(self, peer: Peer) -> None:
        former = self._by_agent.get(peer.agent)
        if former is not None and former is not peer and self._by_id.get(former.routing_id) is former:
            del self._by_id[former.routing_id]
        self._by_agent[peer.agent] = peer

    def take_silent(self, now: float, interval_s: float, timeout_s: float) -> list[Peer]:
        """Drop those that were not heard for `timeout_s`, the longest silence first.

        As long as it may be this end that hears nothing, nobody is dropped: one counts as silent only if another was
        heard after its beat was due, or if all of them are overdue.
        """
        latest = max((peer.heard_at for peer in self._by_agent.values()), default=now)
        overdue = [peer for peer in self._by_agent.values() if now - peer.heard_at >= timeout_s]
        if len(overdue) < len(self._by_agent):
            overdue = [peer for peer in overdue if peer.heard_at + interval_s * BEAT_SLACK < latest]
        for peer in overdue:
            self.drop(peer.routing_id)
        return sorted(overdue, key=lambda peer: peer.heard_at)

    def is_dead(self, routing_id: bytes) -> bool:
        """Whether the agent behind this connection is known to have ended, so that it will not come back."""
        peer = self._by_id.get(routing_id)
        return peer is not None and peer.process is not None and not is_alive(peer.process)

    def drop(self, routing_id: bytes) -> AgentName | None:
        """A connection ended. Returns the agent's name if it was the accepted session of that agent."""
        peer = self._by_id.pop(routing_id, None)
        if peer is None or self._by_agent.get(peer.agent) is not peer:
            return None
        del self._by_agent[peer.agent]
        return peer.agent

    # ---- what is due ------------------------------------------------------------------------------------------
    # Thousands of peers are not looked at each time the loop turns: only those of which something is due.

    @property
    def deadline(self) -> float | None:
        """When `owed` or `overdue` has something."""
        acknowledge = self._owing_since + ACKNOWLEDGE_WITHIN_S if self._owing else None
        wanted = [at for at in (acknowledge, self._look_at) if at is not None]
        return min(wanted, default=None)

    def owe(self, peer: Peer, now: float) -> None:
        """A report came that must be acknowledged."""
        if not self._owing:
            self._owing_since = now
        peer.owes_ack = True
        self._owing[peer.routing_id] = peer

    def owed(self, now: float) -> list[Peer]:
        """Peers whose reports must be acknowledged now."""
        if not self._owing or now < self._owing_since + ACKNOWLEDGE_WITHIN_S:
            return []
        owing, self._owing = self._owing, {}
        return [peer for peer in owing.values() if peer.owes_ack and self.of(peer.routing_id, peer.session) is peer]

    def expect(self, peer: Peer) -> None:
        """An order was sent to `peer`: it must be acknowledged, or is sent again."""
        at = peer.orders.deadline()
        if at is not None:
            self._expecting[peer.routing_id] = peer
            self._look_at = at if self._look_at is None else min(self._look_at, at)

    def overdue(self, now: float) -> list[Peer]:
        """Peers that have not acknowledged in time."""
        if self._look_at is None or now < self._look_at:
            return []
        self._look_at = None
        waiting, self._expecting = list(self._expecting.values()), {}
        late: list[Peer] = []
        for peer in waiting:
            at = peer.orders.deadline()
            if at is None or self.of(peer.routing_id, peer.session) is not peer:
                continue
            if at <= now:
                late.append(peer)
            else:
                self.expect(peer)
        return late
