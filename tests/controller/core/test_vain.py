"""What cannot be complete any more is given up by all ranks at once, and only that."""

import msgspec
import pytest

from perdure.controller.core.commands import Direct
from perdure.controller.core.events import Opened
from perdure.controller.core.rounds import JobPhase
from perdure.controller.core.vain import LISTED
from perdure.protocol.checkpoints import GIVEN_UP, SaveId, Tier, What
from perdure.protocol.messages import Phase
from perdure.protocol.settings import Settings

from .bank import BOTH, DURABLE, LOCAL, Bank
from .desk import RANK
from .test_job_ends import complete

BOTH_TIERS = (LOCAL, DURABLE)
SKIPPED = "skipped: both buffers are in use"


def failed(
    bank: Bank, step: int, rank: int = 3, tiers: tuple[Tier, ...] = BOTH_TIERS, *, why: str = SKIPPED, round: int = 0
) -> SaveId:
    """A rank says so, one tier after the other."""
    save = bank.save(step, round)
    agent = bank.seats[rank].split("/")[0]
    for tier in tiers:
        bank.say(agent, bank.fact(save, What.FAILED, tier, rank, bank.nodes[agent] if tier is LOCAL else "", why=why))
    return save


def vain(bank: Bank, agent: str = "n0") -> list[int]:
    """Steps that the agent's ranks are to give up."""
    return [save.step for save in bank.order(agent).vain]


def directed(bank: Bank) -> int:
    return sum(isinstance(each, Direct) for each in bank.commands)


def test_what_a_rank_skips_all_give_up_and_are_told_once() -> None:
    bank = Bank((2, 2)).open()
    bank.written(100, LOCAL, ranks=(0,))
    before = directed(bank)
    save = failed(bank, 100)
    assert [bank.order(agent).vain for agent in bank.nodes] == [(save,), (save,)]
    assert directed(bank) == before + 2
    for rank in (0, 1, 2):
        failed(bank, 100, rank, (DURABLE,) if rank == 0 else BOTH_TIERS, why=GIVEN_UP)
    assert bank.pruned("n0", DURABLE) == [100]
    assert bank.pruned("n0", LOCAL) == [100], "rank 0 had written it there"
    assert [line.partition(" tier")[0] for line in bank.told("save_failed")] == [
        "step 100 (round 0), local",
        "step 100 (round 0), durable",
    ], "that the others gave it up is no news"


def test_what_can_still_be_complete_somewhere_is_not_vain() -> None:
    bank = Bank((2, 2)).open()
    failed(bank, 100, tiers=(LOCAL,))
    failed(bank, 200, tiers=(DURABLE,), why="ENOSPC")
    bank.written(300, LOCAL)
    failed(bank, 300, tiers=(DURABLE,))
    assert vain(bank) == []
    failed(bank, 100, 0, tiers=(DURABLE,))
    assert vain(bank) == [100], "each tier lacks another rank's shard"
    bank.published(400)
    failed(bank, 400, tiers=(LOCAL,), why="ENOSPC")
    assert vain(bank) == [100]


@pytest.mark.parametrize(
    ("changes", "step", "tiers"),
    [
        ({"save": None}, 100, (LOCAL,)),
        ({"non_persistent_local_ckpt_dir": None}, 100, (DURABLE,)),
        ({"save_interval": 100, "non_persistent_save_interval": 10}, 110, (LOCAL,)),
        ({"save_interval": 100, "non_persistent_save_interval": 10}, 100, BOTH_TIERS),
        ({"save_interval": 100, "non_persistent_save_interval": 10}, 115, BOTH_TIERS),
    ],
)
def test_only_the_tiers_that_a_step_goes_to_count(
    changes: dict[str, object], step: int, tiers: tuple[Tier, ...]
) -> None:
    settings: Settings = msgspec.structs.replace(BOTH, **changes)
    bank = Bank((2, 2), settings).open()
    for tier in tiers:
        assert bank.job.commits.vain.listed == ()
        failed(bank, step, tiers=(tier,))
    assert vain(bank) == [step]


def test_nobody_is_told_when_all_have_failed_already() -> None:
    bank = Bank((1,), msgspec.structs.replace(RANK, save="/save")).open()
    before = directed(bank)
    failed(bank, 100, 0, (DURABLE,))
    assert vain(bank) == []
    assert bank.pruned("n0", DURABLE) == [100]
    assert directed(bank) == before + 1, "to delete it"


def test_a_copy_that_fails_makes_no_save_vain() -> None:
    bank = Bank((1, 1), msgspec.structs.replace(BOTH, save=None, replication=1)).open()
    save = bank.written(100, LOCAL, ranks=(0,))
    bank.say("n1", bank.fact(save, What.FAILED, LOCAL, 0, "host1", world_size=0, why="refused"))
    assert vain(bank) == []


def test_the_list_is_in_order_short_and_without_what_is_settled() -> None:
    bank = Bank((2, 2)).open()
    for step in (300, 100):
        failed(bank, step)
    assert vain(bank) == [100, 300]
    for rank in (0, 1, 2):
        failed(bank, 100, rank, why=GIVEN_UP)
    failed(bank, 200)
    assert vain(bank) == [200, 300]
    for step in range(1000, 1000 + 2 * LISTED):
        failed(bank, step)
    assert vain(bank) == list(range(1000 + LISTED, 1000 + 2 * LISTED))


def test_it_is_of_the_present_round_and_of_no_other_phase() -> None:
    bank = Bank((2, 2)).open()
    failed(bank, 100)
    bank.fault("n1/0")
    assert bank.phase is JobPhase.ABORTING
    assert vain(bank) == []
    bank.settle()
    assert bank.order("n0").phase is Phase.RUN
    assert vain(bank) == []
    failed(bank, 200, round=0)
    assert vain(bank) == [], "a fact that comes after its round"
    failed(bank, 100, round=1)
    assert [save.round for save in bank.order("n0").vain] == [1]
    bank.returns("n0/0")
    assert bank.phase is JobPhase.COMPLETING
    assert vain(bank) == [100], "the others wait for what they have saved"
    complete(bank)
    assert bank.order("n0").phase is Phase.RELEASE
    assert vain(bank) == []


def test_a_new_controller_says_the_same() -> None:
    bank = Bank((2, 2)).open()
    save = failed(bank, 100)
    bank.do(Opened("job", 1, 2, 2, BOTH))
    bank.attach()
    assert [bank.order(agent).vain for agent in bank.nodes] == [(save,), (save,)]
