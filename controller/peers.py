"""The agents as the controller's sockets see them: sessions, sequence numbers, when each was last heard.

A *peer* is one session of one agent process: it begins with a Hello. Orders go out newest-wins until acknowledged; reports
come in exactly once and in order.
"""

from dataclasses import dataclass, field

from ..protocol.link import LatestQueue, ReceiveWindow
from ..protocol.names import AgentName

RESEND_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class Peer:
    """routing_id: where its frames go. heard_at: when anything last came from it."""

    routing_id: bytes
    session: int
    agent: AgentName
    heard_at: float
    orders: LatestQueue = field(default_factory=lambda: LatestQueue(RESEND_AFTER_S))
    reports: ReceiveWindow = field(default_factory=lambda: ReceiveWindow(ordered=True))
    owes_ack: bool = False


class Peers:
    """All present sessions."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Peer] = {}
        self._by_agent: dict[AgentName, Peer] = {}

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
        return peer

    def newcomer(self, agent: AgentName) -> Peer | None:
        """The latest session that calls itself `agent`, accepted or not."""
        latest = None
        for peer in self._by_id.values():
            if peer.agent == agent:
                latest = peer
        return latest

    def accept(self, peer: Peer) -> None:
        former = self._by_agent.get(peer.agent)
        if former is not None and former is not peer and self._by_id.get(former.routing_id) is former:
            del self._by_id[former.routing_id]
        self._by_agent[peer.agent] = peer

    def drop(self, routing_id: bytes) -> AgentName | None:
        """A connection ended. Returns the agent's name if it was the accepted session of that agent."""
        peer = self._by_id.pop(routing_id, None)
        if peer is None or self._by_agent.get(peer.agent) is not peer:
            return None
        del self._by_agent[peer.agent]
        return peer.agent
