"""Who this process is, from its environment: which job, node and agent, started by which launcher.

Inside a Slurm allocation the batch shell, and so everything that it starts without srun, carries SLURM_PROCID=0 as
well; only a step has SLURM_STEP_ID. So a task of a step is known by that variable.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..protocol.names import AgentName


@dataclass(frozen=True, slots=True)
class Place:
    """agents: how many the launcher starts. tasks_on_node, local_id: of this node. order: of this agent among all.

    alone: nobody else starts a controller, so this agent does.
    """

    job: str
    node: str
    agent: AgentName
    group: str
    order: int
    agents: int
    local_id: int = 0
    tasks_on_node: int = 1
    alone: bool = False


def find_place(environ: Mapping[str, str], job: str | None, agents: int | None) -> Place:
    """Where this agent stands. `job` and `agents` are the command line's, if it says."""
    job_id = find_job(environ, job)
    node = environ.get("PERDURE_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname()
    said = agents or _number(environ.get("PERDURE_AGENTS"))
    group = environ.get("PERDURE_NODE_GROUP", "") or environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    if not in_slurm_step(environ):
        return Place(job_id, node, AgentName(node), group, 0, said or 1, alone=(said or 1) == 1)
    tasks = _tasks_on_node(environ)
    local_id = _number(environ.get("SLURM_LOCALID")) or 0
    name = node if tasks == 1 else f"{node}.{local_id}"
    count = said or _number(environ.get("SLURM_STEP_NUM_TASKS")) or _number(environ.get("SLURM_NTASKS")) or 1
    order = _number(environ.get("SLURM_PROCID")) or 0
    # In a step the controller runs beside srun, even where there is just one task: only a word to the contrary counts.
    return Place(job_id, node, AgentName(name), group, order, count, local_id, tasks, alone=said == 1)


def find_job(environ: Mapping[str, str], job: str | None) -> str:
    """The job's id: the command line's, PERDURE_JOB, Slurm's, or a random one for a job on this machine alone."""
    return job or environ.get("PERDURE_JOB") or environ.get("SLURM_JOB_ID") or f"local-{secrets.token_hex(4)}"


def find_run_dir(environ: Mapping[str, str], given: str | None, job: str) -> Path:
    """The run directory: the command line's, PERDURE_RUN_DIR, or `perdure-runs/JOB` below the present one."""
    return Path(given or environ.get("PERDURE_RUN_DIR") or os.path.join("perdure-runs", job)).absolute()


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _tasks_on_node(environ: Mapping[str, str]) -> int:
    """This node's share of SLURM_STEP_TASKS_PER_NODE, `2(x3),1` for instance."""
    index = _number(environ.get("SLURM_NODEID")) or 0
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        tasks, _, times = part.partition("(x")
        repeat = int(times.rstrip(")")) if times else 1
        if index < repeat:
            return int(tasks)
        index -= repeat
    return 1
