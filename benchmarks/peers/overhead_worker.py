"""What watching costs the training thread: perdure's calls and nvidia-resiliency-ext's in turns, in one process.

Every figure is the median of one block of measurements, in nanoseconds, less what reading the clock costs.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

import torch
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

import perdure

PAUSE_S = 0.0005
"""Between two calls, as in training: what a call touches has left the caches meanwhile."""

Action = Callable[[], None]
Figures = dict[str, dict[str, list[float]]]


def elapsed_ns(action: Action) -> int:
    start = perf_counter_ns()
    action()
    return perf_counter_ns() - start


def nothing() -> None:
    pass


def apart(actions: dict[str, Action], calls: int) -> dict[str, float]:
    """Median cost of each action, called in turns with a pause before each."""
    samples: dict[str, list[int]] = {name: [] for name in [*actions, ""]}
    for _ in range(calls):
        for name, action in [*actions.items(), ("", nothing)]:
            time.sleep(PAUSE_S)
            samples[name].append(elapsed_ns(action))
    clock = statistics.median(samples.pop(""))
    return {name: max(statistics.median(values) - clock, 1.0) for name, values in samples.items()}


def back_to_back(actions: dict[str, Action], calls: int) -> dict[str, float]:
    """Cost of each action in a loop of its own, less that of an empty loop."""

    def loop(action: Action) -> float:
        start = perf_counter_ns()
        for _ in range(calls):
            action()
        return (perf_counter_ns() - start) / calls

    empty = loop(nothing)
    return {name: max(loop(action) - empty, 1.0) for name, action in actions.items()}


def added_to_a_step(actions: dict[str, Callable[[Action], None]], steps: int) -> dict[str, float]:
    """Median of what each way of watching adds to the same bare step, the three in random order each time."""
    left, right = torch.rand(256, 256), torch.rand(256, 256)

    def step() -> None:
        for _ in range(16):
            torch.mm(left, right)

    ways: dict[str, Action] = {name: (lambda watch=watch: watch(step)) for name, watch in actions.items()}
    ways[""] = step
    dice = random.Random(0)
    samples: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(steps):
        for name in dice.sample(list(ways), len(ways)):
            samples[name].append(elapsed_ns(ways[name]))
    bare = samples.pop("")
    added = {
        name: statistics.median(watched - alone for watched, alone in zip(values, bare, strict=True))
        for name, values in samples.items()
    }
    return {**added, "bare": statistics.median(bare)}


def measure(round: perdure.Round, client: RankMonitorClient, blocks: int, calls: int) -> Figures:
    def our_ping() -> None:
        round.ping(1)

    def our_section() -> None:
        with round.section("step"):
            pass

    def our_watched_step(step: Action) -> None:
        with round.section("step"):
            step()
        round.ping(1)

    def their_section() -> None:
        client.start_section("step")
        client.end_section("step")

    def their_watched_step(step: Action) -> None:
        client.start_section("step")
        step()
        client.end_section("step")
        client.send_heartbeat()

    pings: dict[str, Action] = {"ours": our_ping, "peer": client.send_heartbeat}
    sections: dict[str, Action] = {"ours": our_section, "peer": their_section}
    measurements: dict[str, Callable[[], dict[str, float]]] = {
        "ping, 0.5 ms apart": lambda: apart(pings, calls),
        "section, 0.5 ms apart": lambda: apart(sections, calls),
        "ping, back to back": lambda: back_to_back(pings, calls),
        "section, back to back": lambda: back_to_back(sections, calls),
        "step": lambda: added_to_a_step({"ours": our_watched_step, "peer": their_watched_step}, calls // 4),
    }
    figures: Figures = {case: {} for case in measurements}
    for _ in range(blocks):
        for case, run in measurements.items():
            for side, value in run().items():
                figures[case].setdefault(side, []).append(value)
    return figures


@perdure.resilient
def train(round: perdure.Round, options: argparse.Namespace) -> None:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    options.out.write_text(json.dumps(measure(round, client, options.blocks, options.calls)))
    client.shutdown_workload_monitoring()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True, help="of each action in a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
