"""Commit: a save is published once, when all shards of a present round are written, by somebody who is there."""

import msgspec
import pytest

from perdure.controller.core.commits import STOCK_TIMEOUT_S
from perdure.controller.core.events import Opened, Stocked
from perdure.controller.core.job import Job
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.checkpoints import NO_ORDERS, Publish, SaveId, What, digest_of_save
from perdure.protocol.exit_codes import ExitCode
from perdure.protocol.messages import Phase, Stage
from perdure.protocol.names import AgentName

from .bank import BOTH, DURABLE, LOCAL, Bank
from .test_job_ends import complete


def test_the_last_shard_makes_the_save_published_by_the_agent_of_rank_0() -> None:
    bank = Bank().open()
    save = bank.written(100, DURABLE, ranks=(3, 1, 0))
    assert bank.orders("n0") == NO_ORDERS
    bank.written(100, DURABLE, ranks=(2,))
    digest = digest_of_save(f"{save}{rank}".encode() for rank in range(4))
    assert bank.orders("n0").publish == (Publish(save, 4, digest),)
    assert bank.orders("n1") == NO_ORDERS
    bank.say("n1", bank.fact(save, What.PUBLISHED, DURABLE))
    assert bank.orders("n0") == NO_ORDERS
    assert bank.told("checkpoint") == ["step 100 (round 0) is published: 4 ranks, 4.0 kB; durable after 0.50 s"]


def test_facts_may_come_twice_and_in_any_order() -> None:
    bank = Bank().open()
    for ranks in ((3,), (3,), (0, 0, 1), (3, 2), (1, 2)):
        bank.written(100, DURABLE, ranks)
    save = bank.save(100)
    assert len(bank.orders("n0").publish) == 1
    for _ in range(2):
        bank.say("n0", bank.fact(save, What.PUBLISHED, DURABLE))
    bank.written(100, DURABLE)
    assert bank.orders("n0") == NO_ORDERS
    assert len(bank.told("checkpoint")) == 1


@pytest.mark.parametrize("missing", ["rank", "world", "epoch"])
def test_what_is_not_of_this_world_completes_nothing(missing: str) -> None:
    bank = Bank().open()
    save = bank.written(100, DURABLE, ranks=(0, 1, 2))
    changes = {"rank": {"rank": 4}, "world": {"rank": 3, "world_size": 8}, "epoch": {"rank": 3}}[missing]
    other = SaveId(100, 9, 0) if missing == "epoch" else save
    bank.say("n1", msgspec.structs.replace(bank.fact(other, What.WRITTEN, DURABLE), **changes))
    assert bank.orders("n0") == NO_ORDERS


def test_a_fact_of_a_round_that_is_over_never_publishes() -> None:
    bank = Bank().open()
    bank.written(100, DURABLE, ranks=(0, 1, 2))
    bank.restart()
    assert bank.pruned("n0", DURABLE) == [100]
    bank.say("n0", bank.fact(bank.save(100, 0), What.PRUNED, DURABLE))
    assert bank.orders("n0") == NO_ORDERS
    late = bank.written(100, DURABLE, ranks=(3,), round=0)
    assert bank.orders("n0").publish == ()
    assert bank.pruned("n0", DURABLE) == [100], "its writer has brought the folder back"
    bank.say("n0", bank.fact(late, What.PRUNED, DURABLE))
    bank.published(100)
    assert bank.told("checkpoint")[0].startswith("step 100 (round 1) is published")


def test_what_is_complete_before_the_next_plan_is_published_though_its_round_is_over() -> None:
    bank = Bank().open()
    bank.fault("n1/0")
    assert bank.phase is JobPhase.ABORTING
    save = bank.written(100, DURABLE)
    bank.settle()
    assert bank.index == 1
    assert [order.save for order in bank.orders("n0").publish] == [save]
    assert bank.resumed is None, "it is not published yet, and nobody waits for that"
    bank.say("n0", bank.fact(save, What.PUBLISHED, DURABLE))
    bank.restart()
    assert bank.resumed == (100, "durable")


def test_the_order_goes_to_another_agent_when_the_first_one_is_lost() -> None:
    bank = Bank((1, 1, 1)).open()
    save = bank.written(100, DURABLE)
    bank.silent("n0")
    assert [order.save for order in bank.orders("n1").publish] == [save]
    bank.settle()
    bank.say("n1", bank.fact(save, What.PUBLISHED, DURABLE))
    assert bank.orders("n1") == NO_ORDERS
    assert bank.told("checkpoint")


def test_it_is_tried_by_two_others_and_then_given_up() -> None:
    bank = Bank((1, 1, 1, 1)).open()
    save = bank.written(100, DURABLE)
    for agent in ("n0", "n0", "n1", "n2"):
        bank.say(agent, bank.fact(save, What.UNPUBLISHED, DURABLE, why="EIO"))
    assert all(bank.orders(agent).publish == () for agent in bank.nodes)
    told = bank.told("unpublished")
    assert [line.rpartition("; ")[2] for line in told[:2]] == ["agent n1 tries", "agent n2 tries"]
    assert len(told) == 3
    assert "given up" in told[2]
    bank.restart()
    assert bank.resumed is None


def test_a_step_is_not_published_twice_by_one_job() -> None:
    bank = Bank().open()
    bank.published(100)
    bank.restart()
    again = bank.written(100, DURABLE)
    assert bank.orders("n0").publish == ()
    assert [order.save for order in bank.orders("n0").prune] == [again]


def test_a_second_save_of_a_step_waits_for_the_first_and_takes_its_place_if_that_fails() -> None:
    bank = Bank((2,)).open()
    first = bank.written(100, DURABLE)
    bank.restart("n0/1")
    second = bank.written(100, DURABLE)
    assert [order.save for order in bank.orders("n0").publish] == [first]
    bank.say("n0", bank.fact(first, What.UNPUBLISHED, DURABLE, why="EIO"))
    assert [order.save for order in bank.orders("n0").publish] == [second]


def test_a_save_gives_way_to_one_of_an_earlier_job_that_has_its_name() -> None:
    bank = Bank()
    bank.stock["n0"] = [bank.found(100), bank.found(50)]
    bank.open()
    ours = bank.written(100, DURABLE)
    assert [order.save for order in bank.orders("n0").publish] == [ours]
    bank.say("n0", bank.found(100))
    assert bank.orders("n0").publish == ()
    assert bank.told("checkpoint") == []


def test_failures_are_told_once_for_each_reason() -> None:
    bank = Bank((2, 2)).open()
    save = bank.save(100)
    for rank in range(4):
        bank.say("n0", bank.fact(save, What.FAILED, DURABLE, rank, why="ENOSPC"))
    assert len(bank.told("save_failed")) == 1
    assert "rank 0 could not write: ENOSPC" in bank.told("save_failed")[0]
    for rank in range(40):
        bank.say("n0", bank.fact(save, What.FAILED, DURABLE, rank % 4, why=f"EIO in file {rank}"))
    assert len(bank.told("save_failed")) == 4


@pytest.mark.parametrize("last", ["written", "failed"])
def test_a_save_that_a_rank_has_failed_or_skipped_is_deleted_when_all_have_answered(last: str) -> None:
    bank = Bank((2, 2)).open()
    save = bank.save(100)
    first, then = ((3,), (0, 1, 2)) if last == "written" else ((0, 1, 2), (3,))
    for ranks in (first, then):
        assert bank.pruned("n0", DURABLE) == []
        for rank in ranks:
            if rank == 3:
                bank.say("n1", bank.fact(save, What.FAILED, DURABLE, rank, why="skipped"))
            else:
                bank.written(100, DURABLE, (rank,))
    assert bank.pruned("n0", DURABLE) == [100]
    assert bank.orders("n0").publish == ()


def test_what_an_earlier_job_has_left_unfinished_is_deleted() -> None:
    bank = Bank()
    bank.job.epoch = 7
    left, ours = SaveId(100, 6, 2), SaveId(100, 7, 0)
    bank.stock["n0"] = [bank.fact(save, What.UNPUBLISHED, DURABLE, why="unfinished") for save in (left, ours)]
    bank.open()
    assert [order.save for order in bank.orders("n0").prune] == [left]


def test_nothing_begins_anew_while_nobody_has_seen_the_durable_tier() -> None:
    bank = Bank()
    bank.attach()
    for agent in bank.nodes:
        bank.do(Stocked(AgentName(agent), f"tcp://{agent}", (), durable=False))
    bank.gate(*bank.states)
    assert bank.phase is JobPhase.FORMING
    bank.wait()
    assert bank.job.code == ExitCode.NOT_FORMED
    assert "no agent could look through /save within" in bank.job.reason


def test_the_epoch_is_the_first_controllers_wall_time_for_ever() -> None:
    bank = Bank()
    bank.job.epoch = 1_234
    bank.open()
    bank.do(Opened("job", 1, 2, 2, BOTH, 5_678.9))
    assert bank.job.epoch == 1_234
    bank.attach()
    assert {bank.order(agent).epoch for agent in bank.nodes} == {1_234}


def test_a_new_controller_gives_the_same_orders() -> None:
    bank = Bank().open()
    save = bank.written(100, DURABLE)
    bank.do(Opened("job", 1, 2, 2, BOTH))
    bank.attach()
    assert [order.save for order in bank.orders("n0").publish] == [save]


def test_a_journal_with_checkpoints_replays_to_the_bit() -> None:
    bank = Bank((2, 2), msgspec.structs.replace(BOTH, replication=1, most_recent_k=1)).open()
    for step in (100, 200, 300):
        bank.written(step, LOCAL)
        bank.published(step)
    bank.bad(bank.save(300), LOCAL, 1, "host0")
    bank.restart()
    bank.silent("n1")
    again = Job()
    assert [msgspec.msgpack.encode(again.on(event, now)) for now, event in bank.journal] == bank.answers


# ---- the first round waits for stock --------------------------------------------------------------------------


def test_the_first_round_waits_until_all_agents_have_taken_stock() -> None:
    bank = Bank()
    bank.attach()
    bank.gate(*bank.states)
    bank.take_stock("n0")
    assert bank.phase is JobPhase.FORMING
    bank.take_stock("n1")
    assert bank.phase is JobPhase.RUNNING
    assert bank.told("begins_anew") == ["no complete checkpoint was found: the training begins anew"]


def test_it_does_not_wait_for_ever() -> None:
    bank = Bank()
    bank.attach()
    bank.gate(*bank.states)
    bank.take_stock("n0")
    began = bank.now
    bank.wait()
    assert bank.phase is JobPhase.RUNNING
    assert bank.now - began == pytest.approx(STOCK_TIMEOUT_S, abs=0.1)
    assert "starting without the checkpoints of n1" in bank.told("stock_late")[0]


# ---- the end --------------------------------------------------------------------------------------------------


def leave(bank: Bank) -> None:
    for slot in bank.states:
        bank.report(slot, stage=Stage.OUTSIDE, functions=1)
        bank.gone(slot, 0)


def test_the_job_does_not_end_before_its_last_save_is_published() -> None:
    bank = Bank().open()
    complete(bank)
    save = bank.written(100, DURABLE)
    leave(bank)
    assert bank.phase is JobPhase.RELEASED
    assert bank.order("n0").phase is Phase.RELEASE
    bank.say("n0", bank.fact(save, What.PUBLISHED, DURABLE))
    assert bank.ending == (0, "completed")


def test_it_waits_no_longer_than_a_save_may_take() -> None:
    bank = Bank((2, 2), msgspec.structs.replace(BOTH, save_timeout=7.0)).open()
    complete(bank)
    bank.written(100, DURABLE)
    leave(bank)
    began = bank.now
    bank.wait()
    assert bank.now - began == pytest.approx(7.0, abs=0.1)
    assert bank.ending[0] == 0
    assert "steps 100" in bank.told("publish_late")[0]


# ---- copies ---------------------------------------------------------------------------------------------------


def test_each_shard_is_copied_to_another_group_and_all_nodes_bear_the_same() -> None:
    bank = Bank((1,) * 6, msgspec.structs.replace(BOTH, replication=1), per_group=3).open()
    save = bank.written(100, LOCAL)
    copies = {agent: bank.orders(agent).replicate for agent in bank.nodes}
    assert all(len(orders) == 1 for orders in copies.values())
    for agent, (order,) in copies.items():
        source = next(a for a, node in bank.nodes.items() if node == order.place.node)
        assert bank.groups[source] != bank.groups[agent]
        assert order.place.address == f"tcp://{source}"
    (order,) = copies["n0"]
    bank.say("n0", bank.fact(save, What.WRITTEN, LOCAL, order.place.rank, bank.nodes["n0"]))
    assert bank.orders("n0") == NO_ORDERS


def test_more_copies_than_other_nodes_is_one_each() -> None:
    bank = Bank((1, 1), msgspec.structs.replace(BOTH, replication=3)).open()
    bank.written(100, LOCAL)
    assert [len(bank.orders(agent).replicate) for agent in bank.nodes] == [1, 1]


def test_a_copy_that_fails_is_told_and_not_ordered_for_ever() -> None:
    bank = Bank((1, 1), msgspec.structs.replace(BOTH, replication=1)).open()
    save = bank.written(100, LOCAL)
    for _ in range(2):
        bank.say("n1", bank.fact(save, What.FAILED, LOCAL, 0, "host1", world_size=0, why="refused"))
    assert bank.orders("n1") == NO_ORDERS
    assert len(bank.told("save_failed")) == 1


def test_a_copy_that_fails_when_nobody_wants_it_any_more_is_no_failure_of_the_rank() -> None:
    bank = Bank((1, 1), msgspec.structs.replace(BOTH, replication=1)).open()
    save = bank.written(10, LOCAL)
    for step in (20, 30):
        bank.written(step, LOCAL)
    assert save not in [order.save for order in bank.orders("n1").replicate], "it is being deleted"
    bank.say("n1", bank.fact(save, What.FAILED, LOCAL, 0, "host1", world_size=0, why="it is gone"))
    assert bank.told("save_failed") == []


def test_what_a_restoring_rank_has_brought_to_its_node_is_a_copy_and_deleted_like_one() -> None:
    bank = Bank((1, 1)).open()
    save = bank.written(10, LOCAL)
    bank.restart()
    bank.say("n1", bank.fact(save, What.WRITTEN, LOCAL, 0, "host1"))
    bank.restart()
    resume = bank.resume("n0")
    assert resume is not None
    assert {(place.rank, place.node) for place in resume.places} == {(0, "host0"), (0, "host1"), (1, "host1")}
    for step in (20, 30):
        bank.written(step, LOCAL)
    assert all(bank.pruned(agent, LOCAL) == [10] for agent in bank.nodes)


def test_no_copies_are_made_of_a_lost_nodes_shards() -> None:
    bank = Bank((1, 1, 1), msgspec.structs.replace(BOTH, replication=1)).open()
    bank.written(100, LOCAL)
    bank.silent("n0")
    assert all(order.place.node != "host0" for agent in ("n1", "n2") for order in bank.orders(agent).replicate)


@pytest.mark.parametrize("of", ["an earlier job", "this job, and bad"])
def test_a_save_is_published_over_one_of_its_step(of: str) -> None:
    bank = Bank()
    if of == "an earlier job":
        old = SaveId(200, 1, 3)
        bank.stock["n0"] = [bank.found(200)]
        bank.open()
    else:
        bank.open().published(100)
        old = bank.published(200)
        bank.bad(old, DURABLE, 0)
        bank.restart()
    save = bank.written(200, DURABLE)
    [order] = bank.orders("n0").publish
    assert (order.save, order.over) == (save, old)
