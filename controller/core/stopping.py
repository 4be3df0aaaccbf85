"""An orderly end: somebody asked for it, and all ranks leave the training function after one agreed step.

Rules:
1. While a round runs that all its ranks have entered, the first request holds it: from here on no rank passes a further
   step (`Round.should_stop`), and each answers with the last one that it has passed. So the greatest answer is final
   when the last one is in, and the step after it is the first that no rank has passed: all leave there.
2. What is left is a round that completes as any other. The job then ends with the request's code.
3. `termination_grace_time` bounds all of it, the trainers' own code after the function included. Afterwards, at a
   fault, or when the same somebody asks again, the job ends at once. No further round is begun.
4. Requests from several sides are one wish: a scheduler tells every agent, within moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol.exit_codes import PASSED_THROUGH
from . import wording
from .events import StopAsked
from .roster import SlotRecord, Watch
from .rounds import JobPhase

if TYPE_CHECKING:
    from .job import Job

_GRACE = "grace"
_IN_THE_FUNCTION = (JobPhase.RUNNING, JobPhase.COMPLETING)


class Stopping:
    """request: the first one, None while nobody wants the job to end. step: after which all leave, -1 until known."""

    def __init__(self, job: Job) -> None:
        self.request: StopAsked | None = None
        self.step = -1
        self._job = job
        self._reasons: set[str] = set()
        self._silent = Watch(job.roster, self._owes_an_answer)

    def asked(self, event: StopAsked) -> None:
        job = self._job
        # An agent asks once; what comes from it again is the same request, delivered to another controller.
        again = not event.agent and event.reason in self._reasons
        self._reasons.add(event.reason)
        entered = job.phase in _IN_THE_FUNCTION and job.round is not None and job.round.times.entered is not None
        if self.request is None and entered:
            self.request = event
            limit = job.settings.termination_grace_time
            job.arm(_GRACE, limit)
            text = f"{event.reason}: all ranks are to leave after a common step, within {limit:g} s"
            job.tell("stopping", f"{text} (termination_grace_time)")
            job.directives.dirty_all()
        elif self.request is None:
            job.end(event.code, event.reason)
        elif again:
            self.end()

    def rearm(self) -> None:
        """A controller has come back."""
        if self.request is not None and self._job.phase in (*_IN_THE_FUNCTION, JobPhase.RELEASED):
            self._job.arm(_GRACE, self._job.settings.termination_grace_time)

    def end(self) -> bool:
        """End the job as it was asked to; a trainer that left with a code of policy has the last word."""
        job, request = self._job, self.request
        assert request is not None
        if job.code in PASSED_THROUGH:
            return job.end(job.code, f"{request.reason}; a process exited with code {job.code} afterwards")
        return job.end(request.code, request.reason)

    def moved(self) -> bool:
        """The rules of a stop, before those of the phase."""
        job = self._job
        if self.request is None or job.phase in (JobPhase.STOPPING, JobPhase.ENDED):
            return False
        if job.due(_GRACE):
            self._tell_missing()
            return self.end()
        if self.step < 0 and job.phase in _IN_THE_FUNCTION and not self._silent.any():
            self._settle()
        return False

    def _owes_an_answer(self, record: SlotRecord) -> bool:
        round = self._job.round
        if round is None or round.seat_of(record) is None:
            return False
        return record.state.round != round.index or record.state.passed is None

    def _settle(self) -> None:
        """All ranks have answered."""
        job = self._job
        assert job.round is not None
        passed = [record.state.passed for record in job.round.seats.values()]
        self.step = max((step for step in passed if step is not None), default=-1) + 1
        job.tell("stop_step", f"all ranks leave after step {self.step}", step=self.step)
        job.directives.dirty_all()

    def _tell_missing(self) -> None:
        job = self._job
        limit = f"{job.settings.termination_grace_time:g} s (termination_grace_time)"
        if job.phase is JobPhase.RELEASED or job.round is None:
            late = wording.missing(r for r in job.roster.slots() if r.alive)
            text = f"left the function, but did not exit within {limit}: {late}"
        else:
            late = wording.ranks(job.round.to_return)
            text = f"did not leave the function within {limit}: {late}"
        job.tell("stop_late", text, level="warning")
