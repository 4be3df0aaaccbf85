"""The controller dies, stands still, or stays away, in every phase of a job: training goes on untouched."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from .cluster import (
    STARTED,
    crash_controller,
    freeze,
    kill_controller,
    replace_controller,
    same_processes,
    stamp,
    started,
    wait_new,
    wait_phase,
)
from .harness import PERDURE, Job

TWO = {"nodes": ("n0", "n1"), "nproc": 2}


def test_while_running_nothing_changes_and_the_next_fault_is_handled(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    crash_controller(job, "running")
    wait_new(job, 0, "agent", "n0 is back")
    wait_new(job, 0, "agent", "n1 is back")
    same_processes(before, job)
    job.kill(before[3])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={3}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.log("listening")[-1]["incarnation"] == 2


def test_a_fault_while_there_is_no_controller_is_handled_by_the_next(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    wait_phase(job, "running")
    kill_controller(job)
    job.kill(before[0])
    replace_controller(job)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert "SIGKILL" in job.wait_log("recovered")["text"]


def test_while_forming(launch: Callable[..., Job]) -> None:
    job = launch("if os.environ['PERDURE_NODE'] == 'n1':\n    wait_said('come')\nrun()\n", **TWO)
    job.wait_log("agent", "n0 joined")
    job.wait_log("agent", "n1 joined")
    crash_controller(job, "forming")
    job.say("come")
    assert len(job.wait_round(0)) == 4
    assert job.finish() == 0
    job.assert_rounds(1)


def test_while_aborting(launch: Callable[..., Job]) -> None:
    """One rank takes its time to leave the round."""
    job = launch(
        """
        def fault(round, step):
            if round.index == 0 and round.rank == 2:
                with round.atomic():
                    tell("slow", round)
                    wait_said("unwind", round)
        run(fault)
        """,
        **TWO,
    )
    before = job.wait_round(0)
    job.wait_event("slow")
    job.kill(before[3])
    crash_controller(job, "aborting")
    job.say("unwind")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={3}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert "not timed: a controller died" in job.wait_log("recovered")["text"]


def test_while_planning(launch: Callable[..., Job]) -> None:
    """The new process of a dead rank takes its time to come to the gate."""
    job = launch(STARTED + "if os.environ['PERDURE_LIFE'] == '2':\n    wait_said('come')\nrun()\n", **TWO)
    before = job.wait_round(0)
    job.kill(before[1])
    started(job, before[1].slot, life=2)
    crash_controller(job, "planning")
    job.say("come")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 3
    assert len(after) == 4
    assert job.finish() == 0
    job.assert_rounds(2)


def test_while_completing(launch: Callable[..., Job]) -> None:
    job = launch(
        "def leave(round):\n    tell('leaving', round)\n    if round.rank == 0:\n        wait_said('leave', round)\n"
        "run(leave=leave)\n",
        **TWO,
    )
    before = job.wait_round(0)
    job.say("release")
    for rank in (1, 2, 3):
        job.wait_event("returned", rank=rank)
    crash_controller(job, "completing")
    same_processes(before, job)
    job.say("leave")
    assert job.wait_end() == 0
    job.assert_rounds(1)


def test_after_the_release(launch: Callable[..., Job]) -> None:
    """The function has returned everywhere, and the trainers still have something to do."""
    job = launch("run()\nwait_said('exit')\ntell('exit')\n", **TWO)
    job.wait_round(0)
    job.say("release")
    job.wait_for(lambda: len(job.events("left")) == 4, "all ranks to leave the function")
    crash_controller(job, "released")
    job.say("exit")
    assert job.wait_end() == 0
    assert len(job.events("exit")) == 4
    job.assert_rounds(1)


def test_while_stopping(launch: Callable[..., Job]) -> None:
    """The job was told to end, and a rank on each node holds it up."""
    job = launch(
        """
        def fault(round, step):
            if round.rank % 2:
                with round.atomic():
                    tell("slow", round)
                    wait_said("unwind", round)
        run(fault)
        """,
        termination_grace_time=3,
        **TWO,
    )
    job.wait_round(0)
    for rank in (1, 3):
        job.wait_event("slow", rank=rank)
    job.agents["n0"].send_signal(signal.SIGTERM)
    crash_controller(job, "stopping")
    job.say("unwind")
    assert job.wait_end() == 143


def test_several_times_in_a_row(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    for _ in range(3):
        crash_controller(job, "running")
    wait_new(job, 0, "listening", "incarnation 4")
    same_processes(before, job)
    assert job.finish() == 0
    job.assert_rounds(1)


def test_budgets_outlast_it(launch: Callable[..., Job]) -> None:
    job = launch(max_rank_faults=2, **TWO)
    for index in range(3):
        before = job.wait_round(index)
        job.kill(before[index])
        if index < 2:
            after = job.wait_round(index + 1)
            assert job.survivors(before, after, dead={index}) == 3
            job.wait_for(lambda: len(job.log("recovered")) == index + 1, "the story of the round")  # noqa: B023
            crash_controller(job, "running")
    assert job.wait_end() == 90
    assert "rank fault 3 of at most 2" in job.log("ended")[0]["text"]


def test_an_agents_own_controller_is_started_again(launch: Callable[..., Job]) -> None:
    job = launch()
    before = job.wait_round(0)
    first = job.controller_pid()
    os.kill(first, signal.SIGKILL)
    wait_new(job, 0, "controller_back")
    assert job.controller_pid() != first
    wait_new(job, 0, "agent", "n0 is back")
    same_processes(before, job)
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_stopped_controller_blames_nobody_when_it_goes_on(launch: Callable[..., Job]) -> None:
    job = launch(heartbeat_interval=0.5, heartbeat_timeout=3, **TWO)
    before = job.wait_round(0)
    wait_phase(job, "running")
    assert job.controller is not None
    freeze(job.controller.pid)
    time.sleep(8)
    since = stamp(job)
    job.controller.send_signal(signal.SIGCONT)
    wait_new(job, since, "frozen")
    job.kill(before[2])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={2}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert not [x for x in job.log() if x["event"] in ("agent_lost", "node_lost")]


def test_a_fault_while_the_controller_is_stopped_is_handled_when_it_goes_on(launch: Callable[..., Job]) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    wait_phase(job, "running")
    assert job.controller is not None
    freeze(job.controller.pid)
    job.kill(before[0])
    job.controller.send_signal(signal.SIGCONT)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 3
    assert job.finish() == 0


def second_controller(job: Job) -> "subprocess.CompletedProcess[str]":
    command = [str(PERDURE), "controller", "--run-dir", str(job.run_dir), "--agents", "2", "--host", "127.0.0.1"]
    return subprocess.run(command, env=job.env, cwd=job.folder, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_second_controller_is_refused_by_the_lease(launch: Callable[..., Job], stopped: bool) -> None:
    job = launch(**TWO)
    before = job.wait_round(0)
    assert job.controller is not None
    if stopped:
        freeze(job.controller.pid)
    second = second_controller(job)
    job.controller.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert "Traceback" not in second.stderr
    assert f"pid {job.controller.pid}" in second.stderr
    assert ("it is stopped (SIGSTOP" if stopped else "it is running") in second.stderr
    same_processes(before, job)
    assert job.finish() == 0
    job.assert_rounds(1)


def test_without_a_controller_the_agents_end_the_job_in_time(launch: Callable[..., Job]) -> None:
    job = launch(controller_timeout=3, heartbeat_timeout=2, **TWO)
    job.wait_round(0)
    wait_phase(job, "running")
    kill_controller(job)
    job.controller = None
    began = time.monotonic()
    assert job.wait_end() == 94
    assert 2.5 < time.monotonic() - began < 12
    for node in job.nodes:
        assert "no controller for 3 s (controller_timeout)" in job.output(node)
        assert "Traceback" not in job.output(node)


def test_without_any_controller_from_the_start(launch: Callable[..., Job]) -> None:
    job = launch(controller_timeout=2, heartbeat_timeout=1.5, **TWO)
    kill_controller(job)
    job.controller = None
    assert job.wait_end() == 94
    assert not job.events("entered")
    for node in job.nodes:
        assert "no controller for 2 s (controller_timeout)" in job.output(node)
