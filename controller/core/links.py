"""The connections to the agents: who may be away for a moment, who is given up, and who is waited for.

A connection that closes has a moment to come back. If nobody can be heard any more, it may be this controller that is
cut off: then nobody is blamed, and all have their time again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.names import AgentName
from .events import LinkLost, Silent, Tick
from .roster import AgentRecord
from .rounds import JobPhase

if TYPE_CHECKING:
    from .job import Job

LINK_GRACE_WITH_PEER_ERRORS_S = 0.25
"""How long a lost connection may take to come back when ranks elsewhere already see broken connections."""

# Timers of agents; they outlast phases, as that of a stop does. Every other one belongs to a phase.
ATTACH = "attach"
LINK = "link:"


class Links:
    """What the job knows of its connections."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def lost(self, event: LinkLost) -> None:
        job = self._job
        agent = job.roster.agents.get(event.agent)
        if agent is None or agent.lost or not agent.attached:
            return
        agent.attached = False
        job.depots.changed()
        if job.phase in (JobPhase.STOPPING, JobPhase.ENDED) and not agent.busy:
            return  # it has ended its ranks and left, as it should
        if event.dead:
            job.evidence.lose_agent(agent, f"its process {agent.process.pid} is dead")
            return
        grace = job.settings.last_call_wait
        if job.round and any(finding.fault.peer_error for finding in job.round.findings.values()):
            grace = min(grace, LINK_GRACE_WITH_PEER_ERRORS_S)
        job.timers[LINK + agent.name] = job.now + grace
        job.tell(
            "link",
            f"connection to agent {agent.name} closed; it has {grace:g} s to come back",
            host=agent.host,
            level="warning",
        )

    def hurry(self) -> None:
        """Ranks see broken connections: a lost connection to an agent is hardly a hiccup of the network."""
        job = self._job
        soon = job.now + LINK_GRACE_WITH_PEER_ERRORS_S
        for name, at in job.timers.items():
            if name.startswith(LINK):
                job.timers[name] = min(at, soon)

    def silent(self, event: Silent) -> None:
        job = self._job
        agent = job.roster.agents.get(event.agent)
        if agent is not None and not agent.lost:
            limit = job.settings.heartbeat_timeout
            self._give_up(agent, f"not heard from for {event.age_s:.1f} s (heartbeat_timeout={limit:g})")

    def tick(self, event: Tick) -> None:
        """Time has passed: whose moment is over?"""
        job = self._job
        links = [timer for timer in job.timers if timer.startswith(LINK)]
        for name in [timer.removeprefix(LINK) for timer in links if job.due(timer)]:
            agent = job.roster.agents[AgentName(name)]
            self._give_up(agent, "its connection closed and did not come back")
        if job.due(ATTACH):
            why = f"did not come back to the controller within {job.settings.heartbeat_timeout:g} s"
            for agent in job.roster.agents.values():
                if not agent.attached and not agent.lost:
                    job.evidence.lose_agent(agent, why)

    def _give_up(self, agent: AgentRecord, why: str) -> None:
        """An agent is out of reach: so are its ranks, unless it is this controller that nobody can reach."""
        job = self._job
        alone = not any(other.attached for other in job.roster.agents.values() if other is not agent)
        if not alone or job.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            job.evidence.lose_agent(agent, why)
            return
        agent.attached = False
        job.depots.changed()
        job.timers.pop(LINK + agent.name, None)
        if job.recovering:
            return
        for other in job.round.lost_agents if job.round else []:
            if job.roster.agents.get(other.name) is other:
                other.lost = False  # it went moments before, for the same reason
        self.await_agents()
        text = f"no agent can be heard, lastly {agent.name}: {why}. Either all are gone or this controller is cut off"
        job.tell("isolated", f"{text}: waiting {job.settings.heartbeat_timeout:g} s for them", level="error")

    def await_agents(self) -> None:
        """Until every agent is back, or its time has passed, nothing is planned and no timer fires."""
        job = self._job
        until = job.timers[ATTACH] = job.now + job.settings.heartbeat_timeout
        for timer in job.timers:
            job.timers[timer] = max(job.timers[timer], until)
