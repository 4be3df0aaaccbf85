"""Checkpoints of a running training loop: perdure, torch and nvidia-resiliency-ext, and what the machine could do.

Each peer is compared in a block of its own: fresh jobs of both sides, whose saves alternate - ours, peer, peer, ours -
with the limits measured before each pair. Files go below TMPDIR; what was written is read back from the page cache.
- stall: what the training thread waits in the call; also as a multiple of one copy of the same bytes, measured beside.
- lost: the stall, and what the loop loses until the save is done, against steps timed just before and after it.
- durable: from the call until everything is synced. For a peer that does not sync, the time of an fsync of its files
  is added. Done is asked for once a step, so all methods are seen up to one step late.
- restore: the state back in tensors that exist, every element compared: a tensor is torn if it has what the loop wrote
  after the call. A method that tears says so in its name, and is not among the best.
- commit: what a save of 10,240 simulated ranks costs the controller; the other side is the same with fewer ranks.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from checkpoint_commit import commit_rows
from checkpoint_methods import LIMITS, METHODS, OURS, Case, Crew, Limits, Turn
from harness import BenchmarkFailed, Row, argument_parser, digits, middle, report, say

PARTS = ("stall", "lost", "durable", "restore")
COMMIT = "commit"
LIMIT_OF = {"stall": "copy", "durable": "disk", "restore": "read"}
QUICK = {
    "ranks": [1],
    "size_mb": [64],
    "saves": 2,
    "methods": ["torch_save", "dcp_save", "dcp_async_thread"],
    "parts": list(PARTS),
}


class Pair(NamedTuple):
    """The limits and both sides' saves of one repetition. Without ours where it could not be measured."""

    limits: Limits
    ours: Turn | None
    peer: Turn


class Block(NamedTuple):
    """All repetitions of one peer; the first save of a job is not among them."""

    method: str
    first: Pair
    pairs: list[Pair]

    @property
    def torn(self) -> int:
        return max(pair.peer.torn for pair in [self.first, *self.pairs])

    @property
    def ours_torn(self) -> int:
        return max((pair.ours.torn for pair in [self.first, *self.pairs] if pair.ours), default=0)

    @property
    def name(self) -> str:
        return f"{self.method} torn={self.torn}" if self.torn else self.method


failures: list[str] = []
"""Methods that failed or hung. They are reported, and the others go on."""


def try_to(what: str, action: Callable[[], Any]) -> Any:
    """The result of `action`; None if the benchmark cannot have it."""
    try:
        return action()
    except BenchmarkFailed as failure:
        failures.append(f"{what}: {failure}")
        say(failures[-1])
        return None


# ---- measuring ------------------------------------------------------------------------------------------------


class Comparison:
    """One case: a crew that measures the limits, and our side and a peer in turns, peer by peer."""

    def __init__(self, case: Case, saves: int) -> None:
        self.case, self.saves = case, saves
        self.ours_works = True
        self.blocks: list[Block] = []
        self.prepared: dict[str, list[float]] = {}
        self.nbytes = 0

    def run(self, methods: Sequence[str]) -> None:
        with Crew(LIMITS, self.case) as limits:
            self.nbytes = limits.nbytes
            for method in methods:
                block = try_to(f"{self.case} {method}", partial(self.block, limits, method))
                if block is not None:
                    self.blocks.append(block)
                    say(f"{self.case} {block.name}: {summary(block)}")

    def block(self, limits: Crew, method: str) -> Block:
        pairs: list[Pair] = []
        with ExitStack() as stack:
            ours = self.our_crew(stack)
            peer = self.enter(stack, method)
            for save in range(1, self.saves + 2):
                measured = limits.limits()
                first = peer.turn(save) if save % 2 == 0 else None
                turn = try_to(f"{self.case} {OURS}", partial(ours.turn, save)) if ours else None
                ours = ours if turn else None
                pairs.append(Pair(measured, turn, first or peer.turn(save)))
        return Block(method, pairs[0], pairs[1:])

    def our_crew(self, stack: ExitStack) -> Crew | None:
        """If it cannot start once, it is not tried again: that is said once."""
        if not self.ours_works:
            return None
        crew = try_to(f"{self.case} {OURS}", partial(self.enter, stack, self.case.ours))
        self.ours_works = crew is not None
        return crew

    def enter(self, stack: ExitStack, method: str) -> Crew:
        crew = stack.enter_context(Crew(method, self.case))
        self.prepared.setdefault(OURS if method == self.case.ours else method, []).append(crew.prepared_s)
        return crew


def summary(block: Block) -> str:
    """For the person who waits."""
    sides = {"peer": [pair.peer for pair in block.pairs], OURS: [pair.ours for pair in block.pairs if pair.ours]}
    return "; ".join(
        f"{side} " + ", ".join(f"{part} {middle([getattr(turn, part) for turn in turns])} s" for part in PARTS)
        for side, turns in sides.items()
        if turns
    )


# ---- rows -----------------------------------------------------------------------------------------------------


def ours_of(pairs: Sequence[Pair], part: str) -> list[float]:
    return [getattr(pair.ours, part) for pair in pairs if pair.ours is not None]


def peer_of(pairs: Sequence[Pair], part: str) -> list[float]:
    return [getattr(pair.peer, part) for pair in pairs]


def rows_of_block(case: str, block: Block, part: str) -> list[Row]:
    """One peer against ours: the seconds, and what multiple of the machine's limit they are."""
    first, pairs = [block.first], block.pairs
    rows = [Row(case, part, "s", ours_of(pairs, part), peer_of(pairs, part), block.name)]
    limit = LIMIT_OF.get(part)
    if limit is not None:
        ours = [getattr(pair.ours, part) / getattr(pair.limits, limit) for pair in pairs if pair.ours is not None]
        peer = [getattr(pair.peer, part) / getattr(pair.limits, limit) for pair in pairs]
        unit = {"copy": "copies", "disk": "writes", "read": "reads"}[limit]
        rows.append(Row(case, f"{part} as a multiple", unit, ours, peer, block.name))
    if part == "stall":
        rows.append(Row(case, "stall of the first save", "s", ours_of(first, part), peer_of(first, part), block.name))
    return rows


def row_of_limit(case: str, blocks: Sequence[Block], part: str) -> list[Row]:
    """Ours against the machine itself, over all blocks."""
    limit = LIMIT_OF.get(part)
    if limit is None:
        return []
    pairs = [pair for block in blocks for pair in block.pairs]
    return [Row(case, part, "s", ours_of(pairs, part), [getattr(pair.limits, limit) for pair in pairs], limit)]


def row_of_best(case: str, blocks: Sequence[Block], part: str) -> list[Row]:
    """The peer that does not tear and is best next to ours; each in its own block, as the machine drifts."""
    whole = [block for block in blocks if not block.torn]
    if not whole:
        return []

    def against_ours(block: Block) -> float:
        theirs = statistics.median(peer_of(block.pairs, part))
        ours = ours_of(block.pairs, part)
        return theirs / max(statistics.median(ours), 1e-3) if ours else theirs

    best = min(whole, key=against_ours)
    return [Row(case, part, "s", ours_of(best.pairs, part), peer_of(best.pairs, part), f"best: {best.name}")]


def rows_of(comparison: Comparison, parts: Sequence[str]) -> list[Row]:
    blocks = comparison.blocks
    torn = max((block.ours_torn for block in blocks), default=0)
    case = f"{comparison.case} torn={torn}" if torn else str(comparison.case)
    rows: list[Row] = []
    for part in parts:
        rows += row_of_limit(case, blocks, part)
        rows += row_of_best(case, blocks, part)
        for block in blocks:
            rows += rows_of_block(case, block, part)
    return rows


# ---- details --------------------------------------------------------------------------------------------------


def details_of(comparison: Comparison) -> list[dict[str, Any]]:
    """What explains the rows: how slow the loop was meanwhile, what was left to sync, what set-up took."""
    sides = {block.method: [pair.peer for pair in block.pairs] for block in comparison.blocks}
    ours = [pair.ours for block in comparison.blocks for pair in block.pairs if pair.ours is not None]
    return [
        {
            "case": str(comparison.case),
            "method": method,
            "bytes": comparison.nbytes,
            "tensors": turns[0].tensors,
            "torn": max(turn.torn for turn in turns),
            "base_step_s": middle([turn.base for turn in turns]),
            "slowdown_in_flight": middle([turn.flight / turn.steps / turn.base for turn in turns if turn.steps]),
            "left_to_sync_s": middle([turn.left for turn in turns]),
            "prepare_s": [digits(value) for value in comparison.prepared.get(method, [])],
        }
        for method, turns in [*sides.items(), (OURS, ours)]
        if turns
    ]


def main() -> int:
    parser = argument_parser(__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--size-mb", type=int, nargs="+", default=[256, 1024], help="MiB of state over all ranks")
    parser.add_argument("--saves", type=int, default=5, help="of each side and peer, after the first")
    parser.add_argument("--tier", choices=("durable", "local"), default="durable", help="which of ours is compared")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, COMMIT], default=[*PARTS, COMMIT])
    options = parser.parse_args()
    if options.quick:
        options = argparse.Namespace(**{**vars(options), **QUICK})
    parts = [part for part in PARTS if part in options.parts]
    cases = [Case(ranks, size, options.tier) for size in options.size_mb for ranks in options.ranks] if parts else []
    comparisons = [Comparison(case, options.saves) for case in cases]
    commits: list[Row] = []
    try:
        if COMMIT in options.parts:
            commits = try_to(COMMIT, partial(commit_rows, options.saves)) or []
        for comparison in comparisons:
            try_to(str(comparison.case), partial(comparison.run, options.methods))
    except KeyboardInterrupt:
        failures.append("interrupted: the rows are of what was finished")
    rows = [row for comparison in comparisons for row in rows_of(comparison, parts)] + commits
    details = [detail for comparison in comparisons for detail in details_of(comparison)]
    report("checkpoint", rows, options.json, failures=failures, details=details)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
