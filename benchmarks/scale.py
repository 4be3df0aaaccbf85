"""One controller and the agents of thousands of ranks, on loopback: from a fault until the last agent has the new plan.

The controller is the real one, with encryption; the agents are real on the wire and have no ranks behind them. They
share this machine's cores, so a controller on a machine of its own is faster.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness import PEERS, PERDURE, Job, Row, argument_parser, digits, report, say

AGENTS_PER_PROCESS = 320
BEAT_INTERVAL_S = 1.0
STEADY_S = 5.0
JOIN_S = 180.0
ROUND_S = 60.0
SMALL = 1_024
"""Ranks of the size that growth is measured from."""


class Usage(NamedTuple):
    """Of a process: CPU seconds so far, and resident MiB."""

    cpu_s: float
    resident_mib: float


class Figures(NamedTuple):
    recovery_ms: list[float]
    abort_ms: list[float]
    cpu_per_round_ms: float
    steady_cpu_percent: float
    resident_mib: float
    join_s: float


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


class Cluster:
    """A controller and its crowd of agents, inside one job."""

    crowd_program = "scale_agents.py"

    def __init__(self, job: Job, ranks: int, ranks_per_agent: int) -> None:
        self.job = job
        self.agents = ranks // ranks_per_agent
        self.run_dir = job.folder / "run"
        where = [f"--run-dir={self.run_dir}", f"--agents={self.agents}", "--host=127.0.0.1"]
        self.controller = job.start([*PERDURE, "controller", *where])
        job.essential = job.processes  # all of them, as they come
        job.wait_for("controller", (self.run_dir / "endpoint.json").exists, 30.0)
        self.started = time.monotonic()
        self.crowds = [self.start_crowd(first, ranks_per_agent) for first in range(0, self.agents, AGENTS_PER_PROCESS)]

    def start_crowd(self, first: int, ranks_per_agent: int) -> subprocess.Popen[bytes]:
        count = min(AGENTS_PER_PROCESS, self.agents - first)
        command = [sys.executable, str(PEERS / self.crowd_program), f"--events={self.job.events_file}"]
        command += [f"--run-dir={self.run_dir}", f"--first={first}", f"--agents={count}", f"--expected={self.agents}"]
        command += [f"--ranks-per-agent={ranks_per_agent}", f"--beat-interval={BEAT_INTERVAL_S}"]
        return self.job.start(command, commands=True)

    def told(self, phase: str, round: int) -> float | None:
        """When the last agent got this order; None if some have not."""
        events = self.job.events("told", phase=phase, round=round)
        if sum(event["agents"] for event in events) < self.agents:
            return None
        return max(event["t"] for event in events)

    def wait_told(self, phase: str, round: int, timeout_s: float) -> float:
        self.job.wait_for(f"{phase} of round {round}", lambda: self.told(phase, round) is not None, timeout_s)
        told = self.told(phase, round)
        assert told is not None
        return told

    def command(self, crowd: subprocess.Popen[bytes], word: str) -> None:
        assert crowd.stdin is not None
        crowd.stdin.write(word.encode() + b"\n")
        crowd.stdin.flush()

    def break_round(self, round: int) -> tuple[float, float]:
        """One fault; milliseconds until the last agent was told to abort, and until it was told the new plan."""
        self.command(self.crowds[0], "fault")
        planned = self.wait_told("run", round + 1, ROUND_S)
        aborted = self.wait_told("abort", round, ROUND_S)
        fault = self.job.events("fault", round=round)[0]["t"]
        return (aborted - fault) * 1e3, (planned - fault) * 1e3


def measure(ranks: int, ranks_per_agent: int, rounds: int) -> Figures:
    with Job() as job:
        cluster = Cluster(job, ranks, ranks_per_agent)
        joined = cluster.wait_told("run", 0, JOIN_S) - cluster.started
        say(f"ranks={ranks}: {cluster.agents} agents joined in {joined:.1f} s")
        time.sleep(2.0)  # the first round's answers are still being taken in
        before = usage(cluster.controller.pid)
        time.sleep(STEADY_S)
        steady = (usage(cluster.controller.pid).cpu_s - before.cpu_s) / STEADY_S

        for crowd in cluster.crowds:
            cluster.command(crowd, "calm")
        time.sleep(2 * BEAT_INTERVAL_S)  # what was said under the old interval
        found: list[tuple[float, float]] = []
        before = usage(cluster.controller.pid)
        for round in range(rounds):
            found.append(cluster.break_round(round))
            say(f"ranks={ranks}: abort {found[-1][0]:.0f} ms, new plan {found[-1][1]:.0f} ms")
            time.sleep(1.0)
        after = usage(cluster.controller.pid)
        return Figures(
            recovery_ms=[planned for _, planned in found],
            abort_ms=[aborted for aborted, _ in found],
            cpu_per_round_ms=(after.cpu_s - before.cpu_s) / rounds * 1e3,
            steady_cpu_percent=100 * steady,
            resident_mib=after.resident_mib,
            join_s=joined,
        )


def rows_of(ranks: int, large: Figures, small: Figures) -> list[Row]:
    case, name = f"ranks={ranks}", f"{SMALL} ranks"
    return [
        Row(case, "fault to last agent told the plan", "ms", large.recovery_ms, small.recovery_ms, name),
        Row(case, "fault to last agent told to abort", "ms", large.abort_ms, small.abort_ms, name),
        Row(case, "controller CPU per round", "ms", [large.cpu_per_round_ms], [small.cpu_per_round_ms], name),
        Row(
            case, "controller CPU at 1 Hz", "% of a core", [large.steady_cpu_percent], [small.steady_cpu_percent], name
        ),
        Row(case, "controller memory", "MiB", [large.resident_mib], [small.resident_mib], name),
        Row(case, "all agents joined", "s", [large.join_s], [small.join_s], name),
    ]


def main() -> int:
    parser = argument_parser(__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=10_240)
    parser.add_argument("--ranks-per-agent", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="faults, one after the other")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    small = measure(SMALL, options.ranks_per_agent, rounds)
    large = measure(options.ranks, options.ranks_per_agent, rounds)
    growth = digits(statistics.median(large.recovery_ms) / statistics.median(small.recovery_ms))
    rows = rows_of(options.ranks, large, small)
    report("scale", rows, options.json, growth_of_ranks=options.ranks / SMALL, growth_of_recovery=growth)
    return 0


if __name__ == "__main__":
    sys.exit(main())
