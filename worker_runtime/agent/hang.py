"""Whether a rank hangs, judged from its beat page. Pure: stamps and `now` are arguments, in seconds of one clock.

Two stamps tell different things. The *automatic* one shows that the interpreter runs bytecode in the main thread; it
stands still in a C call that does not return, with the GIL held or not, and in a frozen process. The *ping* shows
that the work moves; it counts from the first ping of a round on, and it stands still in a livelock too. The older of
the two is the rank's progress. Nothing wakes up to look before the earliest instant at which a limit can have passed.
"""

from dataclasses import dataclass

from ...protocol.settings import Settings
from ..beats import Beat

NEARLY = 0.9
"""When one rank is found to hang, others that have stood still for this share of the limit are found to, as well: blame
needs all of them as they stood, and the round's end moves them.
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the page says, in seconds.

    auto: its first stamp of a round is the entry into the function. ping: None if it has not pinged in this round.
    pause_until: no judgement before this instant; afterwards silence is counted from it.
    """

    auto: float
    ping: float | None
    pause_until: float
    step: int = -1

    def last(self, *, with_ping: bool) -> float:
        """When the rank last moved."""
        moved = min(self.auto, self.ping) if with_ping and self.ping is not None else self.auto
        return max(moved, self.pause_until)

    def interpreter_runs(self, now: float, soft_s: float) -> bool:
        """Whether only the work stands still."""
        return now - self.auto < soft_s / 2

    def stuck_in(self, now: float, soft_s: float) -> str:
        """What stands still, for people."""
        if self.interpreter_runs(now, soft_s):
            return f"no ping after step {self.step}, though the interpreter runs"
        return "the main thread runs no Python (a C call that does not return, the GIL held, or a frozen process)"


def progress_of(beat: Beat) -> Progress:
    return Progress(
        auto=beat.auto_ns / 1e9,
        ping=beat.ping_ns / 1e9 if beat.ping_ns else None,
        pause_until=beat.pause_until_ns / 1e9,
        step=beat.step,
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """soft, hard: which limits have passed. stale_s: seconds without progress. again_at: when to look again."""

    soft: bool
    hard: bool
    stale_s: float
    again_at: float


def judge(progress: Progress, now: float, soft_s: float, hard_s: float, *, with_ping: bool) -> Judgement:
    """Compare the progress with both limits. `with_ping` is off while a rank is interrupted: it cannot ping then."""
    last = progress.last(with_ping=with_ping)
    stale = max(now - last, 0.0)
    # The same sums as below, so that whoever comes at `again_at` never comes a rounding error too early.
    soft, hard = now >= last + soft_s, now >= last + hard_s
    again = min(
        (last + limit for limit, passed in ((soft_s, soft), (hard_s, hard)) if not passed), default=last + hard_s
    )
    return Judgement(soft, hard, stale, again)


def stamp_interval(settings: Settings) -> float:
    """How often the runtime stamps: often enough that a limit is judged within 50 ms, seldom enough to cost nothing."""
    return min(max(settings.soft_timeout / 20, 0.01), 0.25)


def gloo_limit(settings: Settings) -> float:
    """The longest that one gloo operation may wait: a wait that gloo has lost ends before the rank is killed for it."""
    return (settings.soft_timeout + settings.hard_timeout) / 2
