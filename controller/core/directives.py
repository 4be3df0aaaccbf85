"""What each agent should be doing, as a pure function of the job's state; only what changed is sent.

While a round is aborted or the job waits, every agent without deaths of its own gets the *same* Directive object, so
that the shell encodes it once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.messages import Directive, Kill, Phase, Seat, Stage
from ...protocol.names import NO_ROUND, AgentName
from .commands import Direct
from .roster import AgentRecord
from .rounds import JobPhase

if TYPE_CHECKING:
    from .job import Job

_PHASES: dict[JobPhase, Phase] = {
    JobPhase.FORMING: Phase.HOLD,
    JobPhase.RUNNING: Phase.RUN,
    JobPhase.COMPLETING: Phase.RUN,
    JobPhase.RELEASED: Phase.RELEASE,
    JobPhase.ABORTING: Phase.ABORT,
    JobPhase.PLANNING: Phase.ABORT,
    JobPhase.STOPPING: Phase.END,
    JobPhase.ENDED: Phase.END,
}


class Directives:
    """Remembers what each agent was last told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sent: dict[AgentName, Directive] = {}
        self._dirty: dict[AgentName, AgentRecord] = {}

    def dirty(self, agent: AgentRecord) -> None:
        self._dirty[agent.name] = agent

    def dirty_all(self) -> None:
        self._dirty.update(self._job.roster.agents)

    def force(self, agent: AgentRecord) -> None:
        """Tell `agent` even if nothing changed: it may have missed what was sent."""
        self._sent.pop(agent.name, None)
        self.dirty(agent)

    def forget(self) -> None:
        """Nobody is known to have been told anything."""
        self._sent.clear()
        self.dirty_all()

    def changed(self) -> list[Direct]:
        """Directives to send now."""
        if not self._dirty:
            return []
        shared = self._shared()
        seats = self._seats_by_agent() if shared.phase is Phase.RUN else {}
        per_node: dict[str, int] = {}
        for name, own in seats.items():
            node = self._job.roster.agents[name].node
            per_node[node] = per_node.get(node, 0) + len(own)
        out: list[Direct] = []
        for name, agent in self._dirty.items():
            if not agent.attached or self._job.roster.agents.get(name) is not agent:
                continue
            directive = self._for_agent(agent, shared, seats.get(name, []), per_node.get(agent.node, 0))
            if self._sent.get(name) != directive:
                self._sent[name] = directive
                out.append(Direct(name, directive))
        self._dirty.clear()
        return out

    def _shared(self) -> Directive:
        job = self._job
        phase = _PHASES[job.phase]
        if job.round is None:
            phase = Phase.HOLD if phase is not Phase.END else phase
            return Directive(NO_ROUND, phase, cause=job.reason, code=job.code, completed=job.completed)
        round = job.round
        cause = next((f.fault.message for f in round.findings.values()), "") if phase is Phase.ABORT else job.reason
        first = round.seats[0]
        return Directive(
            round.index,
            phase,
            world_size=round.size,
            master_addr=first.agent.address,
            master_port=round.master_port,
            cause=cause,
            code=job.code,
            completed=job.completed,
            hold=job.stopping.request is not None and phase is not Phase.END,
            stop_step=job.stopping.step,
        )

    def _seats_by_agent(self) -> dict[AgentName, list[Seat]]:
        round = self._job.round
        assert round is not None
        seats: dict[AgentName, list[Seat]] = {}
        for rank, record in round.seats.items():
            seats.setdefault(record.agent.name, []).append(Seat(record.slot, round.lives[rank], rank))
        return seats

    def _for_agent(self, agent: AgentRecord, shared: Directive, seats: list[Seat], on_node: int) -> Directive:
        kill = tuple(
            Kill(r.slot, r.state.life, r.condemned)
            for r in agent.slots.values()
            if r.condemned and r.state.stage is not Stage.GONE
        )
        lives = {r.slot: r.wanted for r in agent.slots.values() if r.wanted > r.state.life}
        if not seats and not kill and not lives:
            return shared
        return Directive(
            shared.round, shared.phase, tuple(seats), shared.world_size, on_node, shared.master_addr,
            shared.master_port, kill, lives, shared.cause, shared.code, shared.completed, shared.hold, shared.stop_step,
        )  # fmt: skip
