"""The exit codes of a job: what `perdure run` and the controller end with, and what a batch script may act on.

Codes below 16 other than these are the trainer's own and are passed through when the job ends because of one.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    COMPLETED = 0
    FAILED = 1
    """The training failed in a way that is not retried (an ImportError before the first step, say)."""
    USAGE = 2
    """Bad configuration; nothing was started."""
    RESUME_TO_DISAMBIGUATE = 16
    FAILED_VALIDATION = 17
    INTERNAL = 70
    """A defect of perdure itself; the log has the traceback."""
    REQUEUE = 75
    """Preempted and saved: queue the job again."""
    BUDGET_SPENT = 90
    """`max_iterations` or `max_rank_faults` is used up."""
    WORLD_TOO_SMALL = 91
    """Too few healthy ranks are left for `min_world_size` and `world_size_multiple_of`."""
    NOT_FORMED = 92
    """Agents or ranks were missing when `forming_timeout` passed."""
    NO_PROGRESS = 93
    """The same failure again and again without progress."""
    CONTROLLER_LOST = 94
    """An agent was without a controller for `controller_timeout`."""
    CHECKPOINTS_SPENT = 95
    """Every checkpoint that can be reached is bad, or was resumed from in vain."""
    HANGUP = 129
    """SIGHUP: the terminal was closed. Under nohup, which has it ignored, the job goes on."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM."""


PASSED_THROUGH = frozenset({ExitCode.RESUME_TO_DISAMBIGUATE, ExitCode.FAILED_VALIDATION, ExitCode.REQUEUE})
"""Exit codes of a rank that are policy, not a loss: they end the job with that code."""
