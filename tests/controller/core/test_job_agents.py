"""Agents that are lost, come back or are replaced, and controllers that do."""

import msgspec
import pytest

from perdure.controller.core.events import Attached, Opened
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.messages import Phase, Stage
from perdure.protocol.settings import Settings

from .desk import RANK, Desk


def with_(**changes: object) -> Settings:
    return msgspec.structs.replace(RANK, **changes)


def test_both_agents_of_a_node_make_one_round() -> None:
    desk = Desk((2, 2, 2, 2), with_(granularity="node", active_world_size=4), per_node=2).form()
    desk.link_lost("n0")
    desk.link_lost("n1")
    desk.wait()
    assert "agent n0 is lost with 2 slots" in desk.told("node_lost")[0]
    desk.wait()
    assert desk.index == 1
    assert desk.seats == ["n2/0", "n2/1", "n3/0", "n3/1"]
    desk.enter(*desk.seats)
    [story] = desk.told("recovered")
    assert "rank 0 (n0/0): agent n0 is lost" in story


def test_a_lost_agent_that_comes_back_brings_reserves() -> None:
    desk = Desk((2, 2)).form()
    desk.silent("n1")
    desk.settle()
    assert desk.seats == ["n0/0", "n0/1"]
    desk.attach("n1")
    assert desk.order("n1").phase is Phase.RUN
    assert desk.order("n1").seats == ()
    desk.report("n1/0", stage=Stage.GATE)
    desk.report("n1/1", stage=Stage.GATE)
    desk.gone("n0/0")
    desk.settle()
    assert desk.seats == ["n1/0", "n0/1", "n1/1"], "the world grows again, up to active_world_size"


def test_a_controller_that_hears_nobody_waits_before_it_blames_them() -> None:
    desk = Desk((2, 2), with_(heartbeat_timeout=60.0)).form()
    desk.link_lost("n0")
    desk.link_lost("n1")
    desk.wait()
    assert desk.phase is JobPhase.RUNNING, "it may be this controller that is cut off"
    assert len(desk.told("isolated")) == 1
    desk.now += 10.0
    desk.attach()
    assert (desk.phase, desk.index) == (JobPhase.RUNNING, 0)
    desk.link_lost("n0")
    desk.link_lost("n1")
    while desk.phase is JobPhase.RUNNING:
        desk.wait()
    assert desk.ending[0] == 91


def test_a_second_process_of_the_same_name_is_refused_while_the_first_is_there() -> None:
    desk = Desk().form()
    desk.processes["n0"] = 77
    desk.attach("n0")
    assert "the name n0 is taken by process 1 on host0; give each machine its own PERDURE_NODE" in desk.refused[0]
    assert desk.phase is JobPhase.RUNNING


def test_a_new_agent_process_replaces_one_that_is_gone() -> None:
    desk = Desk((2, 2)).form()
    desk.link_lost("n0")
    desk.processes["n0"] = 77
    for slot in ("n0/0", "n0/1"):
        desk.states[slot] = msgspec.structs.replace(desk.states[slot], stage=Stage.STARTING, round=-1, change=0)
    desk.do(Attached(desk.hello("n0")))
    assert desk.phase is JobPhase.ABORTING
    desk.gate("n1/0", "n1/1")
    assert desk.phase is JobPhase.PLANNING, "the new processes are on their way"
    desk.gate("n0/0", "n0/1")
    desk.enter(*desk.seats)
    assert desk.seats == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert "agent n0 was replaced by another process" in desk.told("recovered")[0]


def test_another_protocol_is_refused() -> None:
    desk = Desk()
    desk.do(Attached(desk.hello("n0", version=999)))
    assert "agent n0 speaks protocol 999" in desk.refused[0]
    assert desk.job.roster.agents == {}


def reopen(desk: Desk) -> None:
    """Another controller takes over, on another machine's clock."""
    desk.now = 5.0
    desk.do(Opened("job", 1, desk.job.incarnation + 1, 0, desk.settings))


def test_after_a_controllers_return_nothing_is_decided_before_all_are_back() -> None:
    desk = Desk((2, 2, 2), with_(active_world_size=4, completion_timeout=1.0, barrier_timeout=100.0)).form()
    desk.gone("n0/0")
    reopen(desk)
    desk.attach("n0", "n1")
    desk.gate("n0/1", "n1/0", "n1/1")
    assert desk.phase is JobPhase.PLANNING
    desk.attach("n2")
    assert desk.phase is JobPhase.RUNNING
    assert desk.seats == ["n2/0", "n0/1", "n1/0", "n1/1"]


def test_after_a_controllers_return_the_missing_are_given_up_when_their_time_has_passed() -> None:
    desk = Desk((2, 2), with_(heartbeat_timeout=60.0)).form()
    reopen(desk)
    desk.attach("n0")
    assert desk.phase is JobPhase.RUNNING, "training goes on untouched"
    began = desk.now
    desk.wait()
    assert desk.now - began == pytest.approx(60.0, abs=1.0)
    assert "did not come back to the controller within 60 s" in desk.told("node_lost")[0]
    desk.settle()
    assert desk.seats == ["n0/0", "n0/1"]


def test_a_return_in_a_running_round_leaves_no_timer_behind() -> None:
    desk = Desk((2,)).form()
    reopen(desk)
    desk.attach()
    assert desk.job.deadline() is None
    assert desk.phase is JobPhase.RUNNING


def test_completion_is_not_judged_while_agents_are_still_to_come_back() -> None:
    desk = Desk((2, 2), with_(completion_timeout=1.0, heartbeat_timeout=60.0)).form()
    reopen(desk)
    desk.attach("n0")
    desk.returns("n0/0", "n0/1")
    assert desk.phase is JobPhase.COMPLETING
    desk.now += 50.0
    desk.attach("n1")
    desk.returns("n1/0", "n1/1")
    assert desk.phase is JobPhase.RELEASED


def test_the_end_is_said_again_by_the_next_controller() -> None:
    """Its predecessor may have died between the decision and the verdict."""
    desk = Desk((1,)).form()
    desk.returns("n0/0")
    desk.report("n0/0", stage=Stage.OUTSIDE, functions=1)
    desk.gone("n0/0", 0)
    assert desk.phase is JobPhase.ENDED
    desk.commands.clear()
    reopen(desk)
    assert desk.finished is not None
    assert desk.finished.code == 0


def test_a_controller_that_returns_while_stopping_still_ends_the_agents() -> None:
    desk = Desk((1, 1)).form()
    desk.job.end(143, "SIGTERM")
    reopen(desk)
    assert desk.phase is JobPhase.STOPPING, "nobody has been told"
    desk.attach("n0")
    assert desk.order("n0").phase is Phase.END
    desk.gone("n0/0", 143)
    desk.attach("n1")
    desk.gone("n1/0", 143)
    assert desk.finished is not None
