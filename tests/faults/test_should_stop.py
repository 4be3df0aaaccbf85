"""A job that is asked to stop lets all ranks leave after the same step, whatever they are doing at that moment."""

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .cluster import kill_controller, replace_controller, wait_phase
from .harness import Job
from .processes import lives, processes_with

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"

STEPS = """
import torch
import torch.distributed as dist
from datetime import timedelta

@perdure.resilient
def train(round):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    tell("entered", round)
    step = 0
    while not round.should_stop(step):
        step += 1
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == round.world_size
        round.ping(step)
        if step == 5:
            tell("steps", round)
        %s
    with round.atomic():
        tell("returned", round, step=step)
    dist.destroy_process_group()

train()
tell("left")
"""


def stepping(launch: Callable[..., Job], more: str = "pass", head: str = "", **options: object) -> Job:
    job = launch(head + STEPS % more, **{"termination_grace_time": 5, **options})
    job.wait_round(0, "steps")
    wait_phase(job, "running")
    return job


def assert_left_together(job: Job, size: int, code: int) -> None:
    before = job.rounds()[0]
    assert job.wait_end(15) == code
    returned = job.events("returned")
    steps = {each.more["step"] for each in returned}
    assert len(returned) == size, f"only {[each.rank for each in returned]} of {size} ranks returned"
    assert len(steps) == 1, f"ranks left after the steps {steps}"
    assert len(job.events("left")) == size
    assert {each.key for each in returned} == {each.key for each in before.values()}
    assert not any(lives(each.key) for each in returned)
    assert job.log("kill") == []
    assert job.log("killed") == []
    assert job.log("fault") == []
    job.assert_rounds(1)


RANDOM = random.Random(20261130)


@pytest.mark.parametrize("after", sorted(RANDOM.randint(6, 900) for _ in range(6)))
def test_all_ranks_leave_after_the_same_step(launch: Callable[..., Job], after: int) -> None:
    """SIGTERM to the agent when rank 1 has reached some step: the ranks do a few hundred in a second."""
    job = stepping(launch, f"if step == {after} and round.rank == 1: tell('now', round)")
    job.wait_event("now")
    job.agents["n0"].send_signal(signal.SIGTERM)
    assert_left_together(job, 3, 143)
    assert "SIGTERM to agent n0" in job.reason()


def test_ctrl_c_to_the_controller_of_two_agents(launch: Callable[..., Job]) -> None:
    job = stepping(launch, nodes=("n0", "n1"), nproc=2)
    assert job.controller is not None
    job.controller.send_signal(signal.SIGINT)
    assert_left_together(job, 4, 130)


def test_every_agent_is_told(launch: Callable[..., Job]) -> None:
    """As schedulers do: that is one wish, not two."""
    job = stepping(launch, nodes=("n0", "n1"), nproc=2)
    for agent in job.agents.values():
        agent.send_signal(signal.SIGTERM)
    assert_left_together(job, 4, 143)


def test_every_process_is_told(launch: Callable[..., Job]) -> None:
    """As `scancel` does: ranks that ignore it leave as all others."""
    job = stepping(launch, nodes=("n0", "n1"), nproc=2, head="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    for pid, _ in processes_with(job.mark):
        os.kill(pid, signal.SIGTERM)
    assert_left_together(job, 4, 143)


def test_a_slow_rank_is_waited_for(launch: Callable[..., Job]) -> None:
    """It is in the middle of a long step, the others wait for it in a collective."""
    slow = "if round.rank == 2 and step == 20: tell('slow', round); wait_said('faster', round)"
    job = stepping(launch, slow, termination_grace_time=20)
    job.wait_event("slow")
    job.agents["n0"].send_signal(signal.SIGTERM)
    job.wait_log("stop_step")
    assert job.events("returned") == []
    job.say("faster")
    assert_left_together(job, 3, 143)
    assert {each.more["step"] for each in job.events("returned")} == {21}


def test_who_does_not_leave_in_time_is_ended(launch: Callable[..., Job]) -> None:
    slow = "if round.rank == 2 and step == 20: tell('slow', round); wait_said('never', round)"
    job = stepping(launch, slow, termination_grace_time=1)
    job.wait_event("slow")
    job.agents["n0"].send_signal(signal.SIGTERM)
    job.wait_log("stop_late", "rank")
    assert job.wait_end(15) == 143
    assert job.events("returned") == []


def test_a_second_signal_ends_the_job_at_once(launch: Callable[..., Job]) -> None:
    slow = "if round.rank == 2 and step == 20: tell('slow', round); wait_said('never', round)"
    job = stepping(launch, slow, termination_grace_time=25)
    job.wait_event("slow")
    job.agents["n0"].send_signal(signal.SIGTERM)
    job.wait_log("stop_step")
    job.agents["n0"].send_signal(signal.SIGTERM)
    assert job.wait_end(8) == 143


def test_a_death_meanwhile_ends_the_job_at_once(launch: Callable[..., Job]) -> None:
    slow = "if round.rank == 2 and step == 20: tell('slow', round); wait_said('never', round)"
    job = stepping(launch, slow, termination_grace_time=25)
    before = job.rounds()[0]
    job.wait_event("slow")
    job.agents["n0"].send_signal(signal.SIGTERM)
    job.wait_log("stop_step")
    job.kill(before[2])
    assert job.wait_end(12) == 143
    job.assert_rounds(1)


def test_another_controller_finishes_what_the_first_began(launch: Callable[..., Job]) -> None:
    slow = "if round.rank == 2 and step == 20: tell('slow', round); wait_said('faster', round)"
    job = stepping(launch, slow, nodes=("n0", "n1"), nproc=2, termination_grace_time=20)
    job.wait_event("slow")
    job.agents["n1"].send_signal(signal.SIGTERM)
    job.wait_log("stopping")
    kill_controller(job)
    replace_controller(job)
    job.say("faster")
    assert_left_together(job, 4, 143)


def test_the_example_saves_a_checkpoint_when_it_leaves(launch: Callable[..., Job], tmp_path: Path) -> None:
    source = f"""
        import runpy
        sys.argv = ["train_gpt.py", "--steps=100000"]
        runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
        """
    job = launch(source, nproc=2, termination_grace_time=15, save=tmp_path / "saves", save_interval=10)
    job.wait_log("checkpoint", "step 10 ")
    job.agents["n0"].send_signal(signal.SIGTERM)
    assert job.wait_end() == 143
    step = int(re.findall(r"final step=(\d+) ", job.output())[0])
    assert job.log("stop_step")[0]["step"] == step
    assert (tmp_path / "saves" / f"iter_{step:07d}" / ".metadata").exists()
    assert job.log("kill") == []
