"""How ranks, places and faults are said: in one line, however many there are."""

from typing import Any

import pytest

from perdure.controller.core import wording
from perdure.controller.core.roster import AgentRecord, SlotRecord
from perdure.controller.core.rounds import Round, Times
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import PROTOCOL_VERSION, Hello, SlotState, Stage
from perdure.protocol.names import AgentName, ProcessId, Slot, slot_name


def agent(name: str, slots: int) -> list[SlotRecord]:
    hello = Hello(PROTOCOL_VERSION, AgentName(name), name, name, "127.0.0.1", 0, 0, ProcessId("boot", 1, 1), 0, ())
    record = AgentRecord(hello)
    return [
        SlotRecord(record, SlotState(slot_name(AgentName(name), index), index, 1, Stage.GATE)) for index in range(slots)
    ]


def seated(*records: SlotRecord, lives: int = 1) -> Round:
    seats = dict(enumerate(records))
    return Round(0, seats, dict.fromkeys(seats, lives), Times(0.0))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([3], "rank 3"),
        ([2, 0, 1, 7], "ranks 0-2, 7"),
        (range(1000), "ranks 0-999"),
        (range(0, 1000, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and 484 more"),
    ],
)
def test_ranks_are_ranges_and_what_is_left_out_is_counted_in_ranks(numbers: Any, said: str) -> None:
    assert wording.ranks(numbers) == said


def test_a_reserve_takes_a_dead_seat() -> None:
    n0, n1 = agent("n0", 2), agent("n1", 1)
    assert wording.moves(seated(*n0), seated(n0[0], n1[0])) == "n1/0 takes rank 1"


def test_a_node_takes_the_seats_of_a_node_in_one_phrase() -> None:
    n0, n1, n2 = agent("n0", 8), agent("n1", 8), agent("n2", 8)
    assert wording.moves(seated(*n0, *n1), seated(*n0, *n2)) == "n2/0-7 take ranks 8-15"


def test_a_new_process_in_the_same_slot_is_respawned() -> None:
    n0 = agent("n0", 2)
    assert wording.moves(seated(*n0), seated(*n0, lives=2)) == "n0/0-1 (respawned) take ranks 0-1"


def test_a_survivor_that_moves_is_told_with_its_former_rank() -> None:
    n0, n1 = agent("n0", 2), agent("n1", 2)
    assert wording.moves(seated(*n0, *n1), seated(*n1)) == "n1/0-1 (were ranks 2-3) take ranks 0-1"
    assert wording.moves(seated(*n0, n1[0]), seated(n1[0], n0[1])) == "n1/0 (was rank 2) takes rank 0"


def test_nothing_is_said_of_those_who_stay() -> None:
    n0 = agent("n0", 4)
    assert wording.moves(seated(*n0), seated(*n0)) == ""
    assert wording.moves(seated(*n0), seated(*n0[:3])) == ""


def test_seats_are_told_by_agent() -> None:
    n0, n1 = agent("n0", 2), agent("n1", 2)
    assert wording.seating(seated(*n0, n1[1])) == "ranks 0-1: n0/0-1, rank 2: n1/1"


def test_the_killed_are_told_by_the_knob_that_ended_them() -> None:
    late = {
        3: "not out within 120 s (barrier_timeout)",
        5: "not out within 120 s (barrier_timeout)",
        0: "why",
    }
    assert wording.given_up(late) == "rank 0 (why), ranks 3, 5 (barrier_timeout)"


def test_of_a_message_the_first_line_is_told_and_the_second_time_it_is_short() -> None:
    message = f"RuntimeError: {'x' * 400}\nsecond line"
    fault = Fault(Slot("n0/1"), 1, 0, FaultKind.EXCEPTION, message, place="/home/me/train.py:7", step=3)
    assert wording.what(fault) == f"RuntimeError: {'x' * 400} at /home/me/train.py:7, step 3"
    short = wording.describe(fault, 1, short=True)
    assert short.startswith("rank 1 (n0/1): RuntimeError: xxx")
    assert short.endswith("x... at train.py:7, step 3")
    assert len(short) < 220
