"""Between rounds: when the job has formed, who may run, who runs next, and whether a dead slot gets another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.exit_codes import PASSED_THROUGH, ExitCode
from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import Stage
from . import wording
from .blame import judge
from .budget import is_hopeless, round_allowed
from .choice import Choice
from .commits import STOCK_TIMEOUT_S
from .placement import Candidate, CannotPlace, place, world_size
from .resume_choice import NoCheckpoint, choose
from .roster import SlotRecord, Watch
from .rounds import JobPhase, Round, Times
from .verdict import count_late_faults, tell_story

if TYPE_CHECKING:
    from .job import Job

_STOCK, _PUBLISH = "stock", "publish"

START_FAILURES_LIMIT = 2
"""Processes in a row that may die in a slot before they reach the gate; then the slot stays empty."""


class Planning:
    """The rules of FORMING, PLANNING and RELEASED."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._order_cache: dict[str, int] = {}
        roster = job.roster
        self._arriving = Watch(roster, lambda r: r.coming or r.dying)
        self._present = Watch(roster, lambda r: r.alive or r.dying)
        self._elsewhere = Watch(roster, lambda r: r.alive and not r.waits_for(job.completed))

    # ---- FORMING ----------------------------------------------------------------------------------------------

    def form(self) -> bool:
        job = self._job
        if job.recovering:
            return False
        agents = [a for a in job.roster.agents.values() if not a.lost]
        missing = max(job.expected - len(agents), 0)
        if not agents or missing or self._arriving.any():
            return job.due("forming") and self._formed_late(missing)
        slots = [r for a in agents for r in a.slots.values()]
        if all(r.state.stage is Stage.GONE for r in slots):
            return self._all_left(slots)
        left = [r for r in slots if r.state.exit is not None and r.state.exit.code == 0]
        if left:
            why = "some ranks wait in the resilient function, but these exited with code 0 without calling it"
            return job.end(ExitCode.FAILED, f"{why}: {wording.missing(left)}")
        if job.commits.is_blind:
            return job.due("forming") and self._stays_blind()
        return self._stocked() and self._formed()

    def _formed_late(self, missing_agents: int) -> bool:
        """`forming_timeout` has passed: start with those who are there, if they are enough."""
        job = self._job
        late = [r for r in job.roster.slots() if r.coming]
        ready = sum(r.at_gate for r in job.roster.slots())
        who: list[str] = []
        if missing_agents:
            who.append(f"{missing_agents} of {job.expected} agents")
        elif not job.roster.agents:
            who.append("every agent")
        if late:
            who.append(f"ranks {wording.missing(late)}")
        text = f"missing after {job.settings.forming_timeout:g} s (forming_timeout): {' and '.join(who)}"
        needed = max(job.settings.min_world_size, job.settings.active_world_size or 1)
        if ready < needed:
            ranks = "rank is" if ready == 1 else "ranks are"
            return job.end(ExitCode.NOT_FORMED, f"{text}; {ready} {ranks} ready, at least {needed} needed")
        if job.commits.is_blind:
            return self._stays_blind()
        job.tell("forming_late", f"starting with {ready} ranks; {text}", level="warning")
        return self._formed()

    def _stocked(self) -> bool:
        """Whether all agents have said which checkpoints they have found, or have had their time for it."""
        job = self._job
        missing = job.commits.stock_missing
        if not missing:
            return True
        if _STOCK not in job.timers:
            job.arm(_STOCK, STOCK_TIMEOUT_S)
        if not job.due(_STOCK) and not job.due("forming"):
            return False
        who = wording.listing(agent.name for agent in missing)
        text = f"starting without the checkpoints of {who}: not told within {STOCK_TIMEOUT_S:g} s what is there"
        job.tell("stock_late", text, level="warning")
        return True

    def _stays_blind(self) -> bool:
        """To begin anew beside checkpoints that nobody could see would be worse than to end."""
        settings = self._job.settings
        text = f"no agent could look through {settings.save} within {settings.forming_timeout:g} s (forming_timeout)"
        why = "the training would begin anew, whatever is there"
        reason = f"{text}, and without that {why}; see to the file system, or unset save"
        return self._job.end(ExitCode.NOT_FORMED, reason)

    def _formed(self) -> bool:
        self._job.timers.pop(_STOCK, None)
        self._job.timers.pop("forming", None)
        self._job.arm("respawn", 0.0)
        self._job.move(JobPhase.PLANNING)
        return True

    def _all_left(self, slots: list[SlotRecord]) -> bool:
        """Every process exited before it reached the gate: scripts that never call a resilient function."""
        codes = [wording.exit_status(r.state.exit) for r in slots if r.state.exit]
        worst = next((code for code in codes if code), 0)
        return self._job.end(worst, "all processes exited without calling a resilient training function")

    # ---- RELEASED ---------------------------------------------------------------------------------------------

    def after_release(self) -> bool:
        """After a completed round the trainers exit, or meet at the gate again for another resilient function."""
        job = self._job
        stops = job.stopping.request is not None
        if not self._present.any():
            if job.commits.orders.publishing and not self._published_late():
                return False
            job.timers.pop(_PUBLISH, None)
            if stops:
                return job.stopping.end()
            if job.code:
                return job.end(job.code, f"completed, but a process exited with code {job.code} afterwards")
            return job.end(ExitCode.COMPLETED, "completed")
        if not any(r.waits_for(job.completed) for r in job.gathered):
            job.timers.pop("regather", None)
            return False
        if not self._elsewhere.any():
            if stops:
                return job.stopping.end()
            job.timers.pop("regather", None)
            job.arm("respawn", 0.0)
            job.move(JobPhase.PLANNING)
            return True
        if "regather" not in job.timers:
            job.arm("regather", job.settings.forming_timeout)
        if not job.due("regather"):
            return False
        rest = [r for r in job.roster.slots() if r.alive and not r.waits_for(job.completed)]
        why = "some ranks called another resilient function, these did not"
        return job.end(ExitCode.NOT_FORMED, f"{why}: {wording.missing(rest)}")

    def _published_late(self) -> bool:
        """Whether the last checkpoints have had their time to be published."""
        job = self._job
        limit = job.settings.save_timeout
        if _PUBLISH not in job.timers:
            job.arm(_PUBLISH, limit)
        if not job.due(_PUBLISH):
            return False
        steps = wording.listing(sorted(save.step for save in job.commits.orders.publications))
        text = f"complete, but not published within {limit:g} s (save_timeout): steps {steps}"
        job.tell("publish_late", text, level="error")
        return True

    # ---- PLANNING ---------------------------------------------------------------------------------------------

    def needs_cause(self, round: Round) -> bool:
        """Whether it must first be known how a rank of this round died.

        It may decide how the job ends, and with which code. Where the next round can begin at once, nobody waits.
        """
        job = self._job
        settings = job.settings
        if not any(record.dying for record in round.seats.values()):
            return False
        limit = settings.max_rank_faults
        last = limit is not None and job.budget.rank_faults + len(round.findings) > limit
        least = round.size if settings.respawn else max(settings.min_world_size, settings.world_size_multiple_of)
        policy = any(f.fault.kind is FaultKind.EXIT and f.fault.code in PASSED_THROUGH for f in round.findings.values())
        return last or policy or len(self._candidates()) < least

    def plan(self) -> bool:
        job = self._job
        if job.recovering:
            return False
        settings = job.settings
        candidates = self._candidates()
        target = settings.active_world_size or sum(len(a.slots) for a in job.roster.agents.values())
        if len(candidates) < target and self._more_to_come() and "respawn" in job.timers and not job.due("respawn"):
            return False
        job.timers.pop("respawn", None)
        spent = count_late_faults(job)
        if spent:
            return job.end(ExitCode.BUDGET_SPENT, spent)
        index = 0 if job.round is None else job.round.index + 1
        refusal = round_allowed(index, settings)
        if refusal:
            return job.end(ExitCode.BUDGET_SPENT, refusal)
        try:
            size = world_size(len(candidates), target, settings.min_world_size, settings.world_size_multiple_of)
        except CannotPlace as error:
            return job.end(ExitCode.WORLD_TOO_SMALL, f"{error}; {self._why_so_few()}")
        try:
            choice = self._choose(first=index == 0)
        except NoCheckpoint as error:
            return job.end(error.code, f"{error}{self._lastly()}")
        self._open_round(index, place(candidates, self._previous(), size), choice)
        return True

    def _lastly(self) -> str:
        """How the round before ended, to be put behind why there is none after it."""
        closed = self._job.closed
        if closed is None:
            return ""
        cause = judge(list(closed.findings.values())).cause
        return f"; last: {wording.describe(cause.fault, cause.rank)}"

    def _choose(self, *, first: bool) -> Choice | None:
        job = self._job
        choice = choose(job.commits.records.values(), job.depots, job.settings, first=first, epoch=job.epoch)
        if choice is None and job.commits.wanted and first:
            job.tell("begins_anew", "no complete checkpoint was found: the training begins anew")
        return choice

    def _more_to_come(self) -> bool:
        """Whether processes are on their way to the gate."""
        job = self._job
        respawn = job.settings.respawn
        return any(r.coming or r.lags(job.completed) or (r.dying and respawn) for r in job.roster.slots())

    def _open_round(self, index: int, seats: dict[int, SlotRecord], choice: Choice | None) -> None:
        job = self._job
        job.round = Round(
            index=index,
            seats=seats,
            lives={rank: record.state.life for rank, record in seats.items()},
            times=Times(planned=job.now),
            master_port=seats[0].state.port,
            choice=choice,
        )
        job.commits.round_planned()
        job.arm("entry", job.settings.barrier_timeout)
        job.move(JobPhase.RUNNING)

    def _candidates(self) -> list[Candidate[SlotRecord]]:
        """Who may run: at the gate, not under suspicion, and under granularity `node` on a node without a dead rank."""
        job = self._job
        broken: set[str] = set()
        if job.settings.granularity == "node":
            broken = {r.agent.node for r in job.roster.slots() if not r.alive or r.state.stage is Stage.STARTING}
        function, order = job.completed, self._order()
        return [
            self._candidate(r, order)
            for agent in job.roster.agents.values()
            if agent.node not in broken
            for r in agent.slots.values()
            if r.waits_for(function) and not r.suspect
        ]

    def _candidate(self, record: SlotRecord, order: dict[str, int]) -> Candidate[SlotRecord]:
        agent = record.agent
        return Candidate(record, agent.node, agent.group, record.state.index, order[agent.name])

    def _order(self) -> dict[str, int]:
        agents = self._job.roster.agents
        if len(self._order_cache) != len(agents):
            ordered = sorted(agents.values(), key=lambda a: (a.order, a.name))
            self._order_cache = {agent.name: i for i, agent in enumerate(ordered)}
        return self._order_cache

    def _previous(self) -> dict[int, Candidate[SlotRecord]]:
        round, order = self._job.round, self._order()
        return {} if round is None else {rank: self._candidate(record, order) for rank, record in round.seats.items()}

    def _why_so_few(self) -> str:
        gone = [r for r in self._job.roster.slots() if not r.alive]
        chosen = {candidate.slot for candidate in self._candidates()}
        out = [r for r in self._job.roster.slots() if r.at_gate and not r.suspect and r not in chosen]
        text = f"dead: {wording.missing(gone) if gone else 'none'}"
        if out and self._job.settings.granularity == "node":
            text += (
                f"; healthy but left out with their node (granularity=node): {wording.listing(r.slot for r in out)}; "
                "granularity=rank, respawn=true or spare nodes would keep them"
            )
        return text

    # ---- respawn ----------------------------------------------------------------------------------------------

    def consider_respawn(self, record: SlotRecord, fault: Fault) -> None:
        """Decide whether a dead slot gets another process, and whether the job can go on at all."""
        job = self._job
        if record.state.round < 0 and not record.condemned:
            record.failed_starts += 1
            if record.state.life == 1 and is_hopeless(fault, job.budget.furthest_step):
                text = f"{wording.describe(fault)}; not retried, since it would fail again"
                job.end(fault.code or ExitCode.FAILED, f"{text}:\n{fault.detail}" if fault.detail else text)
                return
        if job.phase in (JobPhase.RELEASED, JobPhase.STOPPING, JobPhase.ENDED) or not job.settings.respawn:
            return
        if job.stopping.request is not None:
            return  # no further round is begun
        if record.state.round < 0 and fault.kind is FaultKind.EXIT and fault.code == 0:
            return  # a script that never calls a resilient function; see `form`
        if record.failed_starts > START_FAILURES_LIMIT:
            why = f"{record.failed_starts} processes in a row died before they reached the gate"
            job.tell("slot_empty", f"{record.slot} stays empty: {why}", level="error", slot=record.slot)
            return
        record.wanted = max(record.wanted, record.state.life + 1)
        job.directives.dirty(record.agent)

    # ---- the story --------------------------------------------------------------------------------------------

    def tell_running(self) -> None:
        """All ranks have entered the round: say so, with the story of how it came to be."""
        job = self._job
        round = job.round
        assert round is not None
        reserves = sum(1 for r in job.roster.slots() if r.at_gate and round.seat_of(r) is None)
        if job.closed is None:
            said = filter(
                None, (f"round {round.index} runs with {round.size} ranks and {reserves} reserves", self.resumes(round))
            )
            job.tell(
                "running",
                "; ".join(said),
                world_size=round.size,
                resume_step=round.choice.resume.step if round.choice else None,
            )
            return
        tell_story(job, job.closed, round, reserves)
        job.closed = None

    def resumes(self, round: Round) -> str:
        """What a round resumes from, in a few words; empty for a job without checkpoints, or if it was just said."""
        if round.choice is not None:
            return round.choice.text
        return "no checkpoint to resume from" if self._job.commits.wanted and round.index else ""
