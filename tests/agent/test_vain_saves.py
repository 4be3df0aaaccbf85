"""Which ranks an agent tells of saves that cannot be complete any more: those that run the round, each once."""

import msgspec

from perdure.protocol.checkpoints import SaveId
from perdure.protocol.messages import Directive, Phase
from perdure.protocol.rank_messages import Drop, Enter, Entered, Interrupt, Ready, Returned

from .test_machine import S0, S1, SETTINGS, machine, run_order, running, said

FIRST, SECOND, THIRD = (SaveId(step, 7, 0) for step in (10, 20, 30))


def giving_up(*saves: SaveId, round: int = 0) -> Directive:
    return msgspec.structs.replace(run_order(round), vain=saves)


def test_each_rank_is_told_once_of_each_save() -> None:
    agent = running()
    actions = agent.directed(1, giving_up(FIRST), 3.0)
    assert [said(actions, slot) for slot in (S0, S1)] == [[Drop((FIRST,))]] * 2
    assert said(agent.directed(1, giving_up(FIRST), 3.1)) == []
    assert said(agent.directed(1, giving_up(FIRST, SECOND), 3.2)) == [Drop((SECOND,))]
    assert said(agent.directed(1, giving_up(SECOND), 3.3)) == []
    assert said(agent.directed(1, giving_up(SECOND, THIRD), 3.4)) == [Drop((THIRD,))]
    agent.welcomed(2, SETTINGS)
    assert said(agent.directed(2, giving_up(SECOND, THIRD), 3.5)) == []


def test_a_rank_is_told_when_it_has_entered_and_until_all_have_returned() -> None:
    agent = machine()
    assert [type(message) for message in said(agent.directed(1, giving_up(FIRST), 2.0))] == [Enter]
    assert said(agent.rank_said(S0, 1, Entered(0), -1, 2.1)) == [Drop((FIRST,))]
    agent.rank_said(S0, 1, Returned(0), 5, 2.2)
    actions = agent.directed(1, giving_up(FIRST, SECOND), 2.3)
    assert said(actions) == [Drop((SECOND,))]
    assert said(actions, S1) == [], "it is on its way in"
    assert said(agent.rank_said(S1, 1, Entered(0), -1, 2.4), S1) == [Drop((FIRST, SECOND))]


def test_it_is_forgotten_with_the_round() -> None:
    agent = running()
    agent.directed(1, giving_up(FIRST), 3.0)
    assert [type(m) for m in said(agent.directed(1, Directive(0, Phase.ABORT, cause="a fault"), 4.0))] == [Interrupt]
    agent.rank_said(S0, 1, Ready(round=0, port=9000), 5, 4.1)
    again = SaveId(10, 7, 1)
    assert [type(message) for message in said(agent.directed(1, giving_up(again, round=1), 5.0))] == [Enter]
    assert said(agent.rank_said(S0, 1, Entered(1), -1, 5.1)) == [Drop((again,))]


def test_a_rank_that_still_runs_another_round_is_not_told() -> None:
    agent = running()
    told = said(agent.directed(1, giving_up(SaveId(10, 7, 1), round=1), 3.0))
    assert [type(message) for message in told] == [Interrupt]
