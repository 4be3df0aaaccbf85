"""How a job ends: codes, reasons, budgets, loops, and what is not retried."""

import msgspec
import pytest

from perdure.controller.core.budget import FIRST_STEPS_S, SAME_FAILURE_LIMIT, SAME_FAILURE_LIMIT_WITHOUT_STEPS
from perdure.controller.core.events import Opened
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.faults import FaultKind
from perdure.protocol.messages import Phase, Stage
from perdure.protocol.settings import Settings

from .desk import RANK, Desk


def with_(**changes: object) -> Settings:
    return msgspec.structs.replace(RANK, **changes)


def rounds_until_the_end(desk: Desk, *, step: bool = True, limit: int = 20) -> int:
    """Rank 0 fails in every round, each time with another error if there is progress; how many rounds ran."""
    for number in range(limit):
        if step:
            desk.report("n0/0", step=number * 10)
        desk.fault("n0/0")
        desk.settle()
        if desk.phase is JobPhase.STOPPING:
            return number + 1
    raise AssertionError("it never ended")


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_iterations_is_the_exact_number_of_rounds(limit: int) -> None:
    desk = Desk((2,), with_(max_iterations=limit)).form()
    assert rounds_until_the_end(desk) == limit
    code, reason = desk.ending
    assert code == 90
    assert f"round {limit} would be number {limit + 1} of at most {limit} (max_iterations)" in reason


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_max_rank_faults_is_the_exact_number_of_faults_survived(limit: int) -> None:
    desk = Desk((2,), with_(max_rank_faults=limit)).form()
    assert rounds_until_the_end(desk) == limit + 1
    code, reason = desk.ending
    assert code == 90
    assert f"rank fault {limit + 1} of at most {limit} (max_rank_faults)" in reason
    assert "rank 0 (n0/0): exception in n0/0" in reason


def test_a_budget_outlasts_controllers() -> None:
    desk = Desk((2,), with_(max_rank_faults=2)).form()
    for number in range(3):
        desk.report("n0/0", step=number)
        desk.fault("n0/0")
        desk.do(Opened("job", 1, desk.job.incarnation + 1, 0, desk.settings))
        desk.attach()
        desk.settle()
    assert desk.ending[0] == 90


def test_a_rank_that_dies_while_the_next_round_is_planned_is_on_the_same_budget() -> None:
    desk = Desk((2, 2), with_(respawn=True, max_rank_faults=1)).form()
    desk.gone("n0/0")
    desk.gate("n0/1", "n1/0", "n1/1")
    desk.gone("n1/1")
    desk.respawn("n0/0")
    desk.respawn("n1/1")
    assert desk.ending[1].startswith("rank fault 2 of at most 1 (max_rank_faults)")


def test_equal_failures_without_progress_end_the_job() -> None:
    desk = Desk((2,)).form()
    desk.report("n0/0", step=5)
    assert rounds_until_the_end(desk, step=False) == SAME_FAILURE_LIMIT
    code, reason = desk.ending
    assert code == 93
    assert f"the same failure {SAME_FAILURE_LIMIT} times in a row without progress beyond step 5" in reason


def test_equal_failures_with_progress_go_on() -> None:
    desk = Desk((2,)).form()
    for number in range(12):
        desk.report("n0/0", step=number)
        desk.fault("n0/0")
        desk.settle()
    assert (desk.phase, desk.index) == (JobPhase.RUNNING, 12)


def test_different_failures_without_progress_go_on() -> None:
    desk = Desk((2,)).form()
    desk.report("n0/0", step=5)
    for number in range(12):
        desk.fault("n0/0", place=f"train.py:{number % 2}")
        desk.settle()
    assert desk.phase is JobPhase.RUNNING


def test_a_function_that_never_pings_gets_more_patience() -> None:
    desk = Desk((2,)).form()
    assert rounds_until_the_end(desk, step=False) == SAME_FAILURE_LIMIT_WITHOUT_STEPS
    assert desk.ending[0] == 93


def test_a_suspect_is_left_out_before_the_job_is_given_up() -> None:
    desk = Desk((3,), with_(active_world_size=2)).form()
    desk.report("n0/0", step=5)
    for _ in range(SAME_FAILURE_LIMIT):
        desk.fault("n0/0")
        desk.settle()
    assert desk.seats == ["n0/2", "n0/1"]
    assert "3 equal failures in n0/0 without progress: leaving out n0/0" in desk.told("suspect")[0]


@pytest.mark.parametrize("error", ["ImportError", "ModuleNotFoundError", "TypeError", "SyntaxError", "StateMismatch"])
def test_a_wrong_program_is_not_retried(error: str) -> None:
    desk = Desk((2,)).form()
    desk.fault("n0/0", error=error, detail="Traceback: the last line")
    desk.settle()
    code, reason = desk.ending
    assert code == 1
    assert "not retried" in reason
    assert "Traceback: the last line" in reason


def test_the_same_error_after_progress_is_retried() -> None:
    desk = Desk((2,)).form()
    desk.report("n0/1", step=3)
    desk.fault("n0/0", error="ImportError")
    desk.settle()
    assert desk.index == 1


def test_the_same_error_of_a_function_that_never_pings_but_ran_for_long_is_retried() -> None:
    desk = Desk((2,)).form()
    desk.now += FIRST_STEPS_S
    desk.fault("n0/0", error="TypeError")
    desk.settle()
    assert desk.index == 1


def test_an_exit_before_check_in_is_told_with_its_code_and_its_last_words() -> None:
    desk = Desk((2, 2))
    desk.attach()
    desk.gate("n0/0", "n0/1", "n1/0")
    desk.gone("n1/1", 3, stderr="No module named 'x'")
    code, reason = desk.ending
    assert code == 3
    assert "n1/1: exited with code 3 before it reached the training function" in reason
    assert "not retried" in reason


@pytest.mark.parametrize("code", [16, 17, 75])
def test_codes_of_policy_are_passed_through(code: int) -> None:
    desk = Desk((2, 2), with_(active_world_size=2)).form()
    desk.gone("n0/1", code)
    assert desk.ending[0] == code
    assert f"rank 1 (n0/1): exited with code {code}" in desk.ending[1]
    assert desk.order("n1").code == code


def test_an_early_exit_with_code_0_is_a_fault() -> None:
    desk = Desk((2, 2), with_(active_world_size=3)).form()
    desk.gone("n0/1", 0)
    desk.settle()
    assert desk.seats == ["n0/0", "n1/1", "n1/0"]
    assert "exited with code 0 inside the training function" in desk.told("fault")[0]


def complete(desk: Desk) -> None:
    """Everybody returns and is let go, reserves as well."""
    desk.returns(*desk.seats)
    assert desk.phase is JobPhase.RELEASED
    for slot, state in desk.states.items():
        assert desk.order(slot.split("/")[0]).phase is Phase.RELEASE
        desk.report(slot, stage=Stage.OUTSIDE, functions=state.functions + 1)


def test_a_completed_job_ends_with_0_and_its_reserves_too() -> None:
    desk = Desk((2, 2), with_(active_world_size=3)).form()
    complete(desk)
    for slot in desk.states:
        desk.gone(slot, 0)
    assert desk.finished is not None
    assert (desk.finished.code, desk.finished.reason) == (0, "completed")


@pytest.mark.parametrize(("codes", "expected"), [((0, 5), 5), ((0, -11), 139), ((3, 4), 3)])
def test_a_code_after_completion_is_the_jobs(codes: tuple[int, int], expected: int) -> None:
    desk = Desk((2,)).form()
    complete(desk)
    for slot, code in zip(desk.states, codes, strict=True):
        desk.report(slot, stage=Stage.DYING)
        desk.gone(slot, code)
    assert desk.finished is not None
    assert desk.finished.code == expected
    assert f"a process exited with code {expected} afterwards" in desk.finished.reason


def test_how_a_process_died_is_waited_for_after_completion() -> None:
    desk = Desk((1,)).form()
    complete(desk)
    desk.report("n0/0", stage=Stage.DYING)
    assert desk.phase is JobPhase.RELEASED


def test_a_second_resilient_function_is_the_next_round() -> None:
    desk = Desk((2, 2), with_(active_world_size=3)).form()
    complete(desk)
    desk.gate("n0/0", "n0/1", "n1/0")
    assert desk.phase is JobPhase.RELEASED
    desk.gate("n1/1")
    assert (desk.phase, desk.index) == (JobPhase.RUNNING, 1)
    desk.enter(*desk.seats)
    complete(desk)
    for slot in desk.states:
        desk.gone(slot, 0)
    assert desk.finished is not None
    assert desk.finished.code == 0


def test_a_process_that_starts_late_is_let_through_the_functions_that_are_completed() -> None:
    desk = Desk((2, 2), with_(respawn=True)).form()
    complete(desk)
    desk.gate(*desk.states)
    desk.enter(*desk.seats)
    desk.gone("n0/0")
    desk.settle()
    assert desk.phase is JobPhase.PLANNING
    state = desk.states["n0/0"]
    desk.states["n0/0"] = msgspec.structs.replace(state, life=2, stage=Stage.STARTING, round=-1, exit=None, functions=0)
    desk.report("n0/0")
    desk.report("n0/0", stage=Stage.GATE)
    assert desk.phase is JobPhase.PLANNING, "it waits for the first function, the others for the second"
    assert desk.order("n0").completed == 1
    desk.report("n0/0", stage=Stage.OUTSIDE, functions=1)
    desk.report("n0/0", stage=Stage.GATE)
    assert (desk.phase, desk.seats) == (JobPhase.RUNNING, ["n0/0", "n0/1", "n1/0", "n1/1"])


def test_who_does_not_call_the_second_function_is_named() -> None:
    desk = Desk((2,), with_(forming_timeout=30.0)).form()
    complete(desk)
    desk.gate("n0/0")
    desk.wait()
    code, reason = desk.ending
    assert code == 92
    assert "some ranks called another resilient function, these did not: n0/1 (outside)" in reason


def test_forming_without_enough_ranks_names_the_missing() -> None:
    desk = Desk((2, 2), with_(forming_timeout=30.0, min_world_size=3), expected=3)
    desk.attach()
    desk.gate("n0/0", "n1/0")
    desk.wait()
    code, reason = desk.ending
    assert code == 92
    assert "missing after 30 s (forming_timeout): 1 of 3 agents and ranks n0/1 (starting), n1/1 (starting)" in reason
    assert "2 ranks are ready, at least 3 needed" in reason


def test_forming_with_enough_ranks_starts_without_the_missing() -> None:
    desk = Desk((2, 2), with_(forming_timeout=30.0))
    desk.attach()
    desk.gate("n0/0", "n0/1", "n1/0")
    desk.wait()
    assert desk.seats == ["n0/0", "n0/1", "n1/0"]
    [said] = desk.told("forming_late")
    assert "starting with 3 ranks; missing after 30 s (forming_timeout): ranks n1/1 (starting)" in said


def test_nobody_comes_at_all() -> None:
    desk = Desk((1,), with_(forming_timeout=30.0), expected=0)
    desk.wait()
    assert desk.ending[0] == 92
    assert "every agent" in desk.ending[1]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 7), 7), ((0, -9), 137)])
def test_scripts_without_a_resilient_function(codes: tuple[int, int], expected: int) -> None:
    desk = Desk((2,))
    desk.attach()
    for slot, code in zip(desk.states, codes, strict=True):
        desk.gone(slot, code)
    assert desk.ending[0] == expected


def test_some_ranks_that_leave_without_calling_the_function_end_the_job() -> None:
    desk = Desk((2,))
    desk.attach()
    desk.gate("n0/0")
    desk.gone("n0/1", 0)
    assert desk.ending[0] == 1
    assert "exited with code 0 without calling it: n0/1 (gone)" in desk.ending[1]


def test_a_stop_ends_everybody_with_its_code() -> None:
    desk = Desk((1, 1)).form()
    desk.stop_at_once(143, "SIGTERM")
    desk.stop(130, "SIGINT")
    assert desk.ending == (143, "SIGTERM")
    assert {desk.order(agent).phase for agent in ("n0", "n1")} == {Phase.END}
    desk.gone("n0/0", 143)
    assert desk.finished is None
    desk.gone("n1/0", 143)
    assert desk.finished is not None
    assert desk.finished.code == 143


def test_agents_that_do_not_end_are_named() -> None:
    desk = Desk((1, 1)).form()
    desk.stop_at_once(143, "SIGTERM")
    desk.gone("n0/0", 143)
    desk.wait()
    assert desk.told("stop_late") == ["agents did not end their ranks in time: n1"]
    assert desk.finished is not None


def test_a_failed_agent_is_not_waited_for_while_stopping() -> None:
    desk = Desk((1, 1)).form()
    desk.stop_at_once(143, "SIGTERM")
    desk.gone("n0/0", 143)
    desk.link_lost("n1")
    desk.wait()
    assert desk.finished is not None


def test_signatures_leave_out_who_and_when() -> None:
    desk = Desk((2,)).form()
    one = desk.fault("n0/0", FaultKind.EXCEPTION, place="a.py:1", step=3)
    two = msgspec.structs.replace(one, slot="n9/9", step=8, message="other", life=4, round=7)
    assert one.signature == two.signature
