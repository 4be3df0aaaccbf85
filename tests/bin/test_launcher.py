"""Who a process is, by the environment in which it finds itself."""

import socket

import pytest

from perdure.bin.launcher import Place, find_job, find_place
from perdure.protocol.names import AgentName

BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURMD_NODENAME": "n0",
}
"""What a batch shell has, and all that it starts without srun."""


def step(tasks_per_node: str, procid: int, nodeid: int, localid: int, tasks: int, node: str) -> dict[str, str]:
    return BATCH | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": str(procid),
        "SLURM_NODEID": str(nodeid),
        "SLURM_LOCALID": str(localid),
        "SLURMD_NODENAME": node,
        "SLURM_TOPOLOGY_ADDR": f"switch0.switch3.{node}",
    }


def test_a_machine_alone_starts_its_controller() -> None:
    place = find_place({}, None, None)
    assert (place.agent, place.agents, place.alone) == (socket.gethostname(), 1, True)
    assert place.job.startswith("local-")


def test_one_of_several_machines_does_not() -> None:
    for environ, agents in (({}, 3), ({"PERDURE_AGENTS": "3"}, None)):
        place = find_place(environ, "llama", agents)
        assert (place.agents, place.alone) == (3, False)


def test_one_task_on_each_node() -> None:
    place = find_place(step("1(x4)", 2, 2, 0, 4, "n2"), None, None)
    assert place == Place("77", "n2", AgentName("n2"), "switch0.switch3", order=2, agents=4)


@pytest.mark.parametrize(
    ("tasks_per_node", "nodeid", "localid", "agent", "on_node"),
    [
        ("2(x3),1", 1, 1, "nX.1", 2),
        ("2(x3),1", 3, 0, "nX", 1),
        ("1,3(x2)", 0, 0, "nX", 1),
        ("1,3(x2)", 2, 2, "nX.2", 3),
    ],
)
def test_several_tasks_on_a_node(tasks_per_node: str, nodeid: int, localid: int, agent: str, on_node: int) -> None:
    place = find_place(step(tasks_per_node, 5, nodeid, localid, 7, "nX"), None, None)
    assert (place.agent, place.node, place.local_id, place.tasks_on_node) == (agent, "nX", localid, on_node)
    assert (place.order, place.agents) == (5, 7)


def test_a_step_of_one_task_has_its_controller_beside_it() -> None:
    environ = step("1", 0, 0, 0, 1, "n0")
    assert not find_place(environ, None, None).alone
    assert find_place(environ, None, 1).alone
    assert find_place({**environ, "PERDURE_AGENTS": "1"}, None, None).alone


def test_what_a_batch_shell_starts_is_no_task() -> None:
    """It has SLURM_PROCID and SLURM_NTASKS all the same."""
    place = find_place(BATCH, None, None)
    assert (place.job, place.agent, place.agents, place.alone) == ("77", "n0", 1, True)


def test_the_job_is_named_by_the_nearest() -> None:
    assert find_job({**BATCH, "PERDURE_JOB": "llama"}, "mine") == "mine"
    assert find_job({**BATCH, "PERDURE_JOB": "llama"}, None) == "llama"
    assert find_job(BATCH, None) == "77"
