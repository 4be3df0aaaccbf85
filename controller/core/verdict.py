"""The end of a round: who is to blame, what it costs, and whether there is a next one; then its story in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.exit_codes import ExitCode
from . import wording
from .blame import Verdict, judge
from .budget import FIRST_STEPS_S, is_hopeless
from .rounds import Round

if TYPE_CHECKING:
    from .job import Job


def close_round(job: Job, round: Round) -> bool:
    """Judge a round whose ranks have all settled. True if the job ends because of it."""
    verdict = judge(list(round.findings.values()))
    cause = verdict.cause.fault
    culprits = 1 + len(verdict.companions)
    spent = job.budget.spend(cause, culprits, job.settings)
    round.counted = culprits
    text = wording.describe(cause, verdict.cause.rank)
    if is_hopeless(cause, job.budget.furthest_step) and round.ran_s < FIRST_STEPS_S:
        return job.end(ExitCode.FAILED, f"{text}; not retried, since it would fail again:\n{cause.detail}")
    if spent:
        return job.end(ExitCode.BUDGET_SPENT, f"{spent}; last: {text}")
    if job.strikes.judge(round, cause):
        job.budget.forgive()  # it will be another checkpoint
        return False
    if job.budget.loops():
        return _break_loop(job, verdict)
    return False


def count_late_faults(job: Job) -> str:
    """Ranks of the closed round that failed while the next one was planned count, too; why the job must stop."""
    round = job.closed
    if round is None:
        return ""
    culprits = 1 + len(judge(list(round.findings.values())).companions)
    late, round.counted = max(culprits - round.counted, 0), max(culprits, round.counted)
    return job.budget.spend_more(late, job.settings) if late else ""


def _break_loop(job: Job, verdict: Verdict) -> bool:
    """The same failure again and again: leave the suspect out if there is somebody to take its place, else stop."""
    fault = verdict.cause.fault
    round = job.round
    assert round is not None
    record = round.seats.get(verdict.cause.rank)
    count = job.budget.same_failures
    reserves = sum(1 for r in job.roster.slots() if r.at_gate and round.seat_of(r) is None and not r.suspect)
    if record is not None and not record.suspect and job.budget.same_slot and reserves > 0:
        by_node = job.settings.granularity == "node"
        suspects = [r for r in job.roster.slots() if r is record or (by_node and r.agent.node == record.agent.node)]
        for suspect in suspects:
            suspect.suspect = True
        names = wording.listing(s.slot for s in suspects)
        job.tell(
            "suspect", f"{count} equal failures in {fault.slot} without progress: leaving out {names}", level="error"
        )
        job.budget.forgive()
        return False
    text = f"the same failure {count} times in a row without progress beyond step {job.budget.furthest_step}"
    return job.end(ExitCode.NO_PROGRESS, f"{text}: {wording.describe(fault, verdict.cause.rank)}")


def tell_story(job: Job, old: Round, new: Round, reserves: int) -> None:
    """One line, always in this order: who failed and why, who suffered, who sits where now, the world, the times."""
    verdict = judge(list(old.findings.values()))
    cause = verdict.cause
    phases = phase_times(old, new)
    parts = blamed(old, verdict)
    parts += filter(None, (wording.moves(old, new), world(old, new, reserves), job.planning.resumes(new)))
    parts += filter(None, (spending(job, new.index),))
    parts.append(timing(phases))
    job.tell(
        "recovered",
        "; ".join(parts),
        rank=cause.rank,
        slot=cause.fault.slot,
        kind=cause.fault.kind.value,
        world_size=new.size,
        reserves=reserves,
        faults=job.budget.rank_faults,
        phases=phases,
        resume_step=new.choice.resume.step if new.choice else None,
    )


def blamed(round: Round, verdict: Verdict) -> list[str]:
    """Cause, companions, victims, and who was killed, each in a few words."""
    said = [wording.describe(verdict.cause.fault, verdict.cause.rank, short=True)]
    if verdict.companions:
        said.append(f"also failed: {wording.ranks(f.rank for f in verdict.companions)}")
    if verdict.victims:
        said.append(f"victims: {wording.ranks(f.rank for f in verdict.victims)}")
    if round.late:
        said.append(f"killed: {wording.given_up(round.late)}")
    return said


def world(old: Round, new: Round, reserves: int) -> str:
    spare = f"{reserves} reserve{'' if reserves == 1 else 's'}"
    return f"world {new.size}, {spare}" if old.size == new.size else f"world {old.size} -> {new.size}, {spare}"


def spending(job: Job, index: int) -> str:
    """What of the budgets is used up; empty where there are none."""
    settings = job.settings
    said: list[str] = []
    if settings.max_rank_faults is not None:
        said.append(f"rank fault {job.budget.rank_faults} of {settings.max_rank_faults}")
    if settings.max_iterations is not None:
        said.append(f"round {index + 1} of {settings.max_iterations}")
    return ", ".join(said)


def phase_times(old: Round, new: Round) -> dict[str, float | None]:
    """Milliseconds from the first evidence of a fault until all ranks run again; empty if a controller died then."""
    if old.interrupted_by_restart or new.interrupted_by_restart:
        return {}
    return {
        "abort_ms": wording.milliseconds(old.times.fault, old.times.quiesced),
        "plan_ms": wording.milliseconds(old.times.quiesced, new.times.planned),
        "enter_ms": wording.milliseconds(new.times.planned, new.times.entered),
        "total_ms": wording.milliseconds(old.times.fault, new.times.entered),
    }


def timing(phases: dict[str, float | None]) -> str:
    if not phases:
        return "not timed: a controller died meanwhile"
    told = f"abort {phases['abort_ms']} + plan {phases['plan_ms']}"
    if phases["total_ms"] is None:
        return f"{told} ms; ended before all ranks had entered"
    return f"{told} + enter {phases['enter_ms']} = {phases['total_ms']} ms"
