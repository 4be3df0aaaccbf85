"""Checkpoints from which no round gets on: the other tier, then an older one, then the end; and what does not count."""

import msgspec
import pytest

from perdure.protocol.checkpoints import What
from perdure.protocol.exit_codes import ExitCode
from perdure.protocol.faults import FaultKind

from .bank import BOTH, DURABLE, LOCAL, Bank


def saved() -> Bank:
    """Steps 50 (durable) and 100 (both tiers) are there; round 1 resumes from the second."""
    bank = Bank().open()
    bank.published(50)
    bank.published(100)
    bank.written(100, LOCAL)
    bank.report("n0/0", step=103)
    bank.restart()
    assert bank.resumed == (100, "local")
    return bank


def fail(bank: Bank, times: int, slot: str = "n0/1", error: str = "NaN", **fault: object) -> None:
    for _ in range(times):
        bank.again(slot, error, **fault)


def test_two_equal_failures_lead_to_the_other_tier_and_then_to_an_older_step() -> None:
    bank = saved()
    fail(bank, 1)
    assert bank.resumed == (100, "local")
    fail(bank, 1)
    assert bank.resumed == (100, "durable")
    assert "step 100 (round 0) is set aside on the local tier" in bank.told("struck")[0]
    assert "it is not deleted" in bank.told("struck")[0]
    fail(bank, 2)
    assert bank.resumed == (50, "durable")
    assert bank.pruned("n0", DURABLE) == []
    assert bank.pruned("n0", LOCAL) == []


def test_when_all_are_struck_the_job_ends_with_a_code_of_its_own() -> None:
    bank = saved()
    fail(bank, 6)
    assert bank.ending[0] == ExitCode.CHECKPOINTS_SPENT


def test_an_older_step_that_trains_is_kept_to() -> None:
    bank = saved()
    fail(bank, 4)
    bank.published(60)
    bank.restart()
    assert bank.resumed == (60, "durable"), "step 100 stays set aside"


def test_the_same_failure_at_the_same_step_from_elsewhere_is_the_programs() -> None:
    bank = saved()
    fail(bank, 4, step=103)
    assert bank.resumed == (50, "durable")
    fail(bank, 2, step=103)
    assert bank.resumed == (50, "durable")
    fail(bank, 1, step=103)
    assert bank.ending[0] == ExitCode.NO_PROGRESS


def test_the_same_failure_after_new_saves_is_the_programs() -> None:
    bank = saved()
    fail(bank, 4)
    for step in (60, 70, 80):
        bank.written(step, LOCAL)
        fail(bank, 1)
    assert bank.ending[0] == ExitCode.NO_PROGRESS
    assert len(bank.told("struck")) == 2


@pytest.mark.parametrize(
    "changes", [{"error": "Other"}, {"kind": FaultKind.SOFT_HANG}, {"peer_error": True}, {"place": "elsewhere.py:7"}]
)
def test_two_failures_that_are_not_the_same_strike_nothing(changes: dict[str, object]) -> None:
    bank = saved()
    fail(bank, 1)
    bank.again("n0/1", **{"error": "NaN", **changes})
    fail(bank, 1)
    assert bank.told("struck") == []


def test_progress_takes_the_blame_from_the_checkpoint() -> None:
    bank = saved()
    for step in (110, 120, 130):
        bank.report("n0/0", step=step)
        fail(bank, 1)
    assert bank.resumed == (100, "local")
    assert bank.told("struck") == []


@pytest.mark.parametrize(("code", "struck"), [(-9, False), (-11, True)])
def test_a_sigkill_says_nothing_of_a_checkpoint_and_a_crash_does(code: int, struck: bool) -> None:
    bank = Bank((1, 1, 1, 1)).open()
    bank.published(100)
    for slot in ("n3/0", "n2/0", "n1/0"):
        bank.gone(slot, code)
        bank.settle()
        if bank.told("struck"):
            break
    assert bool(bank.told("struck")) is struck


def test_a_restore_error_strikes_at_once_all_that_was_tried() -> None:
    bank = saved()
    save = bank.save(100, 0)
    bank.say("n0", bank.fact(save, What.BAD, LOCAL, 0, "host0", why="a flipped bit"))
    fail(bank, 1, error="RestoreError")
    assert bank.resumed == (50, "durable")


def test_a_restore_error_beside_a_lost_node_strikes_nothing() -> None:
    bank = saved()
    bank.fault("n0/1", error="RestoreError")
    bank.silent("n1")
    bank.settle()
    assert bank.told("struck") == []
    assert bank.resumed == (100, "durable"), "the local shards of n1 are gone with it"


def test_a_slot_that_a_reserve_can_replace_is_suspected_before_the_last_tier_of_a_save() -> None:
    bank = Bank((2, 2), msgspec.structs.replace(BOTH, active_world_size=3)).open()
    bank.published(50)
    bank.published(100)
    bank.report("n0/0", step=103)
    fail(bank, 3)
    assert len(bank.told("suspect")) == 1
    assert bank.told("struck") == []
    assert bank.resumed == (100, "durable")
    fail(bank, 1, slot="n0/0")
    assert bank.resumed == (50, "durable"), "another slot fails in the same way"
