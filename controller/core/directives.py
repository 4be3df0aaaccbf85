"""What each agent should be doing, as a pure function of the job's state; only what changed is sent.

While a round is aborted or the job waits, every agent without deaths of its own gets the *same* Directive object, so
that the shell encodes it once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.checkpoints import NO_ORDERS, Resume
from ...protocol.messages import Directive, Kill, Phase, Seat, Stage
from ...protocol.names import NO_ROUND, AgentName
from .commands import Direct
from .roster import AgentRecord
from .rounds import JobPhase, Round

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


Seating = tuple[dict[AgentName, tuple[Seat, ...]], dict[str, int]]
NOBODY_SITS: Seating = ({}, {})


class Directives:
    """Remembers what each agent was last told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sent: dict[AgentName, Directive] = {}
        self._dirty: dict[AgentName, AgentRecord] = {}
        self._seated: tuple[Round | None, Seating] = (None, NOBODY_SITS)

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
        seats, per_node = self._seating() if shared.phase is Phase.RUN else NOBODY_SITS
        out: list[Direct] = []
        for name, agent in self._dirty.items():
            if not agent.attached or self._job.roster.agents.get(name) is not agent:
                continue
            directive = self._for_agent(agent, shared, seats.get(name, ()), per_node.get(agent.node, 0))
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
            return Directive(NO_ROUND, phase, cause=job.reason, code=job.code, completed=job.completed, epoch=job.epoch)
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
            epoch=job.epoch,
            vain=job.commits.vain.listed if phase is Phase.RUN else (),
        )

    def _seating(self) -> Seating:
        """Each agent's seats of the present round, and how many there are on each node. They do not change in it, while
        its agents' other orders do, thousands of times where ten thousand ranks save.
        """
        round = self._job.round
        assert round is not None
        if self._seated[0] is not round:
            seats: dict[AgentName, tuple[Seat, ...]] = {}
            per_node: dict[str, int] = {}
            for rank, record in round.seats.items():
                agent = record.agent
                seats[agent.name] = (*seats.get(agent.name, ()), Seat(record.slot, round.lives[rank], rank))
                per_node[agent.node] = per_node.get(agent.node, 0) + 1
            self._seated = (round, (seats, per_node))
        return self._seated[1]

    def _for_agent(self, agent: AgentRecord, shared: Directive, seats: tuple[Seat, ...], on_node: int) -> Directive:
        kill = tuple(
            Kill(r.slot, r.state.life, r.condemned)
            for r in agent.slots.values()
            if r.condemned and r.state.stage is not Stage.GONE
        )
        lives = {r.slot: r.wanted for r in agent.slots.values() if r.wanted > r.state.life}
        depot = self._job.commits.orders.of(agent)
        if not seats and not kill and not lives and depot is NO_ORDERS:
            return shared
        round = self._job.round
        resume: Resume | None = None
        if seats and round is not None and round.choice is not None:
            resume = round.choice.for_node(agent.node, tuple(seat.rank for seat in seats))
        return Directive(
            shared.round, shared.phase, seats, shared.world_size, on_node, shared.master_addr,
            shared.master_port, kill, lives, shared.cause, shared.code, shared.completed, shared.hold, shared.stop_step,
            shared.epoch, resume, depot, shared.vain,
        )  # fmt: skip
