"""An orderly end: one step after which all ranks leave, and every way in which it becomes a plain end."""

from itertools import permutations

import msgspec
import pytest

from perdure.controller.core.events import Opened, StopAsked
from perdure.controller.core.job import Job
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.faults import FaultKind
from perdure.protocol.messages import Phase, Stage

from .desk import RANK, Desk

SETTINGS = msgspec.structs.replace(RANK, termination_grace_time=5.0)


def held(*passed: int, spares: int = 0) -> Desk:
    """A job of one slot a node that was asked to stop; the first ranks have answered."""
    size = 3
    active = size if spares else None
    desk = Desk((1,) * (size + spares), msgspec.structs.replace(SETTINGS, active_world_size=active)).form()
    desk.stop()
    for rank, step in enumerate(passed):
        desk.passed(desk.seats[rank], step)
    return desk


def leave(desk: Desk) -> None:
    """All ranks return and go on to the trainer's own code."""
    desk.returns(*desk.seats)
    for slot in desk.states:
        desk.report(slot, stage=Stage.OUTSIDE, functions=1)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_answers_in_any_order_give_the_step_after_the_furthest(order: tuple[int, ...]) -> None:
    desk = held()
    assert all(desk.order(agent).hold for agent in desk.nodes)
    for rank in order:
        assert desk.told("stop_step") == []
        assert desk.order("n0").stop_step == -1
        desk.passed(desk.seats[rank], (7, 9, 8)[rank])
    assert [desk.order(agent).stop_step for agent in desk.nodes] == [10, 10, 10]
    assert desk.phase is JobPhase.RUNNING


def test_ranks_that_have_passed_no_step_leave_after_their_first() -> None:
    assert held(-1, -1, -1).order("n0").stop_step == 0


def test_the_job_ends_with_the_stops_code_when_everybody_is_gone() -> None:
    desk = held(3, 4, 4)
    leave(desk)
    assert desk.phase is JobPhase.RELEASED
    for slot in desk.states:
        desk.gone(slot, 0)
    assert desk.ending == (143, "SIGTERM")
    assert desk.finished is not None
    assert desk.finished.code == 143


def test_a_trainer_that_wants_to_be_queued_again_has_the_last_word() -> None:
    desk = held(3, 4, 4)
    leave(desk)
    for slot in desk.states:
        desk.gone(slot, 75)
    assert desk.ending == (75, "SIGTERM; a process exited with code 75 afterwards")


def test_a_trainer_that_fails_afterwards_does_not_change_the_code() -> None:
    desk = held(3, 4, 4)
    leave(desk)
    for slot in desk.states:
        desk.gone(slot, 1)
    assert desk.ending[0] == 143


@pytest.mark.parametrize("answers", [(), (5,), (5, 5), (5, 5, 5)])
def test_a_rank_that_dies_meanwhile_ends_the_job_at_once(answers: tuple[int, ...]) -> None:
    desk = held(*answers, spares=1)
    desk.gone(desk.seats[2])
    assert desk.ending == (143, "SIGTERM")
    assert desk.order("n0").phase is Phase.END


@pytest.mark.parametrize("returned", [0, 1])
def test_a_fault_meanwhile_ends_the_job_at_once(returned: int) -> None:
    desk = held(5, 5, 5)
    desk.returns(*desk.seats[:returned])
    desk.fault(desk.seats[2], FaultKind.EXCEPTION)
    assert desk.ending == (143, "SIGTERM")


def test_a_lost_agent_meanwhile_ends_the_job_at_once() -> None:
    desk = held(5)
    desk.silent("n2")
    assert desk.ending == (143, "SIGTERM")


def test_a_reserve_that_dies_meanwhile_is_not_replaced() -> None:
    desk = Desk((1, 1, 1, 1), msgspec.structs.replace(SETTINGS, active_world_size=3, respawn=True)).form()
    desk.stop()
    reserve = next(slot for slot in desk.states if slot not in desk.seats)
    desk.gone(reserve)
    assert desk.phase is JobPhase.RUNNING
    assert all(not desk.order(agent).lives for agent in desk.nodes)


@pytest.mark.parametrize("answers", [(), (5, 5, 5)])
def test_a_second_request_ends_at_once(answers: tuple[int, ...]) -> None:
    desk = held(*answers)
    desk.stop()
    assert desk.ending == (143, "SIGTERM")


def test_the_same_wish_from_another_side_changes_nothing() -> None:
    """A scheduler tells every agent."""
    desk = held(5)
    desk.stop(143, "SIGTERM to agent n1")
    assert desk.phase is JobPhase.RUNNING
    desk.stop(143, "SIGTERM to agent n1")
    assert desk.ending == (143, "SIGTERM")


def test_the_same_request_of_an_agent_delivered_to_the_next_controller_is_no_second_one() -> None:
    desk = held(5)
    for _ in range(2):
        desk.do(StopAsked(143, "SIGTERM to agent n1", "n1"))
    assert desk.phase is JobPhase.RUNNING


@pytest.mark.parametrize("answers", [(), (5,), (5, 5, 5)])
def test_when_the_grace_has_passed_the_job_ends(answers: tuple[int, ...]) -> None:
    desk = held(*answers)
    desk.returns(*desk.seats[: len(answers) // 2])
    began = desk.now
    desk.wait()
    assert desk.now - began <= 5.0
    assert desk.ending == (143, "SIGTERM")
    late = "0-2" if len(answers) < 3 else "1-2"
    assert desk.told("stop_late") == [f"did not leave the function within 5 s (termination_grace_time): ranks {late}"]


def test_the_grace_holds_for_what_comes_after_the_function() -> None:
    desk = held(5, 5, 5)
    leave(desk)
    desk.gone("n0/0", 0)
    desk.wait()
    assert desk.ending == (143, "SIGTERM")
    assert desk.told("stop_late")[0].endswith(": n1/0 (outside), n2/0 (outside)")


def test_no_grace_is_an_end_at_once() -> None:
    desk = Desk((1,), msgspec.structs.replace(RANK, termination_grace_time=0.0)).form()
    desk.stop()
    assert desk.ending == (143, "SIGTERM")


def test_no_further_function_is_begun() -> None:
    desk = held(5, 5, 5)
    leave(desk)
    for slot in desk.states:
        assert desk.phase is JobPhase.RELEASED
        desk.gate(slot)
    assert desk.ending == (143, "SIGTERM")


@pytest.mark.parametrize("answers", [(), (5,), (5, 5, 5)])
def test_another_controller_goes_on_with_it(answers: tuple[int, ...]) -> None:
    desk = held(*answers)
    desk.now += 100.0
    desk.do(Opened("job", 1, 2, 3, SETTINGS))
    desk.attach()
    assert desk.phase is JobPhase.RUNNING
    assert all(desk.order(agent).hold for agent in desk.nodes)
    for slot in desk.seats[len(answers) :]:
        desk.passed(slot, 4)
    assert desk.order("n2").stop_step == (6 if answers else 5)
    began = desk.now
    desk.wait()
    assert desk.now - began <= SETTINGS.heartbeat_timeout
    assert desk.ending == (143, "SIGTERM")
    again = Job()
    assert [msgspec.msgpack.encode(again.on(event, now)) for now, event in desk.journal] == desk.answers


def test_a_request_before_all_have_entered_ends_at_once() -> None:
    desk = Desk((1, 1), SETTINGS)
    desk.attach()
    desk.gate(*desk.states)
    desk.enter("n0/0")
    assert desk.phase is JobPhase.RUNNING
    desk.stop()
    assert desk.ending == (143, "SIGTERM")


@pytest.mark.parametrize("phase", [JobPhase.FORMING, JobPhase.ABORTING, JobPhase.PLANNING, JobPhase.RELEASED])
def test_a_request_in_another_phase_ends_at_once(phase: JobPhase) -> None:
    desk = Desk((1, 1), msgspec.structs.replace(SETTINGS, respawn=True))
    if phase is not JobPhase.FORMING:
        desk.form()
    match phase:
        case JobPhase.ABORTING:
            desk.fault("n0/0")
        case JobPhase.PLANNING:
            desk.gone("n0/0")
            desk.gate("n1/0")
        case JobPhase.RELEASED:
            desk.returns(*desk.seats)
        case _:
            desk.attach()
    assert desk.phase is phase
    desk.stop()
    assert desk.ending == (143, "SIGTERM")


def test_what_a_rank_passed_in_an_earlier_round_is_no_answer() -> None:
    desk = Desk((1, 1), msgspec.structs.replace(SETTINGS, respawn=True)).form()
    desk.states["n0/0"] = msgspec.structs.replace(desk.states["n0/0"], passed=99)
    desk.fault("n0/0")
    desk.settle()
    assert desk.index == 1
    desk.stop()
    desk.passed("n1/0", 3)
    assert desk.told("stop_step") == []
    desk.passed("n0/0", 2)
    assert desk.order("n0").stop_step == 4
