"""Placement for every dead set of a small job, and for thousands of random larger ones."""

import itertools
from random import Random

import pytest

from perdure.controller.core.placement import Candidate, CannotPlace, place, world_size

SEED = 20_261_130


def job(nodes: int, per_node: int, groups: int = 0) -> list[Candidate[str]]:
    """Candidates in their initial order; `groups`: nodes of one group."""
    return [
        Candidate(f"n{node}/{index}", f"n{node}", f"g{node // groups}" if groups else "", index, node)
        for node in range(nodes)
        for index in range(per_node)
    ]


def first_seats(slots: list[Candidate[str]], size: int) -> dict[int, Candidate[str]]:
    by_name = {candidate.slot: candidate for candidate in slots}
    return {rank: by_name[slot] for rank, slot in place(slots, {}, size).items()}


def check(slots: list[Candidate[str]], dead: set[str], before: dict[int, Candidate[str]], size: int) -> None:
    """Every property that a plan must have."""
    alive = [candidate for candidate in slots if candidate.slot not in dead]
    by_name = {candidate.slot: candidate for candidate in slots}
    seats = place(alive, before, size)
    assert sorted(seats) == list(range(size)), "ranks are 0..n-1"
    assert len(set(seats.values())) == size, "nobody sits twice"
    assert not set(seats.values()) & dead, "the dead do not run"
    for rank, candidate in before.items():
        if candidate.slot not in dead and rank < size:
            assert seats[rank] == candidate.slot, "a survivor keeps its rank"
    movers = {c.slot for rank, c in before.items() if rank >= size and c.slot not in dead}
    holes = [rank for rank in range(size) if rank not in before or before[rank].slot in dead]
    moved = movers & set(seats.values())
    assert len(moved) == min(len(movers), len(holes)), "movers go in before reserves"
    check_nearness(by_name, before, seats, holes, alive)


def check_nearness(
    by_name: dict[str, Candidate[str]],
    before: dict[int, Candidate[str]],
    seats: dict[int, str],
    holes: list[int],
    alive: list[Candidate[str]],
) -> None:
    """A hole filled from afar while somebody nearer is left over, or fills another node's hole, is a mistake."""
    seated = set(seats.values())
    idle = [c for c in alive if c.slot not in seated]
    was_active = {c.slot for c in before.values()}
    idle_reserves = [c for c in idle if c.slot not in was_active]
    for rank in holes:
        if rank not in before:
            continue
        last, now = before[rank], by_name[seats[rank]]
        if now.slot in was_active:
            continue  # a mover has to go somewhere; it is placed before any reserve
        if now.node != last.node:
            assert not [c for c in idle_reserves if c.node == last.node], "same node first"
        if last.group and now.group != last.group:
            assert not [c for c in idle_reserves if c.group == last.group], "then the same group"


LAYOUTS = [(1, 8, 0), (2, 4, 0), (4, 2, 0), (8, 1, 0), (4, 2, 2), (8, 1, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("target", [None, 4, 6, 7])
@pytest.mark.parametrize("multiple", [1, 2])
def test_every_dead_set_of_eight(layout: tuple[int, int, int], target: int | None, multiple: int) -> None:
    slots = job(*layout)
    before = first_seats(slots, world_size(8, target, 1, multiple))
    sets = 0
    for count in range(1, 9):
        for dead in itertools.combinations([c.slot for c in slots], count):
            sets += 1
            left = 8 - count
            if left < multiple:
                with pytest.raises(CannotPlace):
                    world_size(left, target, 1, multiple)
                continue
            check(slots, set(dead), before, world_size(left, target, 1, multiple))
    assert sets == 255


def test_ten_thousand_random_dead_sets_of_larger_jobs() -> None:
    chance = Random(SEED)
    for number in range(10_000):
        nodes, per_node = chance.randint(2, 10), chance.randint(1, 8)
        slots = job(nodes, per_node, chance.choice((0, 2, 3)))
        total = len(slots)
        multiple = chance.choice((1, 1, 1, per_node))
        target = chance.choice((None, max(multiple, (total * 3 // 4) // multiple * multiple)))
        before = first_seats(slots, world_size(total, target, 1, multiple))
        dead = set(chance.sample([c.slot for c in slots], chance.randint(1, total)))
        if total - len(dead) < multiple:
            continue
        try:
            check(slots, dead, before, world_size(total - len(dead), target, 1, multiple))
        except AssertionError as error:
            raise AssertionError(f"set {number} of seed {SEED}: {nodes}x{per_node}, dead {sorted(dead)}") from error


@pytest.mark.parametrize("available", range(17))
@pytest.mark.parametrize("target", [None, 4, 8, 12])
@pytest.mark.parametrize("minimum", [1, 3, 8])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_the_world_is_the_largest_that_is_allowed(
    available: int, target: int | None, minimum: int, multiple: int
) -> None:
    allowed = [
        size
        for size in range(1, available + 1)
        if size % multiple == 0 and size >= minimum and (target is None or size <= target)
    ]
    if allowed:
        assert world_size(available, target, minimum, multiple) == max(allowed)
    else:
        with pytest.raises(CannotPlace, match=f"{available} healthy"):
            world_size(available, target, minimum, multiple)


def test_the_spare_of_the_same_node_takes_the_dead_rank() -> None:
    slots = job(2, 4)
    before = {rank: slots[at] for rank, at in enumerate((0, 1, 2, 4, 5, 6))}  # the last slot of each node is a reserve
    seats = place([c for c in slots if c.slot != "n1/1"], before, 6)
    assert seats[4] == "n1/3"
    seats = place([c for c in slots if c.slot != "n0/2"], before, 6)
    assert seats[2] == "n0/3"


def test_without_a_spare_on_the_node_the_group_comes_first() -> None:
    slots = job(4, 2, groups=2)
    before = {rank: slots[at] for rank, at in enumerate((0, 1, 4, 5))}  # n1 is a spare node of g0, n3 one of g1
    seats = place([c for c in slots if c.node != "n2"], before, 4)
    assert [seats[2], seats[3]] == ["n3/0", "n3/1"]
    seats = place([c for c in slots if c.node != "n0"], before, 4)
    assert [seats[0], seats[1]] == ["n1/0", "n1/1"]


def test_a_shrunk_world_moves_the_highest_ranks_into_the_holes() -> None:
    slots = job(4, 1)
    before = dict(enumerate(slots))
    assert place([c for c in slots if c.slot != "n1/0"], before, 3) == {0: "n0/0", 1: "n3/0", 2: "n2/0"}


def test_the_first_plan_follows_the_initial_order() -> None:
    slots = job(3, 2)
    assert place(list(reversed(slots)), {}, 4) == {0: "n0/0", 1: "n0/1", 2: "n1/0", 3: "n1/1"}
