"""What one restart round costs the controller in CPU: the pure core alone, as decided in one process.

Counted are the calls of `Job.on`: a fault is reported, every agent reports that its ranks have left the function, the
next round is planned, and all its directives are there. Messages are made before; nothing is sent, written or encoded.
"""

import gc
import sys
import time
from typing import Any

from crowd import Crowd
from harness import Row, argument_parser, report, say

LIMIT_MS = 50.0


def main() -> int:
    parser = argument_parser("CPU time in which the controller's core decides one restart round.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1_024, 10_240])
    parser.add_argument("--ranks-per-agent", type=int, default=8)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    rows: list[Row] = []
    for ranks in options.ranks:
        rows += measure(ranks, options.ranks_per_agent, 5 if options.quick else options.runs)
    report("core", rows, options.json)
    return 0


def measure(ranks: int, per_agent: int, runs: int) -> list[Row]:
    say(f"{ranks} ranks")
    crowd = Crowd(ranks // per_agent, per_agent)
    costs: dict[str, list[float]] = {"exception": [], "node lost": []}
    crowd.form()
    gc.collect()
    for number in range(runs):
        costs["exception"].append(1e3 * spent(crowd, crowd.fault(number)) + 1e3 * spent(crowd, crowd.settle()))
        assert crowd.decided(number + 1), "the round was not decided"
        crowd.take(crowd.enter())
    costs["node lost"].append(1e3 * spent(crowd, crowd.lose_node()) + 1e3 * spent(crowd, crowd.settle()))
    assert crowd.decided(runs + 1), "the round was not decided"
    name = f"limit {LIMIT_MS:g} ms"
    return [
        Row(f"{case} ranks={ranks}", "CPU of one round", "ms", found, [LIMIT_MS], name) for case, found in costs.items()
    ]


def spent(crowd: Crowd, events: list[Any]) -> float:
    """Seconds of CPU for these events."""
    began = time.process_time()
    crowd.take(events)
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
