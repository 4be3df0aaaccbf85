"""Ten thousand ranks: a round is decided at once, and no event costs a look at everybody."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from perdure.controller.core.events import Reported, Saved, Stocked
from perdure.controller.core.rounds import JobPhase
from perdure.protocol.checkpoints import GIVEN_UP, Fact, SaveId, Tier, What
from perdure.protocol.messages import ExitRecord, Stage
from perdure.protocol.settings import Settings

GENEROUS_S = 1.0
"""What must never be needed, on any machine; `benchmarks/core.py` says what is."""


def crowd_module() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "crowd.py"
    spec = importlib.util.spec_from_file_location("benchmark_crowd", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_round_of_10240_ranks() -> None:
    crowd = crowd_module().Crowd(1_280, 8)
    crowd.form()
    began = time.process_time()
    crowd.take(crowd.fault(3))
    crowd.take(crowd.settle())
    spent_s = time.process_time() - began
    assert crowd.decided(1)
    assert spent_s < GENEROUS_S


def test_a_lost_node_of_10240_ranks_shrinks_the_world() -> None:
    crowd = crowd_module().Crowd(1_280, 8)
    crowd.form()
    crowd.take(crowd.lose_node())
    crowd.take(crowd.settle())
    assert crowd.decided(1)


def test_forming_and_leaving_one_by_one_cost_no_look_at_everybody() -> None:
    """10,240 single reports, in the order in which a walk over all slots is longest."""
    crowd = crowd_module().Crowd(1_280, 8)
    began = time.process_time()
    crowd.join()
    change_one_by_one(crowd, stage=Stage.GATE, port=9000)
    crowd.take(crowd.enter())
    assert crowd.job.phase is JobPhase.RUNNING
    change_one_by_one(crowd, stage=Stage.RETURNED)
    assert crowd.job.phase is JobPhase.RELEASED
    change_one_by_one(crowd, stage=Stage.OUTSIDE, functions=1)
    change_one_by_one(crowd, stage=Stage.GONE, exit=ExitRecord(0))
    assert crowd.job.phase is JobPhase.ENDED
    assert time.process_time() - began < 5 * GENEROUS_S


def change_one_by_one(crowd: Any, **changes: object) -> None:
    for name in crowd.agents:
        changed = [msgspec.structs.replace(s, change=s.change + 1, **changes) for s in crowd.states[name]]
        crowd.states[name] = tuple(changed)
        crowd.take([Reported(name, (state,)) for state in changed])


def saving_crowd(**knobs: Any) -> Any:
    """10,240 ranks that run, in a job with both tiers."""
    settings = Settings(save="/save", non_persistent_local_ckpt_dir="/local", **knobs)
    crowd = crowd_module().Crowd(1_280, 8, settings)
    crowd.join()
    crowd.take([Stocked(name, f"tcp://{name}", ()) for name in crowd.agents])
    change_one_by_one(crowd, stage=Stage.GATE, port=9000)
    crowd.take(crowd.enter())
    assert crowd.job.phase is JobPhase.RUNNING
    return crowd


def test_a_save_of_10240_ranks_costs_a_few_microseconds_for_each() -> None:
    """Each rank tells of its shard alone, on both tiers, and every shard is copied to another node."""
    crowd = saving_crowd(replication=1)
    save, size, events = SaveId(100, 0, 0), 10_240, list[Saved]()
    for rank in range(size):
        agent = crowd.job.round.seats[rank].agent
        for tier, node in ((Tier.LOCAL, agent.node), (Tier.DURABLE, "")):
            events.append(Saved(agent.name, (Fact(save, What.WRITTEN, tier, rank, node, size, 1, b"x" * 16),)))
    crowd.directed.clear()
    began = time.process_time()
    crowd.take(events)
    spent_s = time.process_time() - began
    assert len(crowd.job.commits.orders.publications) == 1
    assert len(crowd.directed) <= size + 1, "one for each copy, and one to publish"
    assert spent_s < 2 * GENEROUS_S
    began = time.process_time()
    crowd.take(crowd.fault(3))
    crowd.take(crowd.settle())
    assert crowd.decided(1)
    assert time.process_time() - began < 2 * GENEROUS_S


def test_a_save_that_one_of_10240_ranks_skips_is_told_to_each_agent_once() -> None:
    """Half of the others have written it by then, and the others give it up."""
    crowd = saving_crowd()
    save, size, events = SaveId(100, 0, 0), 10_240, list[Saved]()
    for rank in [77, *range(77), *range(78, size)]:
        agent = crowd.job.round.seats[rank].agent
        what, why = (What.WRITTEN, "") if rank % 2 == 0 else (What.FAILED, "skipped" if rank == 77 else GIVEN_UP)
        for tier, node in ((Tier.LOCAL, agent.node), (Tier.DURABLE, "")):
            events.append(Saved(agent.name, (Fact(save, what, tier, rank, node, size, 1, b"x" * 16, why=why),)))
    crowd.directed.clear()
    began = time.process_time()
    crowd.take(events)
    spent_s = time.process_time() - began
    assert all(each.directive.vain == (save,) for each in crowd.directed)
    assert len(crowd.directed) == 1_280 + 1_280 + 1, (
        "one to give it up, then one to delete it, and who deletes the rest"
    )
    assert spent_s < 2 * GENEROUS_S
