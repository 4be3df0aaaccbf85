"""Who runs next, as which rank. A pure function of what is left.

Rules, in order:
1. Ranks are always 0..n-1, and n is the largest world that the settings allow.
2. A survivor keeps its rank. If the world shrank below it, it moves into a hole, highest ranks first.
3. Other holes are filled from reserves: same node first, then same group of nodes, then by the initial order; among
   equals the same local index first, so that a node's ranks keep their pattern.
4. Whoever is left over is a warm reserve.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

SlotT = TypeVar("SlotT", bound=Hashable)


class Candidate(msgspec.Struct, Generic[SlotT], frozen=True, gc=False):
    """A process that can run. `order` is its place in the initial rank order."""

    slot: SlotT
    node: str
    group: str
    index: int
    order: int


@dataclass(frozen=True, slots=True)
class Hole:
    """A rank without a process, and where its last process was (empty for a new rank)."""

    rank: int
    node: str
    group: str
    index: int


class CannotPlace(Exception):
    """Too few candidates; the text says how many, of what, and which knob asks for more."""


def world_size(available: int, target: int | None, minimum: int, multiple: int) -> int:
    """The largest allowed world for `available` processes.

    Raises:
        CannotPlace: if not even the smallest allowed world can be had.
    """
    size = available if target is None else min(available, target)
    size -= size % multiple
    if size < max(minimum, 1):
        need = max(minimum, multiple, 1)
        raise CannotPlace(
            f"{available} healthy rank{'s are' if available != 1 else ' is'} left, at least {need} needed "
            f"(min_world_size={minimum}, world_size_multiple_of={multiple})"
        )
    return size


def place(
    candidates: Sequence[Candidate[SlotT]],
    previous: Mapping[int, Candidate[SlotT]],
    size: int,
) -> dict[int, SlotT]:
    """Seat `size` of the candidates. `previous` is the last round's seating, dead slots included.

    Returns rank -> slot for ranks 0..size-1.
    """
    alive = {candidate.slot: candidate for candidate in candidates}
    seats: dict[int, SlotT] = {}
    movers: list[Candidate[SlotT]] = []
    for rank, candidate in sorted(previous.items()):
        if candidate.slot not in alive:
            continue
        if rank < size:
            seats[rank] = candidate.slot
        else:
            movers.append(alive[candidate.slot])
    holes = [_hole(rank, previous.get(rank)) for rank in range(size) if rank not in seats]
    movers = movers[::-1][: len(holes)]
    seated = set(seats.values()) | {mover.slot for mover in movers}
    was_active = {candidate.slot for candidate in previous.values()}
    reserves = sorted(
        (c for c in candidates if c.slot not in seated and c.slot not in was_active), key=lambda c: (c.order, c.index)
    )
    if previous:
        chosen = _choose(holes, movers, reserves)
    else:
        chosen = {hole.rank: reserve for hole, reserve in zip(holes, reserves, strict=False)}
    seats.update({rank: candidate.slot for rank, candidate in chosen.items()})
    return seats


def _hole(rank: int, last: Candidate[SlotT] | None) -> Hole:
    if last is None:
        return Hole(rank, "", "", -1)
    return Hole(rank, last.node, last.group, last.index)


def _choose(
    holes: Iterable[Hole], movers: Sequence[Candidate[SlotT]], reserves: Sequence[Candidate[SlotT]]
) -> dict[int, Candidate[SlotT]]:
    """Fill each hole: every mover gets one, and the reserves the rest; nearness decides who gets which."""
    chosen: dict[int, Candidate[SlotT]] = {}
    open_holes = list(holes)
    need = len(open_holes) - len(movers)
    pool = _Pool(movers, reserves, need)
    for near in (_same_place, _same_node, _same_group, _anywhere):
        rest: list[Hole] = []
        for hole in open_holes:
            candidate = pool.take(near, hole)
            if candidate is None:
                rest.append(hole)
            else:
                chosen[hole.rank] = candidate
        open_holes = rest
    return chosen


def _same_place(node: str, group: str, index: int) -> Hashable:
    return ("place", node, index)


def _same_node(node: str, group: str, index: int) -> Hashable:
    return ("node", node)


def _same_group(node: str, group: str, index: int) -> Hashable:
    return ("group", group) if group else None


def _anywhere(node: str, group: str, index: int) -> Hashable:
    return "anywhere"


class _Pool(Generic[SlotT]):
    """Candidates found by nearness in constant time.

    At most `reserve_limit` reserves are given out, so that no mover goes short.
    """

    def __init__(
        self, movers: Sequence[Candidate[SlotT]], reserves: Sequence[Candidate[SlotT]], reserve_limit: int
    ) -> None:
        self._by_key: dict[Hashable, list[Candidate[SlotT]]] = defaultdict(list)
        self._reserves = {candidate.slot for candidate in reserves}
        self._left = reserve_limit
        self._taken: set[SlotT] = set()
        for candidate in reversed([*movers, *reserves]):
            for near in (_same_place, _same_node, _same_group, _anywhere):
                key = near(candidate.node, candidate.group, candidate.index)
                self._by_key[key].append(candidate)

    def take(self, near: object, hole: Hole) -> Candidate[SlotT] | None:
        assert callable(near)
        key = near(hole.node, hole.group, hole.index)
        stack = self._by_key.get(key) if key is not None else None
        skipped: list[Candidate[SlotT]] = []
        found = None
        while stack:
            candidate = stack.pop()
            if candidate.slot in self._taken:
                continue
            if candidate.slot in self._reserves and self._left <= 0:
                skipped.append(candidate)
                continue
            found = candidate
            break
        if stack is not None:
            stack.extend(reversed(skipped))
        if found is not None:
            self._taken.add(found.slot)
            self._left -= found.slot in self._reserves
        return found
