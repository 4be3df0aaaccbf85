"""The agent's decisions, by hand: fences, late and doubled messages, hangs, the controller away, the end."""

from collections.abc import Iterable

import msgspec

from perdure.protocol.checkpoints import (
    NO_ORDERS,
    DepotOrders,
    Fact,
    Publish,
    Resume,
    SaveId,
    Tier,
    What,
)
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import Directive, ExitRecord, Kill, Phase, Seat, Stage
from perdure.protocol.names import NO_ROUND, AgentName, Slot
from perdure.protocol.rank_messages import (
    Enter,
    Entered,
    Facts,
    Finish,
    Hold,
    Interrupt,
    Passed,
    Raised,
    Ready,
    Returned,
    StopAt,
)
from perdure.protocol.settings import OFF, Settings
from perdure.worker_runtime.agent.actions import (
    Action,
    AskStop,
    KillProcess,
    Leave,
    OrderDepot,
    Say,
    Spawn,
    Tell,
    TellSaved,
    Write,
)
from perdure.worker_runtime.agent.hang import Progress
from perdure.worker_runtime.agent.machine import AgentMachine

S0, S1 = Slot("n0/0"), Slot("n0/1")
SETTINGS = Settings(soft_timeout=60.0, hard_timeout=90.0, controller_timeout=600.0)


def machine(settings: Settings = SETTINGS) -> AgentMachine:
    """Two processes at the gate, and a controller that has welcomed the agent."""
    agent = AgentMachine(AgentName("n0"), "job", 2, settings)
    agent.start(0.0)
    agent.welcomed(1, settings)
    for slot in (S0, S1):
        agent.spawned(slot, 1, 1000)
        agent.rank_said(slot, 1, Ready(port=9000), -1, 1.0)
    return agent


def run_order(index: int, *seats: Seat, completed: int = 0) -> Directive:
    seats = seats or (Seat(S0, 1, 0), Seat(S1, 1, 1))
    return Directive(index, Phase.RUN, seats, world_size=2, local_world_size=2, completed=completed)


def running(settings: Settings = SETTINGS) -> AgentMachine:
    agent = machine(settings)
    agent.directed(1, run_order(0), 2.0)
    for slot in (S0, S1):
        agent.rank_said(slot, 1, Entered(0), -1, 2.0)
    return agent


def said(actions: Iterable[Action], slot: Slot = S0) -> list[object]:
    return [action.message for action in actions if isinstance(action, Say) and action.slot == slot]


def kinds(actions: Iterable[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def stage(agent: AgentMachine, slot: Slot = S0) -> Stage:
    return agent.slots[slot].stage


def test_a_directive_that_comes_twice_is_obeyed_once() -> None:
    agent = machine()
    assert isinstance(said(agent.directed(1, run_order(0), 2.0))[0], Enter)
    assert said(agent.directed(1, run_order(0), 2.0)) == []


def test_a_directive_of_an_older_controller_is_refused() -> None:
    agent = running()
    agent.welcomed(2, SETTINGS)
    actions = agent.directed(1, Directive(0, Phase.END, code=1), 3.0)
    assert kinds(actions) == [Write]
    assert agent.directive.phase is Phase.RUN


def test_a_seat_is_for_one_process_only() -> None:
    agent = machine()
    assert said(agent.directed(1, run_order(0, Seat(S0, 2, 0)), 2.0)) == []


def test_an_abort_reaches_a_process_that_is_on_its_way_in() -> None:
    agent = machine()
    agent.directed(1, run_order(0), 2.0)
    abort = Directive(0, Phase.ABORT, cause="x")
    assert said(agent.directed(1, abort, 2.1)) == [Interrupt(0, "x")]
    assert said(agent.directed(1, abort, 2.2)) == []
    agent.rank_said(S0, 1, Ready(round=NO_ROUND, port=9000), -1, 2.3)
    assert agent.slots[S0].entering == 0, "that was said before it was told to enter"
    agent.rank_said(S0, 1, Entered(0), -1, 2.4)
    agent.rank_said(S0, 1, Ready(round=0, port=9001), -1, 2.5)
    assert agent.slots[S0].state.round == 0
    assert stage(agent) is Stage.GATE


def test_a_process_that_never_heard_of_a_round_is_past_it_when_it_is_over() -> None:
    agent = machine()
    actions = agent.directed(1, Directive(0, Phase.ABORT), 2.0)
    assert [state.round for action in actions if isinstance(action, Tell) for state in action.states] == [0, 0]
    assert said(agent.directed(1, run_order(0), 2.1)) == [], "it will not enter it either"


def test_only_who_returned_in_the_completed_round_is_let_go_with_its_value() -> None:
    """A rank that was cut off has returned from a round that was then aborted."""
    agent = running()
    agent.rank_said(S0, 1, Returned(0), 5, 3.0)
    actions = agent.directed(1, Directive(1, Phase.RELEASE, completed=1), 4.0)
    assert said(actions) == [Interrupt(0, "the job's round is complete")]
    actions = agent.rank_said(S0, 1, Ready(round=0, port=9000), 5, 4.1)
    assert said(actions) == [Finish(0, "complete")]
    assert stage(agent) is Stage.OUTSIDE


def test_a_late_process_is_let_through_completed_functions_and_then_waits() -> None:
    agent = machine()
    actions = agent.directed(1, run_order(5, Seat(Slot("n9/0"), 1, 0), completed=2), 2.0)
    assert said(actions) == [Finish(0, "complete")]
    assert said(agent.rank_said(S0, 1, Ready(port=9000), -1, 2.1)) == [Finish(0, "complete")]
    assert said(agent.rank_said(S0, 1, Ready(port=9000), -1, 2.2)) == []
    assert agent.slots[S0].state.functions == 2


def test_states_carry_a_growing_number() -> None:
    agent = running()
    before = agent.slots[S0].state.change
    agent.rank_said(S0, 1, Returned(0), 5, 3.0)
    assert agent.slots[S0].state.change > before


def test_the_first_fault_of_a_round_stays_but_unfitness_comes_to_the_top() -> None:
    agent = running()
    first = Fault(S0, 1, 0, FaultKind.EXCEPTION, "ValueError")
    agent.rank_said(S0, 1, Raised(first), 5, 3.0)
    agent.rank_said(S0, 1, Raised(msgspec.structs.replace(first, message="another")), 5, 3.1)
    assert agent.slots[S0].state.fault == first
    unfit = Fault(S0, 1, 0, FaultKind.HEALTH_CHECK, "finalize failed")
    agent.rank_said(S0, 1, Ready(round=0, fault=unfit), 5, 3.2)
    assert agent.slots[S0].state.fault == unfit


def stuck(at: float) -> dict[Slot, Progress]:
    return {S0: Progress(at, at, 0.0, 7), S1: Progress(1e9, 1e9, 0.0, 7)}


def test_a_hang_is_judged_at_its_limits_and_not_before() -> None:
    agent = running()
    assert agent.deadline() == 62.0
    assert agent.tick(stuck(10.0), 62.0) == []
    assert agent.slots[S0].look_at == 70.0
    agent.tick(stuck(10.0), 70.0)
    fault = agent.slots[S0].state.fault
    assert fault is not None
    assert (fault.kind, fault.stale_s, fault.step) == (FaultKind.SOFT_HANG, 60.0, 7)
    assert agent.slots[S0].look_at == 100.0
    assert KillProcess in kinds(agent.tick(stuck(10.0), 100.0))
    assert agent.slots[S0].look_at is None


def test_without_a_soft_limit_the_hard_one_still_counts() -> None:
    agent = running(msgspec.structs.replace(SETTINGS, soft_timeout=OFF))
    assert agent.deadline() == 92.0
    assert KillProcess in kinds(agent.tick(stuck(2.0), 92.0))
    fault = agent.slots[S0].state.fault
    assert fault is not None
    assert fault.kind is FaultKind.HARD_HANG


def test_without_limits_nobody_looks() -> None:
    agent = running(msgspec.structs.replace(SETTINGS, soft_timeout=OFF, hard_timeout=OFF))
    assert agent.deadline() == OFF


def test_observe_only_tells_and_does_nothing() -> None:
    agent = running(msgspec.structs.replace(SETTINGS, observe_only=True))
    actions = agent.tick(stuck(2.0), 100.0)
    assert kinds(actions) == [Write]
    assert agent.slots[S0].state.fault is None


def test_a_process_that_never_reaches_the_gate_is_killed() -> None:
    agent = AgentMachine(AgentName("n0"), "job", 1, SETTINGS)
    agent.start(0.0)
    assert agent.deadline() == SETTINGS.startup_timeout
    [kill] = agent.tick({}, SETTINGS.startup_timeout)[:1]
    assert isinstance(kill, KillProcess)
    assert "startup_timeout" in kill.why


def test_a_kill_is_for_one_process_only_and_the_next_one_is_spawned_when_it_is_gone() -> None:
    agent = running()
    order = msgspec.structs.replace(run_order(0), kill=(Kill(S0, 1, "late"), Kill(S1, 7, "late")), lives={S0: 2})
    kills = [action for action in agent.directed(1, order, 3.0) if isinstance(action, KillProcess)]
    assert [(kill.slot, kill.life) for kill in kills] == [(S0, 1)]
    actions = agent.exited(S0, 1, ExitRecord(-9), 5, 4.0)
    assert Spawn(S0, 2, spare=True) in actions
    [told] = [action for action in actions if isinstance(action, Tell)]
    assert [(state.life, state.stage) for state in told.states] == [(1, Stage.GONE), (2, Stage.STARTING)]
    assert told.states[0].exit == ExitRecord(-9, killed_by="late")
    assert agent.rank_said(S0, 1, Returned(0), 5, 4.1) == [], "the dead say nothing"


def test_a_process_outside_that_ends_is_no_fault() -> None:
    agent = running()
    agent.rank_said(S0, 1, Returned(0), 5, 3.0)
    agent.directed(1, Directive(0, Phase.RELEASE, completed=1), 3.1)
    agent.dying(S0, 1, 5)
    assert agent.slots[S0].state.fault is None


def test_an_agent_without_a_controller_goes_on_until_controller_timeout() -> None:
    agent = running(msgspec.structs.replace(SETTINGS, soft_timeout=OFF, hard_timeout=OFF))
    agent.link_lost(10.0)
    assert agent.deadline() == 610.0
    agent.welcomed(2, agent.settings)
    agent.link_lost(20.0)
    actions = agent.tick({}, 620.0)
    [finish] = said(actions)
    assert isinstance(finish, Finish)
    assert finish.code == 94
    assert said(agent.directed(3, run_order(4), 621.0)) == [], "there is no way back"


def test_the_first_stop_asks_and_the_second_ends() -> None:
    agent = running()
    assert kinds(agent.stop(143, "SIGTERM", 3.0)) == [AskStop]
    actions = agent.stop(143, "SIGTERM", 3.5)
    assert [message.code for message in said(actions) if isinstance(message, Finish)] == [143]


def test_a_stop_that_was_answered_does_not_cut_the_grace_short() -> None:
    agent = running(msgspec.structs.replace(SETTINGS, termination_grace_time=30.0))
    agent.stop(143, "SIGTERM", 3.0)
    agent.directed(1, Directive(0, Phase.END, code=143), 3.1)
    assert agent.deadline() == 33.1
    assert agent.tick({}, 8.0) == []


def held_order(stop_step: int = -1) -> Directive:
    return msgspec.structs.replace(run_order(0), hold=True, stop_step=stop_step)


def test_a_held_round_is_told_once_and_answered_once() -> None:
    agent = running()
    assert said(agent.directed(1, held_order(), 3.0)) == [Hold(0)]
    assert said(agent.directed(1, held_order(), 3.1)) == []
    agent.rank_said(S0, 1, Passed(7, 1), -1, 3.2)
    assert agent.slots[S0].state.passed is None, "that was of another round"
    assert kinds(agent.rank_said(S0, 1, Passed(0, 12), -1, 3.3)) == [Tell]
    assert agent.rank_said(S0, 1, Passed(0, 13), -1, 3.4) == []
    assert agent.slots[S0].state.passed == 12
    assert said(agent.directed(2, held_order(14), 3.5)) == [StopAt(0, 14)]
    assert said(agent.directed(2, held_order(14), 3.6)) == []


def test_who_has_returned_is_asked_too_and_whoever_is_out_is_not() -> None:
    agent = running()
    agent.rank_said(S0, 1, Returned(0), -1, 2.5)
    agent.exited(S1, 1, ExitRecord(-9), 5, 2.6)
    actions = agent.directed(1, held_order(9), 3.0)
    assert said(actions, S0) == [Hold(0), StopAt(0, 9)]
    assert said(actions, S1) == []


def test_an_answer_is_forgotten_with_its_round() -> None:
    agent = running()
    agent.directed(1, held_order(), 3.0)
    agent.rank_said(S0, 1, Passed(0, 12), -1, 3.1)
    agent.directed(1, Directive(0, Phase.ABORT, cause="x"), 3.2)
    agent.rank_said(S0, 1, Ready(round=0, port=9000), -1, 3.3)
    agent.directed(1, run_order(1), 3.4)
    agent.rank_said(S0, 1, Entered(1), -1, 3.5)
    assert agent.slots[S0].state.passed is None


def test_a_held_round_is_an_answer_to_a_stop() -> None:
    agent = running()
    agent.stop(143, "SIGTERM", 3.0)
    agent.directed(1, held_order(), 3.1)
    assert all(not isinstance(a, Leave | Write) for a in agent.tick({}, 20.0))
    assert agent.directive.phase is Phase.RUN
    actions = agent.stop(143, "SIGTERM", 21.0)
    assert [message.code for message in said(actions) if isinstance(message, Finish)] == [143]


def test_a_first_stop_of_a_job_that_is_held_asks_nobody() -> None:
    agent = running()
    agent.directed(1, held_order(), 3.0)
    assert agent.stop(143, "SIGTERM", 3.1) == []
    assert agent.directive.phase is Phase.RUN
    assert Finish in [type(message) for message in said(agent.stop(143, "SIGTERM", 3.2))]


def test_an_agent_leaves_when_all_its_processes_are_gone() -> None:
    agent = running()
    agent.directed(1, Directive(0, Phase.END, cause="done", code=7), 3.0)
    assert Leave not in kinds(agent.exited(S0, 1, ExitRecord(7), 5, 3.1))
    actions = agent.exited(S1, 1, ExitRecord(7), 5, 3.2)
    assert Leave(7, "done") in actions


def test_a_slow_way_back_to_the_gate_is_told() -> None:
    agent = machine()
    actions = agent.rank_said(S0, 1, Ready(port=9001, timings={"abort": 0.01, "finalize": 7.25}), -1, 2.0)
    assert [a.text for a in actions if isinstance(a, Write)] == ["came back to the gate slowly: finalize 7.2 s"]


def test_who_has_stood_nearly_as_long_is_found_to_hang_with_the_first() -> None:
    """The other comes to the gate when the round ends, and would then have nothing to be blamed for."""
    agent = running()
    waits = Progress(auto=10.0, ping=10.0, pause_until=0.0, step=5)
    spins = Progress(auto=70.0, ping=12.0, pause_until=0.0, step=5)
    agent.tick({S0: waits, S1: spins}, 62.0)
    assert set(agent.to_judge(70.0)) == {S0, S1}
    agent.tick({S0: waits, S1: spins}, 70.0)
    found = {slot: local.state.fault for slot, local in agent.slots.items()}
    assert {slot: fault.interpreter_runs for slot, fault in found.items() if fault} == {S0: False, S1: True}


SAVE = SaveId(5, 0xAB, 0)
ORDERS = DepotOrders(publish=(Publish(SAVE, 2, b"x"),))


def test_what_became_of_a_rank_s_shard_is_told_even_if_the_rank_is_gone_meanwhile() -> None:
    agent = running()
    facts = (Fact(SAVE, What.WRITTEN, Tier.DURABLE, 0),)
    assert agent.rank_said(S0, 1, Facts(facts), 5, 3.0) == [TellSaved(facts)]
    agent.dying(S0, 1, 5)
    assert agent.rank_said(S0, 1, Facts(facts), 5, 3.1) == [TellSaved(facts)]
    agent.exited(S0, 1, ExitRecord(-9), 5, 3.2)
    assert agent.rank_said(S0, 1, Facts(facts), 5, 3.3) == [TellSaved(facts)]


def test_a_seat_comes_with_where_to_resume_from() -> None:
    agent = machine()
    resume = Resume(SAVE, 2, durable=True)
    order = msgspec.structs.replace(run_order(0), epoch=0xAB, resume=resume)
    (enter,) = said(agent.directed(1, order, 2.0))
    assert isinstance(enter, Enter)
    assert (enter.epoch, enter.resume) == (0xAB, resume)


def test_the_depot_is_told_when_its_orders_change() -> None:
    agent = running()
    order = msgspec.structs.replace(run_order(0), depot=ORDERS)
    assert OrderDepot(ORDERS) in agent.directed(1, order, 3.0)
    assert agent.directed(1, order, 3.1) == []
    assert OrderDepot(NO_ORDERS) in agent.directed(1, run_order(0), 3.2)


def test_a_new_controller_has_ordered_nothing_yet() -> None:
    agent = running()
    order = msgspec.structs.replace(run_order(0), depot=ORDERS)
    agent.directed(1, order, 3.0)
    assert agent.welcomed(1, SETTINGS) == [], "the same controller, after a cut"
    assert agent.welcomed(2, SETTINGS) == [OrderDepot(NO_ORDERS)]
    assert OrderDepot(ORDERS) in agent.directed(2, order, 3.1)


def test_an_agent_that_ends_by_itself_lets_its_depot_finish_what_is_ordered() -> None:
    agent = running()
    agent.directed(1, msgspec.structs.replace(run_order(0), depot=ORDERS), 3.0)
    assert OrderDepot not in kinds(agent.refused("no", 3.1))
