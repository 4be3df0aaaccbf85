"""What committing one save of thousands of ranks costs the controller, and how long it takes: see `scale.py`.

All agents report their ranks' shards at the same moment, which is the worst case; what is timed ends when the agent
that is to publish has the order.
"""

import time
from pathlib import Path
from typing import NamedTuple

from harness import Job, Row, say
from scale import JOIN_S, ROUND_S, SMALL, Cluster

RANKS = 10_240
RANKS_PER_AGENT = 8
SETTLE_S = 2.0


class Commit(NamedTuple):
    """whole_ms: from the first report to the order. last_ms: from the last report to the order."""

    whole_ms: float
    last_ms: float
    cpu_ms: float


def cpu_ms(pid: int) -> float:
    """CPU time of all threads so far; finer than the ticks that `stat` counts."""
    spent = [int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(spent) / 1e6


class SavingCluster(Cluster):
    crowd_program = "checkpoint_agents.py"

    def save(self, step: int) -> Commit:
        before = cpu_ms(self.controller.pid)
        for crowd in self.crowds:
            self.command(crowd, f"save:{step}")
        self.job.wait_for(f"order to publish step {step}", lambda: bool(self.job.events("ordered", step=step)), ROUND_S)
        ordered = self.job.events("ordered", step=step)[0]["t"]
        first = self.job.events("saving", step=step)[0]["t"]
        last = self.job.events("saved", step=step)[-1]["t"]
        time.sleep(SETTLE_S)  # its own answers to all those reports are work of this save as well
        spent = cpu_ms(self.controller.pid) - before
        return Commit((ordered - first) * 1e3, (ordered - last) * 1e3, spent)


def measure(ranks: int, saves: int) -> list[Commit]:
    with Job() as job:
        cluster = SavingCluster(job, ranks, RANKS_PER_AGENT)
        cluster.wait_told("run", 0, JOIN_S)
        for crowd in cluster.crowds:
            cluster.command(crowd, "calm")
        time.sleep(SETTLE_S)  # what was said under the old interval
        found: list[Commit] = []
        for step in range(1, saves + 1):
            found.append(cluster.save(step))
            say(f"ranks={ranks}: ordered after {found[-1].whole_ms:.0f} ms, {found[-1].cpu_ms:.0f} ms of CPU")
        return found


def commit_rows(saves: int, ranks: int = RANKS) -> list[Row]:
    small, large = measure(SMALL, saves), measure(ranks, saves)
    case, name = f"ranks={ranks}", f"{SMALL} ranks"

    def row(metric: str, field: str) -> Row:
        ours, peer = ([getattr(commit, field) for commit in commits] for commits in (large, small))
        return Row(case, metric, "ms", ours, peer, name)

    return [
        row("commit: first report to publish order", "whole_ms"),
        row("commit: last report to publish order", "last_ms"),
        row("commit: controller CPU per save", "cpu_ms"),
    ]
