"""From a fault to the training function again: perdure and another system, in turns.

Each job of both sides runs the same worker (`peers/workload.py`) and is broken in the same way.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import systems
from harness import BenchmarkFailed, Row, argument_parser, in_turns, report, say
from systems import Recovery, Scenario, System

PEERS: dict[str, System] = {
    "nvrx": systems.nvrx,
    "torchrun": systems.torchrun,
    "ft_launcher": systems.ft_launcher,
    "torchft": systems.torchft,
}
FAULTS_IN_ONE_JOB = {"exception": 5, "hang": 3, "sigkill": 1}
"""Where a fault consumes a reserve there is one in a job."""

QUIET_WITHOUT_RESERVE_S = 5.0
"""Our fork server begins to import torch when the first round runs; a fault in the first seconds finds it unready."""

SOFT_TIMEOUT_MS = {"fast": 1_000.0, "default": 60_000.0}


failures: list[str] = []
"""Jobs that did not recover. They are reported, and the others go on."""


def scenario_of(peer: str, ranks: int, fault: str, profile: str) -> Scenario:
    faults = 1 if (fault == "hang" and profile == "default") or peer != "nvrx" else FAULTS_IN_ONE_JOB[fault]
    return Scenario(ranks, fault, faults, 1 if fault == "sigkill" else 0, profile)


def side(system: System, scenario: Scenario, name: str, into: list[Recovery]) -> Callable[[], None]:
    """One job of a system, whose recoveries go into a list."""
    case = f"{scenario.fault} ranks={scenario.ranks} {scenario.profile} {name}"

    def job() -> None:
        try:
            got = system(scenario)
        except BenchmarkFailed as failure:
            failures.append(f"{case}: {failure}")
            say(failures[-1])
            return
        into.extend(got)
        say(f"{case}: {', '.join(f'{recovery.enter_ms:.1f}' for recovery in got)} ms")

    return job


def measure(ours: System, peer: System, scenario: Scenario, jobs: int) -> tuple[list[Recovery], list[Recovery]]:
    """Both systems in turns, `jobs` jobs each."""
    found: tuple[list[Recovery], list[Recovery]] = ([], [])
    in_turns([side(ours, scenario, "perdure", found[0]), side(peer, scenario, "peer", found[1])], jobs)
    return found


def rows_of(case: str, peer_name: str, scenario: Scenario, ours: list[Recovery], theirs: list[Recovery]) -> list[Row]:
    enter = ([r.enter_ms for r in ours], [r.enter_ms for r in theirs])
    collective = ([r.collective_ms for r in ours], [r.collective_ms for r in theirs])
    rows = [Row(case, "restart", "ms", *enter, peer_name), Row(case, "first collective", "ms", *collective, peer_name)]
    if scenario.fault == "hang":
        limit = SOFT_TIMEOUT_MS[scenario.profile]
        after = [value - limit for value in enter[0]], [value - limit for value in enter[1]]
        rows.append(Row(case, "restart past the limit", "ms", *after, peer_name))
    return rows


def compare_nvrx(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for profile in options.profiles:
        for fault in options.faults:
            for ranks in options.ranks:
                scenario = scenario_of("nvrx", ranks, fault, profile)
                jobs = options.jobs if scenario.faults == 1 and fault != "hang" else 1
                ours, theirs = measure(systems.perdure, systems.nvrx, scenario, jobs)
                name = f"{systems.peer_name('nvrx')} {profile}"
                rows += rows_of(f"{fault} ranks={ranks}", name, scenario, ours, theirs)
    return rows


def compare_launcher(options: argparse.Namespace) -> list[Row]:
    """SIGKILL with one reserve on our side, and once more without: a new process takes the seat."""
    rows: list[Row] = []
    for ranks in options.ranks:
        scenario = scenario_of(options.peer, ranks, "sigkill", "default")
        bare = scenario._replace(reserves=0, quiet_s=QUIET_WITHOUT_RESERVE_S)
        ours, theirs = measure(systems.perdure, PEERS[options.peer], scenario, options.jobs)
        respawned: list[Recovery] = []
        in_turns([side(systems.perdure, bare, "perdure", respawned)], options.jobs)
        name = systems.peer_name(options.peer)
        rows += rows_of(f"sigkill ranks={ranks}", name, scenario, ours, theirs)
        rows += rows_of(f"sigkill ranks={ranks}, no reserve", name, scenario, respawned, theirs)
    return rows


def compare_torchft(options: argparse.Namespace) -> list[Row]:
    """Neither side replaces the dead rank: how soon have the survivors finished a collective without it?"""
    rows: list[Row] = []
    for profile in options.profiles:
        for ranks in options.ranks:
            scenario = scenario_of("torchft", ranks, "sigkill", profile)._replace(reserves=0)
            peer = partial(systems.torchft, python=options.torchft_python)
            ours, theirs = measure(partial(systems.perdure, respawn=False), peer, scenario, options.jobs)
            collective = [r.collective_ms for r in ours], [r.collective_ms for r in theirs]
            case = f"sigkill ranks={ranks}, survivors go on"
            rows.append(Row(case, "first collective", "ms", *collective, f"torchft {profile}"))
    return rows


def main() -> int:
    parser = argument_parser("From a fault to the training function again: perdure and another system, in turns.")
    parser.add_argument("--peer", choices=list(PEERS), default="nvrx")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS_IN_ONE_JOB), default=list(FAULTS_IN_ONE_JOB))
    parser.add_argument("--profiles", nargs="+", choices=["fast", "default"], default=["fast", "default"])
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each side, where a job has one fault")
    parser.add_argument("--torchft-python", default=sys.executable, help="interpreter that has torchft")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.faults, options.profiles, options.jobs = [2], ["exception", "sigkill"], ["fast"], 1
    compare = {"nvrx": compare_nvrx, "torchft": compare_torchft}.get(options.peer, compare_launcher)
    rows = compare(options)
    report("restart", rows, options.json, failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
