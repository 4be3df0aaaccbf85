"""Training on a real Slurm cluster with the batch script of the documentation (examples/slurm/job.sbatch).

The nodes of the cluster are daemons on this machine, each with its own name; so they share its addresses.
"""

import os
import re
import signal
from collections.abc import Callable

import pytest

from .harness import ROOT, SlurmJob, heal, kill_node, node_daemon, processes, slurm, until

NODES = ("n0", "n1", "n2", "n3")
IN_PLACE = {"respawn": "false", "granularity": "rank"}


def test_a_job_runs_to_its_end(submit: Callable[..., SlurmJob]) -> None:
    """One task on each node, several ranks in each."""
    job = submit(ranks=2, respawn="false")
    seats = job.wait_round(0, size=8)
    assert [seats[rank]["PERDURE_SLOT"] for rank in range(8)] == [f"{node}/{i}" for node in NODES for i in (0, 1)]
    assert [seats[rank]["SLURMD_NODENAME"] for rank in range(8)] == [node for node in NODES for _ in (0, 1)]
    assert [seats[rank]["LOCAL_RANK"] for rank in range(8)] == ["0", "1"] * 4
    assert {seat["LOCAL_WORLD_SIZE"] for seat in seats.values()} == {"2"}
    assert job.finish() == ("COMPLETED", "0:0")
    assert job.verdict()["code"] == 0
    assert "srun" not in job.output.read_text()


def test_one_task_for_each_rank(submit: Callable[..., SlurmJob]) -> None:
    job = submit(options=("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4"), ranks=1, **IN_PLACE)
    before = job.wait_round(0, size=4)
    nodes = slurm("scontrol", "show", "hostnames", job.slurm_state()["NodeList"]).split()
    assert [before[rank]["PERDURE_SLOT"] for rank in range(4)] == [f"{node}.{i}/{i}" for node in nodes for i in (0, 1)]
    assert [before[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert {seat["LOCAL_WORLD_SIZE"] for seat in before.values()} == {"2"}

    os.kill(before[1]["pid"], signal.SIGKILL)
    after = job.wait_round(1, size=3)
    assert {seat["pid"] for seat in after.values()} == {before[rank]["pid"] for rank in (0, 2, 3)}
    alone = [seat for seat in after.values() if seat["SLURMD_NODENAME"] == nodes[0]]
    assert [(seat["LOCAL_RANK"], seat["LOCAL_WORLD_SIZE"]) for seat in alone] == [("0", "1")]
    assert job.finish() == ("COMPLETED", "0:0")


def test_rank_0_is_killed(submit: Callable[..., SlurmJob]) -> None:
    job = submit(**IN_PLACE)
    before = job.wait_round(0, size=8)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = job.wait_round(1, size=7)
    assert {seat["pid"] for seat in after.values()} == {before[rank]["pid"] for rank in range(1, 8)}
    assert job.finish() == ("COMPLETED", "0:0")


@pytest.mark.parametrize("slurm_knows", [True, False])
def test_a_node_is_lost_and_reserves_take_over(submit: Callable[..., SlurmJob], slurm_knows: bool) -> None:
    """Slurm learns of it long after perdure: then it must leave the job alone, and before that srun waits for ever."""
    if node_daemon("n1") is None:
        pytest.skip("the nodes of this cluster are not daemons on this machine")
    job = submit(active_world_size=6, respawn="false")
    before = job.wait_round(0, size=6)
    assert {seat["SLURMD_NODENAME"] for seat in before.values()} == {"n0", "n1", "n2"}
    try:
        kill_node("n1")
        after = job.wait_round(1, size=6)
        if slurm_knows:
            slurm("scontrol", "update", "nodename=n1", "state=down", "reason=lost")
            until(lambda: job.slurm_state()["NumNodes"] == "3", job.story)
            assert job.slurm_state()["JobState"] == "RUNNING"
        assert [after[rank]["SLURMD_NODENAME"] for rank in range(6)] == ["n0", "n0", "n3", "n3", "n2", "n2"]
        assert [after[rank]["pid"] for rank in (0, 1, 4, 5)] == [before[rank]["pid"] for rank in (0, 1, 4, 5)]
        assert job.finish() == ("COMPLETED", "0:0")
        assert job.seats(2) == {}
        assert ("srun still waits" in job.output.read_text()) is not slurm_knows
    finally:
        heal(list(NODES))


def test_the_controller_is_killed(submit: Callable[..., SlurmJob]) -> None:
    """Training does not notice; the controller is back, and later faults are handled as ever."""
    job = submit(**IN_PLACE)
    before = job.wait_round(0, size=8)
    until(lambda: job.log("running"), job.story)
    os.kill(job.endpoint()["process"][1], signal.SIGKILL)
    until(lambda: job.endpoint()["incarnation"] == 2, job.story)
    until(lambda: len([line for line in job.log("agent") if "is back" in line["text"]]) == 4, job.story)
    assert job.seats(0) == before
    assert job.seats(1) == {}

    os.kill(before[7]["pid"], signal.SIGKILL)
    after = job.wait_round(1, size=7)
    assert {seat["pid"] for seat in after.values()} == {before[rank]["pid"] for rank in range(7)}
    assert job.finish() == ("COMPLETED", "0:0")
    assert job.endpoint()["incarnation"] == 2


def test_a_rank_s_exit_code_reaches_a_job_with_one_task(submit: Callable[..., SlurmJob]) -> None:
    """The controller is beside srun there as well, though the one agent is alone."""
    job = submit(options=("--nodes=1",), ranks=4, respawn="false")
    job.wait_round(0, size=4)
    job.let_rank_exit(2, 16)
    assert job.wait_end() == ("FAILED", "16:0")
    assert job.verdict()["code"] == 16


def test_a_warning_ends_nothing_and_scancel_ends_everything(submit: Callable[..., SlurmJob]) -> None:
    job = submit(options=("--nodes=2",), respawn="false")
    before = job.wait_round(0, size=4)
    until(lambda: job.log("running"), job.story)
    slurm("scancel", "--signal=USR1", f"{job.id}.0")
    slurm("scancel", "--batch", "--signal=USR1", job.id)
    until(lambda: job.log("notice"), job.story)
    alive = {seat["pid"] for seat in before.values()}
    assert alive <= set(processes(SLURM_JOB_ID=job.id))
    assert job.endpoint()["incarnation"] == 1

    slurm("scancel", job.id)
    assert job.wait_end() == ("CANCELLED", "143:0")
    assert job.verdict()["code"] == 143
    assert "SIGTERM" in job.verdict()["reason"]
    assert not alive & set(processes(SLURM_JOB_ID=job.id))


def test_a_requeued_job_starts_anew(submit: Callable[..., SlurmJob]) -> None:
    """Nothing of the first attempt is taken for the second one's: address, keys, journal, verdict."""
    job = submit(options=("--nodes=2",), respawn="false")
    job.wait_round(0, size=4)
    first = job.endpoint()
    job.let_rank_exit(1, 75)
    job.wait_round(0, size=4, attempt=2)
    second = job.endpoint()
    assert (first["attempt"], second["attempt"], second["incarnation"]) == (1, 2, 1)
    assert first["server_public"] != second["server_public"]
    assert '"code": 75' in (job.run_dir / "attempt-1" / "verdict.json").read_text()
    assert job.finish() == ("COMPLETED", "0:0")
    assert job.slurm_state()["Restarts"] == "1"


def test_agents_that_cannot_start_end_the_job(submit: Callable[..., SlurmJob]) -> None:
    job = submit(options=("--nodes=2",), ranks=0)
    assert job.wait_end() == ("FAILED", "2:0")
    assert "--nproc 0" in job.output.read_text()


def test_srun_is_killed(submit: Callable[..., SlurmJob]) -> None:
    """Slurm ends the step. On its own machine the controller sees that agents are dead; elsewhere the script acts."""
    job = submit(options=("--nodes=2",), respawn="false")
    job.wait_round(0, size=4)
    os.kill(job.srun(), signal.SIGKILL)
    assert job.wait_end() in (("FAILED", "91:0"), ("FAILED", "137:0"))


def test_a_real_training_loses_rank_0(submit: Callable[..., SlurmJob]) -> None:
    trainer = ("python", str(ROOT / "examples" / "train_gpt.py"), "--steps=40")
    faulty = ("python", str(ROOT / "examples" / "faulty.py"), "--marks=marks", "--fault=sigkill@0:12", *trainer[1:])
    job = submit(*faulty, ranks=1, active_world_size=3, save_interval="5", **IN_PLACE)
    assert job.wait_end() == ("COMPLETED", "0:0"), job.story()
    output = job.output.read_text()
    assert "injecting sigkill into rank 0 at step 12" in output
    assert len(job.log("recovered")) == 1
    steps = [(int(step), int(round)) for step, round in re.findall(r"step=(\d+) loss=\S+ round=(\d+)", output)]
    # The save of step 10 may not have been complete yet.
    again = [(10, 1)] if (10, 1) in steps else []
    assert steps == [(5, 0), (10, 0), *again, (15, 1), (20, 1), (25, 1), (30, 1), (35, 1), (40, 1)]
    published = [line["text"] for line in job.log("checkpoint")]
    assert published[-1].startswith("step 40 (round 1) is published: 3 ranks")
    assert "final step=40" in output
