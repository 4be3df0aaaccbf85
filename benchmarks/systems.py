"""The systems that `restart.py` compares: how each is started with the workload, and how its recoveries are read.

A recovery is the time from the fault (its stamp is the failing rank's last act) until the last rank of the next round
- `enter`: is in the training function again,
- `collective`: has joined the new process group and finished one all-reduce.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from harness import PEERS, PERDURE, Event, Job, free_port

START_S = 90.0
END_S = 60.0


class Recovery(NamedTuple):
    enter_ms: float
    collective_ms: float


class Scenario(NamedTuple):
    """What happens to a job.

    reserves: warm processes that may take a dead rank's place. quiet_s: before a fault, and up to twice that.
    """

    ranks: int
    fault: str
    faults: int
    reserves: int
    profile: str
    quiet_s: float = 0.6

    @property
    def fault_rank(self) -> int:
        return 1

    @property
    def patience_s(self) -> float:
        """For one recovery. A hang under default settings is noticed after a minute."""
        return 180.0 if self.profile == "default" and self.fault == "hang" else 60.0

    def workload_arguments(self, job: Job) -> list[str]:
        return [
            f"--events={job.events_file}",
            f"--fault={self.fault}",
            f"--fault-rank={self.fault_rank}",
            f"--faults={self.faults}",
            f"--quiet={self.quiet_s}",
        ]


System = Callable[[Scenario], list[Recovery]]


def next_round(job: Job, fault: Event) -> tuple[list[Event], list[Event]] | None:
    """The `enter` and `collective` events of the first round after `fault` that all its ranks have joined."""
    for index in sorted({event["round"] for event in job.events("enter", after=fault["t"])} - {fault["round"]}):
        entered = job.events("enter", round=index)
        joined = job.events("collective", round=index)
        if entered and len(joined) >= entered[0]["world_size"]:
            return entered, joined
    return None


def recoveries(job: Job, scenario: Scenario) -> list[Recovery]:
    """Follow the job through its faults."""
    found: list[Recovery] = []
    job.wait_for("first fault", lambda: bool(job.events("fault")), START_S)
    for number in range(scenario.faults):
        job.wait_for(f"fault {number + 1}", lambda n=number: len(job.events("fault")) > n, END_S)
        fault = job.events("fault")[number]
        job.wait_for("next round", lambda fault=fault: next_round(job, fault) is not None, scenario.patience_s)
        rounds = next_round(job, fault)
        assert rounds is not None
        enter, collective = (max(event["t"] for event in events) - fault["t"] for events in rounds)
        found.append(Recovery(enter * 1e3, collective * 1e3))
    return found


# ---- perdure --------------------------------------------------------------------------------------------------


def perdure(scenario: Scenario, respawn: bool = True) -> list[Recovery]:
    with Job() as job:
        options = [
            f"--nproc={scenario.ranks + scenario.reserves}",
            f"--active-world-size={scenario.ranks}",
            f"--run-dir={job.folder / 'run'}",
            "--granularity=rank",
            "--respawn" if respawn else "--no-respawn",
        ]
        if scenario.profile == "fast" and scenario.fault == "hang":
            options += ["--soft-timeout=1", "--hard-timeout=3"]  # a hang cannot be known sooner than the limit says
        worker = [sys.executable, str(PEERS / "perdure_worker.py"), *scenario.workload_arguments(job)]
        job.essential.append(job.start([*PERDURE, "run", *options, "--", *worker]))
        found = recoveries(job, scenario)
        job.wait_for_end(END_S)
        return found


# ---- nvidia-resiliency-ext, in-process restart ----------------------------------------------------------------


def nvrx(scenario: Scenario) -> list[Recovery]:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    world_size = scenario.ranks + scenario.reserves
    with Job() as job:
        command = [
            *(sys.executable, str(PEERS / "nvrx_worker.py"), *scenario.workload_arguments(job)),
            *(f"--profile={scenario.profile}", f"--active={scenario.ranks}", f"--reserves={scenario.reserves}"),
            f"--store-port={store.port}",
        ]
        place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(world_size):
            job.start(command, RANK=str(rank), **place)
        return recoveries(job, scenario)


# ---- launchers that restart processes -------------------------------------------------------------------------


def elastic(scenario: Scenario, launcher: str, options: list[str], worker_options: list[str]) -> list[Recovery]:
    with Job() as job:
        worker = [str(PEERS / "elastic_worker.py"), *scenario.workload_arguments(job), *worker_options]
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
        size = ["--nnodes=1", f"--nproc-per-node={scenario.ranks}", "--max-restarts=20", "--monitor-interval=0.1"]
        # With the store shared between restarts, the default, every second recovery hangs here.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GROUP_RANK": "0"}
        program = str(Path(sys.executable).with_name(launcher))
        launched = job.start([sys.executable, program, *rendezvous, *size, *options, *worker], **environment)
        job.essential.append(launched)
        return recoveries(job, scenario)


def torchrun(scenario: Scenario) -> list[Recovery]:
    return elastic(scenario, "torchrun", [], [])


def ft_launcher(scenario: Scenario) -> list[Recovery]:
    monitor = [
        *("--ignore-missing-fault-tol-cfg", "--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=3"),
        *("--ft-workload-check-interval=0.1", "--workers-stop-timeout=1"),
    ]
    return elastic(scenario, "ft_launcher", monitor, ["--heartbeats"])


# ---- torchft --------------------------------------------------------------------------------------------------

LIGHTHOUSE = {
    "default": {"heartbeat_timeout_ms": 5000, "join_timeout_ms": 60000, "quorum_tick_ms": 100},
    "fast": {"heartbeat_timeout_ms": 1000, "join_timeout_ms": 200, "quorum_tick_ms": 20},
}


def torchft(scenario: Scenario, python: str = sys.executable) -> list[Recovery]:
    """The survivors go on without the dead replica; there is no function to enter, so both figures are their commit."""
    with Job() as job:
        address = f"127.0.0.1:{free_port()}"
        knobs = [f"--{name}={value}" for name, value in LIGHTHOUSE[scenario.profile].items()]
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        job.start([python, lighthouse, f"--bind={address}", "--min_replicas=1", *knobs])
        for replica in range(scenario.ranks):
            command = [python, str(PEERS / "torchft_worker.py"), f"--events={job.events_file}"]
            command += [f"--replica={replica}", f"--replicas={scenario.ranks}"]
            job.start(command, TORCHFT_LIGHTHOUSE=f"http://{address}")

        def commits(fault: Event) -> dict[int, float]:
            first: dict[int, float] = {}
            for event in job.events("commit", after=fault["t"]):
                if event["participants"] < scenario.ranks:
                    first.setdefault(event["replica"], event["t"])
            return first

        job.wait_for("fault", lambda: bool(job.events("fault")), START_S)
        fault = job.events("fault")[0]
        job.wait_for("commit of all survivors", lambda: len(commits(fault)) == scenario.ranks - 1, scenario.patience_s)
        recovery_ms = (max(commits(fault).values()) - fault["t"]) * 1e3
        return [Recovery(recovery_ms, recovery_ms)]


def peer_name(peer: str) -> str:
    package = {"nvrx": "nvidia-resiliency-ext", "ft_launcher": "nvidia-resiliency-ext", "torchrun": "torch"}.get(peer)
    return f"{peer} {version(package)}" if package and find_spec(package.replace("-", "_")) else peer
