"""Resume: one save for all ranks, the greatest step of everything that is complete and can be reached."""

import msgspec
import pytest

from perdure.controller.core.choice import PLACES_LIMIT
from perdure.controller.core.events import Attached
from perdure.protocol.checkpoints import Place, Resume, SaveId, What, digest_of_save, holders_of
from perdure.protocol.codec import encode_rank
from perdure.protocol.exit_codes import ExitCode
from perdure.protocol.names import ProcessId
from perdure.protocol.rank_messages import RANK_MESSAGE_LIMIT, Enter

from .bank import BOTH, DURABLE, LOCAL, Bank


def with_step(step: int) -> Bank:
    return Bank((2, 2), msgspec.structs.replace(BOTH, ckpt_step=step))


def test_a_newer_local_save_wins_over_an_older_durable_one() -> None:
    bank = Bank().open()
    bank.published(100)
    save = bank.written(150, LOCAL)
    bank.written(175, LOCAL, ranks=(0, 1, 2))
    bank.restart()
    assert bank.resumed == (150, "local")
    assert "resumes from step 150 (local tier)" in bank.told("recovered")[-1]
    resume = bank.resume("n1")
    assert resume is not None
    assert not resume.durable
    assert resume.world_size == 4
    assert resume.digest == digest_of_save(f"{save}{rank}".encode() for rank in range(4))


def test_a_newer_durable_one_wins_over_an_older_local_one() -> None:
    bank = Bank().open()
    bank.written(50, LOCAL)
    bank.published(100)
    bank.restart()
    assert bank.resumed == (100, "durable")


def test_of_one_save_the_local_tier_is_preferred_and_the_other_named() -> None:
    bank = Bank().open()
    bank.written(100, LOCAL)
    bank.published(100)
    bank.restart()
    resume = bank.resume("n0")
    assert resume is not None
    assert (resume.local, resume.durable) == (True, True)


def test_each_node_is_told_the_shards_that_it_lacks() -> None:
    bank = Bank().open()
    bank.written(100, LOCAL)
    bank.restart()
    told = {agent: bank.resume(agent) for agent in bank.nodes}
    assert [told["n0"] and told["n0"].places, told["n1"] and told["n1"].places] == [
        (Place(2, "host1", "tcp://n1"), Place(3, "host1", "tcp://n1")),
        (Place(0, "host0", "tcp://n0"), Place(1, "host0", "tcp://n0")),
    ]


def test_of_a_shard_that_has_copies_its_own_node_is_told_them_too() -> None:
    """Its own may turn out to be bad; that its own should be there is told as well."""
    bank = Bank(settings=msgspec.structs.replace(BOTH, replication=1)).open()
    save = bank.written(100, LOCAL)
    bank.say("n1", bank.fact(save, What.WRITTEN, LOCAL, 0, "host1"))
    bank.restart()
    resume = bank.resume("n0")
    assert resume is not None
    places = {(place.rank, place.node) for place in resume.places}
    assert places == {(0, "host0"), (0, "host1"), (2, "host1"), (3, "host1")}, "1 is on its own node alone"


def test_a_lost_nodes_shards_are_read_from_their_copies() -> None:
    bank = Bank((2, 2, 2), msgspec.structs.replace(BOTH, replication=1)).open()
    save = bank.written(100, LOCAL)
    bank.published(50)
    for rank in (4, 5):
        bank.say("n0", bank.fact(save, What.WRITTEN, LOCAL, rank, "host0"))
    bank.silent("n2")
    bank.settle()
    assert bank.resumed == (100, "local")
    resume = bank.resume("n1")
    assert resume is not None
    assert {place.rank: place.node for place in resume.places} == {0: "host0", 1: "host0", 4: "host0", 5: "host0"}


def test_without_copies_a_lost_node_costs_its_local_tier() -> None:
    bank = Bank((2, 2, 2)).open()
    bank.published(50)
    bank.written(100, LOCAL)
    bank.silent("n2")
    bank.settle()
    assert bank.resumed == (50, "durable")


def test_what_a_new_process_of_a_node_has_not_found_is_not_there() -> None:
    bank = Bank().open()
    bank.written(100, LOCAL)
    bank.link_lost("n1")
    bank.do(Attached(bank.hello("n1", process=ProcessId("boot2", 99, 9))))
    bank.take_stock("n1")
    bank.gate(*bank.states)
    bank.enter(*bank.seats)
    assert bank.resumed is None
    assert "no checkpoint to resume from" in bank.told("recovered")[-1]


def test_a_job_goes_on_where_the_last_one_ended() -> None:
    bank = Bank()
    save = SaveId(70, 1, 2)
    bank.stock = {
        "n0": [bank.found(50), bank.fact(save, What.WRITTEN, LOCAL, 0, "host0", world_size=2)],
        "n1": [bank.found(50), bank.fact(save, What.WRITTEN, LOCAL, 1, "host1", world_size=2)],
    }
    bank.open()
    assert bank.resumed == (70, "local")
    resume = bank.resume()
    assert resume is not None
    assert resume.digest == b"", "this job did not see it written"
    assert bank.told("running")[0].endswith("; resumes from step 70 (local tier)")


def test_a_bad_shard_leaves_its_copy_then_the_other_tier_then_an_older_step() -> None:
    bank = Bank((1, 1, 1), msgspec.structs.replace(BOTH, replication=1)).open()
    bank.published(50)
    bank.published(100)
    save = bank.written(100, LOCAL)
    bank.say("n1", bank.fact(save, What.WRITTEN, LOCAL, 0, "host1"))
    bank.bad(save, LOCAL, 0, "host0")
    bank.restart()
    resume = bank.resume("n0")
    assert resume is not None
    assert Place(0, "host1", "tcp://n1") in resume.places
    bank.bad(save, LOCAL, 0, "host1")
    bank.restart("n2/0")
    assert bank.resumed == (100, "durable")
    bank.bad(save, DURABLE, 2)
    bank.restart("n0/0")
    assert bank.resumed == (50, "durable")
    assert len(bank.told("bad_save")) == 3


def test_where_too_many_shards_are_elsewhere_a_node_is_told_of_those_of_its_own_ranks() -> None:
    slots = PLACES_LIMIT // 2 + 1
    settings = msgspec.structs.replace(BOTH, replication=1)
    bank = Bank((slots, slots, slots, slots), settings).open()
    bank.written(100, LOCAL)
    save = bank.written(100, DURABLE)
    bank.restart("n1/0")
    resume = bank.resume("n1")
    assert resume is not None
    assert (resume.local, resume.partial, len(resume.places)) == (True, False, 4 * slots), "it is not published: all"
    bank.say("n0", bank.fact(save, What.PUBLISHED, DURABLE))
    bank.restart("n1/1")
    resume = bank.resume("n1")
    assert resume is not None
    assert (resume.local, resume.durable, resume.partial, resume.places) == (True, True, True, ())
    # A node that was lost comes back empty, and is told where the copies are of what its ranks had.
    first = slots
    bank.say("n2", *(bank.fact(save, What.WRITTEN, LOCAL, rank, "host2") for rank in range(first, 2 * slots)))
    bank.link_lost("n1")
    bank.do(Attached(bank.hello("n1", process=ProcessId("boot2", 99, 9))))
    bank.take_stock("n1")
    bank.gate(*bank.states)
    bank.enter(*bank.seats)
    resume = bank.resume("n1")
    assert resume is not None
    assert resume.partial
    seated = [rank for rank, seat in enumerate(bank.seats) if seat.startswith("n1/")]
    assert [place.rank for place in resume.places] == [rank for rank in seated if first <= rank < 2 * slots]
    assert {place.node for place in resume.places} == {"host2"}
    assert len(msgspec.msgpack.encode(resume)) < 200


@pytest.mark.parametrize("copies", [1, 2])
def test_where_ten_thousand_shards_are_is_told_in_one_packet(copies: int) -> None:
    """Of a save that is on the local tier alone, whose shards may be wanted by anybody."""
    places = [
        Place(rank, f"gpu-node-{(rank // 8 + copy) % 1280:05}", f"tcp://10.200.{rank // 2048}.{rank // 8 % 256}:50123")
        for rank in range(10_240)
        for copy in range(copies)
    ]
    resume = Resume(SaveId(1, 2, 3), 10_240, b"x" * 16, local=True, holders=holders_of(places))
    first: dict[int, str] = {}
    for place in resume.places:
        first.setdefault(place.rank, place.node)
    assert first == {place.rank: place.node for place in reversed(places)}
    assert sorted(resume.places, key=repr) == sorted(places, key=repr)
    if copies == 1:
        enter = Enter(7, 3, 10_240, 3, 8, "10.0.0.1", 29500, "job", 1, resume)
        assert len(encode_rank(enter)) <= RANK_MESSAGE_LIMIT


# ---- ckpt_step ------------------------------------------------------------------------------------------------


def test_an_explicit_step_wins_over_newer_ones() -> None:
    bank = with_step(50)
    bank.stock["n0"] = [bank.found(50), bank.found(100)]
    bank.open()
    assert bank.resumed == (50, "durable")
    bank.restart()
    assert bank.resumed == (50, "durable"), "step 100 is of another past"
    bank.published(60)
    bank.restart()
    assert bank.resumed == (60, "durable")


def test_an_explicit_step_that_is_not_there_ends_the_job_and_tells_those_that_are() -> None:
    bank = with_step(70)
    bank.stock["n0"] = [bank.found(50), bank.found(100)]
    bank.attach()
    for agent in bank.nodes:
        bank.take_stock(agent)
    bank.gate(*bank.states)
    assert bank.ending == (
        ExitCode.FAILED,
        "no complete checkpoint of step 70 (ckpt_step); there are steps 50, 100",
    )


@pytest.mark.parametrize("tier", [LOCAL, DURABLE])
def test_if_all_that_is_left_is_bad_the_job_ends(tier: object) -> None:
    bank = Bank().open()
    save = bank.written(100, LOCAL) if tier is LOCAL else bank.published(100)
    bank.bad(save, LOCAL if tier is LOCAL else DURABLE)
    bank.again()
    code, reason = bank.ending
    assert code == ExitCode.CHECKPOINTS_SPENT
    assert "steps 100" in reason
