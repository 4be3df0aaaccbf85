"""Retention: old saves are deleted by number, and never the last good one, nor one that is being read."""

import msgspec

from perdure.controller.core.events import Attached
from perdure.protocol.checkpoints import SaveId, What
from perdure.protocol.names import ProcessId

from .bank import BOTH, DURABLE, LOCAL, Bank


def keeping(count: int | None) -> Bank:
    return Bank((2, 2), msgspec.structs.replace(BOTH, most_recent_k=count))


def test_the_newest_k_published_ones_stay() -> None:
    bank = keeping(2).open()
    for step in (100, 200, 300, 400):
        bank.published(step)
    assert bank.pruned("n0", DURABLE) == [100, 200]
    bank.say("n0", bank.fact(bank.save(100), What.PRUNED, DURABLE))
    assert bank.pruned("n0", DURABLE) == [200]


def test_all_stay_if_no_number_is_given() -> None:
    bank = keeping(None).open()
    for step in (100, 200, 300):
        bank.published(step)
    assert bank.pruned("n0", DURABLE) == []


def test_nothing_is_deleted_for_a_save_that_is_not_published_yet() -> None:
    bank = keeping(1).open()
    bank.published(100)
    save = bank.written(200, DURABLE)
    assert bank.pruned("n0", DURABLE) == []
    for agent in ("n0", "n1"):
        bank.say(agent, bank.fact(save, What.UNPUBLISHED, DURABLE, why="EIO"))
    assert bank.pruned("n0", DURABLE) == [] == bank.pruned("n1", DURABLE)


def test_one_that_is_bad_does_not_count() -> None:
    bank = keeping(1).open()
    bank.published(100)
    bank.published(200)
    assert bank.pruned("n0", DURABLE) == [100]
    bank.bad(bank.save(200), DURABLE)
    bank.published(300)
    assert bank.pruned("n0", DURABLE) == [100, 200]


def test_with_the_newest_bad_an_older_one_stays() -> None:
    bank = keeping(2).open()
    for step in (100, 200):
        bank.published(step)
    bank.bad(bank.save(200), DURABLE)
    bank.published(300)
    assert bank.pruned("n0", DURABLE) == []


def test_what_is_read_stays_until_the_round_has_saved_something() -> None:
    bank = keeping(1)
    bank.stock["n0"] = [bank.found(100)]
    bank.open()
    assert bank.resumed == (100, "durable")
    bank.fault("n1/0")
    late = bank.written(200, DURABLE)
    bank.settle()
    assert bank.resumed == (100, "durable")
    bank.say("n0", bank.fact(late, What.PUBLISHED, DURABLE))
    assert bank.pruned("n0", DURABLE) == [], "ranks are reading step 100"
    bank.published(300)
    assert bank.pruned("n0", DURABLE) == [100, 200]


def test_newest_means_youngest_not_furthest() -> None:
    """After a fall back to an older step, what is saved then has smaller steps than what was found bad."""
    bank = keeping(1)
    bank.settings = msgspec.structs.replace(bank.settings, ckpt_step=50)
    bank.job.settings = bank.settings
    bank.stock["n0"] = [bank.found(50), bank.found(500)]
    bank.open()
    bank.published(60)
    assert bank.pruned("n0", DURABLE) == [50, 500]


def test_a_failed_save_goes_when_a_newer_one_is_published() -> None:
    bank = keeping(None).open()
    bank.written(100, DURABLE, ranks=(0, 1))
    bank.say("n1", bank.fact(bank.save(100), What.FAILED, DURABLE, 2, why="ENOSPC"))
    bank.written(150, DURABLE, ranks=(0, 1))  # still being written
    bank.published(200)
    assert bank.pruned("n0", DURABLE) == [100]


def test_two_complete_ones_stay_on_the_local_tier() -> None:
    bank = keeping(None).open()
    for step in (10, 20):
        bank.written(step, LOCAL)
    bank.written(25, LOCAL, ranks=(0, 1))
    assert bank.pruned("n0", LOCAL) == []
    bank.written(30, LOCAL)
    assert bank.pruned("n0", LOCAL) == bank.pruned("n1", LOCAL) == [10], "step 25 may still be finished"
    bank.say("n1", bank.fact(bank.save(10), What.PRUNED, LOCAL, node="host1"))
    assert bank.pruned("n0", LOCAL) == [10]
    assert bank.pruned("n1", LOCAL) == []


def test_unfinished_local_ones_go_with_their_round() -> None:
    bank = keeping(None).open()
    bank.written(10, LOCAL, ranks=(0, 1))
    bank.restart()
    assert bank.pruned("n0", LOCAL) == [10]
    assert bank.pruned("n1", LOCAL) == []


def test_what_comes_to_light_on_a_node_that_was_away_goes_too() -> None:
    bank = keeping(None).open()
    for step in (10, 20, 30):
        bank.written(step, LOCAL)
    bank.link_lost("n1")
    hello = bank.hello("n1", process=ProcessId("boot", 99, 9))
    bank.do(Attached(hello))
    assert bank.pruned("n1", LOCAL) == [], "nobody knows what lies there"
    shards = [bank.fact(bank.save(step), What.WRITTEN, LOCAL, rank, "host1") for step in (10, 20) for rank in (2, 3)]
    bank.stock["n1"] = shards
    bank.take_stock("n1")
    assert bank.pruned("n1", LOCAL) == [10]


def test_an_old_stock_does_not_bring_back_what_is_deleted() -> None:
    bank = keeping(1).open()
    bank.published(100)
    bank.published(200)
    bank.say("n0", bank.fact(bank.save(100), What.PRUNED, DURABLE))
    bank.stock["n1"] = [Bank.found(bank, 100, save=SaveId(100, 0, 0))]
    bank.take_stock("n1")
    bank.bad(bank.save(200), DURABLE)
    bank.restart()
    assert bank.told("ending"), "step 100 is gone, and step 200 is bad"
