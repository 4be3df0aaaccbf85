"""Agents and whole nodes die, come back, or collide: the others go on in their own processes."""

import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from .cluster import (
    freeze,
    lose_agent,
    lose_node,
    of_node,
    reserves,
    same_processes,
    second_agent,
    stamp,
    wait_gone,
    wait_new,
)
from .harness import Job
from .processes import lives, processes_with

THREE: dict[str, Any] = {"nodes": ("n0", "n1", "n2"), "nproc": 2, "active_world_size": 4}
TWO: dict[str, Any] = {"nodes": ("n0", "n1"), "nproc": 2}


@pytest.mark.parametrize("granularity", ["node", "rank"])
@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_lost_node_is_replaced_by_reserves(launch: Callable[..., Job], node: str, granularity: str) -> None:
    """n0 is the node of rank 0."""
    job = launch(granularity=granularity, **THREE)
    before = job.wait_round(0)
    dead = of_node(before, node)
    assert len(dead) == 2
    assert (0 in dead) == (node == "n0")
    lose_node(job, node)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=dead) == 2
    assert of_node(after, "n2") == dead
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.log("node_lost")[0]["text"].startswith(f"agent {node} is lost with 2 slots")


def test_a_lost_node_whose_death_nobody_sees(launch: Callable[..., Job]) -> None:
    """Its processes are in another pid namespace: only its connection tells, and may come back for a while."""
    away = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0 or subprocess.run([*away, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces can be made here")
    job = launch(prefixes={"n1": away}, **TWO)
    before = job.wait_round(0)
    agent = job.agents.pop("n1")
    agent.kill()
    agent.wait(10)
    after = job.wait_round(1)
    left = {rank: each for rank, each in before.items() if each.slot.startswith("n0/")}
    assert job.survivors(left, after) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    assert "its connection closed and did not come back" in job.log("node_lost")[0]["text"]


@pytest.mark.parametrize("granularity", ["node", "rank"])
def test_without_reserves_the_world_shrinks(launch: Callable[..., Job], granularity: str) -> None:
    job = launch(granularity=granularity, **TWO)
    before = job.wait_round(0)
    lose_node(job, "n0")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=of_node(before, "n0")) == 2
    assert sorted(after) == [0, 1]
    assert job.finish() == 0
    job.assert_rounds(2)


@pytest.mark.parametrize(("node", "granularity"), [("n0", "node"), ("n1", "rank")])
def test_the_ranks_of_a_killed_agent_are_gone_at_once(launch: Callable[..., Job], node: str, granularity: str) -> None:
    job = launch(granularity=granularity, **TWO)
    before = job.wait_round(0)
    dead = of_node(before, node)
    left = lose_agent(job, node)
    assert len(left) == 2
    assert wait_gone(job, left, 10) < 3
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=dead) == 2
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_rank_that_ignores_sigterm_dies_with_its_agent(launch: Callable[..., Job]) -> None:
    job = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nrun()\n", **TWO)
    before = job.wait_round(0)
    left = lose_agent(job, "n1")
    assert wait_gone(job, left, 10) < 3
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=of_node(before, "n1")) == 2
    assert job.finish() == 0


def test_a_forked_rank_dies_with_its_agent(launch: Callable[..., Job]) -> None:
    """One that the fork server made carries the marks of any other."""
    job = launch(**TWO)
    before = job.wait_round(0)
    job.kill(before[3])
    middle = job.wait_round(1)
    assert middle[3].slot == before[3].slot
    left = lose_agent(job, "n1")
    assert middle[3].key in left
    assert wait_gone(job, left, 10) < 3
    after = job.wait_round(2)
    assert job.survivors(middle, after, dead=of_node(middle, "n1")) == 2
    assert job.finish() == 0


def test_the_only_agent_is_killed(launch: Callable[..., Job]) -> None:
    """It started the controller itself, which ends the job: nobody is left who could run it."""
    job = launch()
    job.wait_round(0)
    wait_gone(job, lose_agent(job, "n0"), 3)
    job.wait_for(lambda: not processes_with(job.mark), "the end of the controller")
    assert job.log("ended")[0]["text"].startswith("the job ended with code 91")


def test_an_agent_that_is_started_again_joins_as_reserve(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    lose_node(job, "n1")
    middle = job.wait_round(1)
    assert job.survivors(before, middle, dead=of_node(before, "n1")) == 2
    since = stamp(job)
    job.start_agent("n1")
    wait_new(job, since, "agent", "n1")
    job.wait_for(lambda: reserves(job) == {"n1/0", "n1/1"}, "the reserves of n1 to reach the gate")
    same_processes(middle, job)
    job.kill(middle[0])
    after = job.wait_round(2)
    assert job.survivors(middle, after, dead={0}) == 1
    assert job.finish() == 0
    job.assert_rounds(3)


def test_an_agent_that_is_started_again_at_once(launch: Callable[..., Job]) -> None:
    """Before anybody has noticed the death of the first."""
    job = launch(**TWO)
    before = job.wait_round(0)
    since = stamp(job)
    lose_node(job, "n1")
    job.start_agent("n1")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=of_node(before, "n1")) == 2
    wait_new(job, since, "agent", "n1")
    assert job.finish() == 0


def test_an_agent_that_dies_again_and_again(launch: Callable[..., Job]) -> None:
    """Every death of it is a round that counts, and the other node's ranks are in all of them."""
    job = launch(**TWO, max_rank_faults=40)
    before = job.wait_round(0)
    for _ in range(4):
        lose_node(job, "n1")
        since = stamp(job)
        job.start_agent("n1", 1)
        wait_new(job, since, "agent", "n1")
    newest = job.wait_for(lambda: max(job.rounds()), "a round")
    after = job.wait_round(newest)
    assert job.survivors(before, after, dead=of_node(before, "n1")) == 2
    assert job.finish() == 0


def test_a_frozen_agent_comes_back_with_its_ranks_as_reserves(launch: Callable[..., Job]) -> None:
    """Its ranks are healthy, and train on in a round that is over, until it can tell them."""
    job = launch(heartbeat_interval=0.5, heartbeat_timeout=3, **TWO)
    before = job.wait_round(0)
    freeze(job.agents["n1"].pid)
    middle = job.wait_round(1)
    assert sorted(middle) == [0, 1]
    job.agents["n1"].send_signal(signal.SIGCONT)
    job.wait_for(lambda: reserves(job) == {"n1/0", "n1/1"}, "the ranks of n1 to come back to the gate")
    for rank, each in before.items():
        assert lives(each.key), f"rank {rank} was healthy and is dead"
    job.kill(middle[0])
    after = job.wait_round(2)
    assert job.survivors(middle, after, dead={0}) == 1
    assert job.finish() == 0
    job.assert_rounds(3)


def test_two_agents_with_one_name(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    second = second_agent(job, "n1")
    assert second.wait(20) == 2
    said = job.output("n1")
    assert "refused by the controller: the name n1 is taken by process" in said
    assert "give each machine its own PERDURE_NODE" in said
    same_processes(before, job)
    assert job.finish() == 0
    job.assert_rounds(1)


def test_two_agents_with_one_name_from_the_start(launch: Callable[..., Job]) -> None:
    """One of them is refused, whichever came second, and the job waits for the one that is missing."""
    job = launch(nodes=("n1", "n2"), nproc=1)
    second = second_agent(job, "n1")
    job.wait_for(lambda: None if second.poll() is None and job.agents["n1"].poll() is None else True, "a refusal")
    refused = second if second.poll() is not None else job.agents["n1"]
    assert refused.wait(20) == 2
    if refused is job.agents["n1"]:
        job.agents["n1"] = second
    assert len(job.wait_round(0)) == 2
    assert job.finish() == 0
