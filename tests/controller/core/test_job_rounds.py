"""Rounds: how they end, who is waited for, and when the next one begins."""

import msgspec
import pytest

from perdure.controller.core.rounds import JobPhase
from perdure.protocol.faults import FaultKind
from perdure.protocol.messages import Phase, Stage
from perdure.protocol.settings import Settings

from .desk import RANK, Desk


def with_(**changes: object) -> Settings:
    return msgspec.structs.replace(RANK, **changes)


def test_a_job_forms_when_all_agents_and_ranks_are_there() -> None:
    desk = Desk((2, 2))
    desk.attach("n0")
    desk.gate("n0/0", "n0/1")
    assert desk.phase is JobPhase.FORMING, "an agent is missing"
    desk.attach("n1")
    desk.gate("n1/0")
    assert desk.phase is JobPhase.FORMING, "a rank is missing"
    desk.gate("n1/1")
    assert desk.phase is JobPhase.RUNNING
    assert desk.seats == ["n0/0", "n0/1", "n1/0", "n1/1"]
    order = desk.order("n1")
    assert (order.phase, order.round, order.world_size) == (Phase.RUN, 0, 4)
    assert [seat.rank for seat in order.seats] == [2, 3]
    assert (order.master_addr, order.master_port) == ("10.0.0.1", 9000)


def test_an_exception_brings_the_others_to_the_gate_and_everybody_keeps_the_rank() -> None:
    desk = Desk().form()
    desk.fault("n0/1")
    assert desk.phase is JobPhase.ABORTING
    assert all(desk.order(agent).phase is Phase.ABORT for agent in ("n0", "n1"))
    desk.gate("n0/1", "n0/0", "n1/0")
    assert desk.phase is JobPhase.ABORTING, "rank 3 is awaited"
    desk.gate("n1/1")
    assert desk.phase is JobPhase.RUNNING
    assert desk.index == 1
    assert desk.seats == ["n0/0", "n0/1", "n1/0", "n1/1"]
    desk.enter(*desk.seats)
    [story] = desk.told("recovered")
    assert "rank 1 (n0/1): exception in n0/1" in story
    assert "world 4, 0 reserves" in story


def test_a_reserve_takes_the_dead_rank() -> None:
    desk = Desk((3, 3), with_(active_world_size=4)).form()
    assert desk.seats == ["n0/0", "n0/1", "n0/2", "n1/0"]
    desk.gone("n0/0")
    desk.settle()
    assert desk.seats == ["n1/1", "n0/1", "n0/2", "n1/0"]
    assert desk.order("n1").master_addr == "10.0.0.2", "rank 0 moved, and the store with it"
    assert "n1/1 takes rank 0" in desk.told("recovered")[0]


def test_without_reserves_the_world_shrinks() -> None:
    desk = Desk((2, 2), with_(world_size_multiple_of=2)).form()
    desk.gone("n1/0")
    desk.settle()
    assert desk.seats == ["n0/0", "n0/1"]
    assert "world 4 -> 2, 1 reserve;" in desk.told("recovered")[0]


def test_a_dead_rank_takes_its_node_out_under_granularity_node() -> None:
    desk = Desk((2, 2, 2), with_(granularity="node", active_world_size=4)).form()
    desk.gone("n0/1")
    desk.settle()
    assert desk.seats == ["n2/0", "n2/1", "n1/0", "n1/1"]


def test_too_small_a_world_ends_the_job_and_says_what_would_have_helped() -> None:
    desk = Desk((2, 2), with_(granularity="node", min_world_size=3)).form()
    desk.gone("n1/0")
    desk.settle()
    code, reason = desk.ending
    assert code == 91
    assert "2 healthy ranks are left, at least 3 needed (min_world_size=3" in reason
    assert "n1/0 (gone)" in reason
    assert "healthy but left out with their node (granularity=node): n1/1;" in reason


def test_four_reporters_of_one_fault_make_one_round() -> None:
    desk = Desk((4,)).form()
    for slot in ("n0/0", "n0/2", "n0/3"):
        desk.fault(slot, peer_error=True)
    desk.gone("n0/1")
    desk.settle()
    assert desk.index == 1
    [story] = desk.told("recovered")
    assert "rank 1 (n0/1): killed by SIGKILL" in story
    assert "victims: ranks 0, 2-3" in story
    assert desk.job.budget.rank_faults == 1, "victims cost nothing"


def test_failures_twenty_seconds_apart_make_one_round_while_somebody_is_awaited() -> None:
    """1,000 ranks that time out one after the other must not miss each other (field case Q5)."""
    desk = Desk((4,)).form()
    desk.fault("n0/0", peer_error=True)
    for slot in ("n0/1", "n0/2"):
        desk.now += 10.0
        desk.fault(slot, peer_error=True)
    assert desk.phase is JobPhase.ABORTING
    desk.settle()
    assert desk.index == 1


def test_news_of_an_earlier_life_or_round_changes_nothing() -> None:
    desk = Desk((2, 2), with_(respawn=True)).form()
    old = desk.states["n0/0"]
    desk.gone("n0/0")
    desk.gate("n0/1", "n1/0", "n1/1")
    desk.respawn("n0/0")
    desk.enter(*desk.seats)
    assert (desk.index, desk.phase) == (1, JobPhase.RUNNING)
    new = desk.states["n0/0"]
    assert new.life == 2
    for late in (old, msgspec.structs.replace(old, stage=Stage.GATE, change=99)):
        desk.states["n0/0"] = late
        desk.report("n0/0")
    desk.states["n0/0"] = old
    desk.fault("n0/0")
    desk.gone("n0/0")
    assert (desk.index, desk.phase) == (1, JobPhase.RUNNING), "a dead process's last words touch nobody"
    desk.states["n0/0"] = new
    desk.fault("n0/0", round=0)
    assert desk.phase is JobPhase.RUNNING, "a fault of an earlier round"
    desk.fault("n0/0")
    assert desk.phase is JobPhase.ABORTING


def test_an_older_state_after_a_newer_one_is_old_news() -> None:
    """A Hello says the newest; reports from before it may come after it."""
    desk = Desk((2,)).form()
    running = desk.states["n0/1"]
    desk.fault("n0/0")
    desk.settle()
    assert desk.index == 1
    back = desk.states["n0/1"]
    desk.states["n0/1"] = msgspec.structs.replace(running, change=running.change - 1)
    desk.report("n0/1")
    desk.states["n0/1"] = back
    assert desk.job.roster.agents["n0"].slots["n0/1"].state == back


def test_a_fault_while_aborting_is_noted_and_makes_no_second_round() -> None:
    desk = Desk((4,), with_(active_world_size=2)).form()
    desk.fault("n0/0")
    desk.gone("n0/1")
    desk.settle()
    assert desk.index == 1
    assert desk.seats == ["n0/0", "n0/2"]
    assert desk.job.budget.rank_faults == 2


def test_a_death_while_planning_waits_counts_and_makes_no_second_round() -> None:
    desk = Desk((2, 2), with_(respawn=True)).form()
    desk.gone("n0/0")
    desk.gate("n0/1", "n1/0", "n1/1")
    assert desk.phase is JobPhase.PLANNING
    desk.gone("n1/1")
    desk.respawn("n0/0")
    assert desk.phase is JobPhase.PLANNING, "the second one is awaited as well"
    desk.respawn("n1/1")
    desk.enter(*desk.seats)
    assert desk.index == 1
    assert desk.job.budget.rank_faults == 2


def test_respawn_is_waited_for_only_where_it_is_needed() -> None:
    desk = Desk((3,), with_(respawn=True, active_world_size=2)).form()
    desk.gone("n0/0")
    assert desk.order("n0").lives == {"n0/0": 2}
    desk.settle()
    assert desk.seats == ["n0/2", "n0/1"], "the reserve was there"


def test_a_respawn_that_does_not_come_is_not_waited_for_for_ever() -> None:
    desk = Desk((2,), with_(respawn=True, barrier_timeout=20.0)).form()
    desk.gone("n0/0")
    desk.gate("n0/1")
    assert desk.phase is JobPhase.PLANNING
    began = desk.now
    desk.wait()
    assert desk.now - began == pytest.approx(20.0)
    assert desk.seats == ["n0/1"]


def test_a_slot_whose_processes_never_reach_the_gate_stays_empty() -> None:
    desk = Desk((2,), with_(respawn=True)).form()
    desk.gone("n0/0")
    desk.gate("n0/1")
    for life in (2, 3, 4):
        state = desk.states["n0/0"]
        desk.states["n0/0"] = msgspec.structs.replace(state, life=life, stage=Stage.STARTING, exit=None, round=-1)
        desk.report("n0/0")
        desk.gone("n0/0")
    assert "3 processes in a row died" in desk.told("slot_empty")[0]
    assert desk.seats == ["n0/1"]


def test_a_rank_that_dies_on_its_way_in_ends_the_round_at_once() -> None:
    """The kernel needs a while to tear it down; nobody waits for that."""
    desk = Desk((2, 2))
    desk.attach()
    desk.gate(*desk.states)
    desk.fault("n0/0", FaultKind.SIGNAL, round=-1)
    desk.report("n0/0", stage=Stage.DYING)
    assert desk.phase is JobPhase.ABORTING


def test_who_does_not_come_back_is_named_killed_and_left_out() -> None:
    desk = Desk((2, 2), with_(barrier_timeout=20.0, respawn=True, active_world_size=3)).form()
    desk.fault("n0/0")
    desk.gate("n0/0", "n1/0")
    desk.wait()
    assert "rank 1 (n0/1): did not leave the training function within 20 s (barrier_timeout)" in desk.told("fault")[1]
    assert [(kill.slot, kill.life) for kill in desk.order("n0").kill] == [("n0/1", 1)]
    assert desk.order("n0").lives == {"n0/1": 2}
    assert desk.seats == ["n0/0", "n1/1", "n1/0"]


def test_who_does_not_enter_is_named() -> None:
    desk = Desk((2, 2), with_(barrier_timeout=20.0))
    desk.attach()
    desk.gate(*desk.states)
    desk.enter("n0/0", "n0/1", "n1/0")
    desk.wait()
    assert "rank 3 (n1/1): did not enter the round within 20 s" in desk.told("fault")[0]
    assert desk.order("n1").kill[0].slot == "n1/1"
    desk.settle()
    assert desk.seats == ["n0/0", "n0/1", "n1/0"]


def test_who_does_not_finish_is_named_and_not_killed() -> None:
    desk = Desk((4,), with_(completion_timeout=10.0)).form()
    desk.returns("n0/0", "n0/1")
    assert desk.phase is JobPhase.COMPLETING
    desk.wait()
    texts = desk.told("fault")
    assert [text.split(" (n0")[0] for text in texts] == ["rank 2", "rank 3"]
    assert "did not return within 10 s after the first rank had (completion_timeout)" in texts[0]
    assert desk.order("n0").kill == ()
    desk.settle()
    assert desk.index == 1


def test_a_fault_at_the_completion_barrier_runs_everybody_again() -> None:
    desk = Desk((3,), with_(active_world_size=2)).form()
    desk.returns("n0/0")
    desk.gone("n0/1")
    assert desk.phase is JobPhase.ABORTING
    desk.settle()
    assert desk.seats == ["n0/0", "n0/2"]


def test_a_round_that_ends_before_all_had_entered_leaves_no_gap_in_the_story() -> None:
    desk = Desk((4,), with_(active_world_size=2)).form()
    desk.fault("n0/0")
    desk.gate("n0/0", "n0/1")
    desk.gone("n0/1")  # in round 1, before it entered
    desk.settle()
    assert desk.index == 2
    first, second = desk.told("recovered")
    assert "rank 0 (n0/0): exception" in first
    assert "ended before all ranks had entered" in first
    assert "rank 1 (n0/1): killed by SIGKILL" in second


def test_an_unfit_process_is_not_seated_while_it_leaves() -> None:
    desk = Desk((3,), with_(active_world_size=2)).form()
    desk.fault("n0/0")
    desk.gate("n0/1")
    desk.fault("n0/0", FaultKind.HEALTH_CHECK)
    desk.gate("n0/0")
    assert desk.seats == ["n0/2", "n0/1"]


def test_a_rank_that_returns_before_all_have_entered_leaves_no_timer_behind() -> None:
    desk = Desk((2,))
    desk.attach()
    desk.gate(*desk.states)
    desk.enter("n0/0")
    desk.returns("n0/0")
    assert desk.phase is JobPhase.COMPLETING
    assert set(desk.job.timers) == {"completion"}
    desk.enter("n0/1")
    desk.returns("n0/1")
    assert desk.job.timers == {}
