"""Jobs on a real cluster, submitted with the example's batch script as it stands and watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.protocol.names import start_time

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "job.sbatch"
TRAINER = Path(__file__).with_name("trainer.py")
WITHIN_S = 60.0


def slurm(*command: str) -> str:
    """The output of one of Slurm's commands."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def until(condition: Callable[[], Any], what: str | Callable[[], str], within_s: float = WITHIN_S) -> Any:
    """The first true value of `condition`; an error that says `what` if there is none in time."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        text = what() if callable(what) else what
        assert time.monotonic() < end, f"not within {within_s:g} s: {text}"
        time.sleep(0.05)
    return value


class SlurmJob:
    """One job. Its run directory, its output and what its ranks tell are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.output = folder / "output"
        self.id = ""

    def submit(self, *command: str, options: tuple[str, ...] = (), ranks: int = 2, **knobs: object) -> "SlurmJob":
        """`command`: what a rank runs, the trainer of these tests by default. ranks: of each task."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SLURM_JOB"))}
        environ |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PERDURE_RUN_DIR": str(self.run_dir),
            "RANKS_PER_TASK": str(ranks),
            "OMP_NUM_THREADS": "1",
        }
        environ |= {f"PERDURE_{name.upper()}": str(value) for name, value in knobs.items()}
        where = (f"--chdir={self.folder}", f"--output={self.output}", "--parsable", *options)
        command = command or ("python", str(TRAINER), str(self.folder))
        done = subprocess.run(
            ["sbatch", *where, str(SCRIPT), *command], env=environ, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        return self

    # ---- what can be seen ---------------------------------------------------------------------------------------

    def story(self) -> str:
        """All that a person would look at."""
        output = self.output.read_text() if self.output.exists() else "no output"
        return f"job {self.id}: {self.slurm_state()}\n{output}"

    def slurm_state(self) -> dict[str, str]:
        fields = slurm("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def seats(self, round: int, attempt: int = 1) -> dict[int, dict[str, Any]]:
        """What the ranks of a round said when they entered it, by rank."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(line) for line in lines]
        return {
            seat["rank"]: seat
            for seat in told
            if seat["round"] == round and int(seat["SLURM_RESTART_COUNT"] or 0) + 1 == attempt
        }

    def wait_round(self, round: int, size: int, attempt: int = 1) -> dict[int, dict[str, Any]]:
        """The seats of a round when it has been entered by `size` ranks and its world is as large."""

        def complete() -> bool:
            seats = self.seats(round, attempt)
            return sorted(seats) == list(range(size)) and all(seat["world"] == size for seat in seats.values())

        until(complete, lambda: f"round {round} with {size} ranks; {self.story()}")
        return self.seats(round, attempt)

    def endpoint(self) -> dict[str, Any]:
        return self._json("endpoint.json")

    def verdict(self) -> dict[str, Any]:
        return self._json("verdict.json")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.run_dir / name).read_bytes())
        except FileNotFoundError:
            return {}

    def log(self, event: str) -> list[dict[str, Any]]:
        """The job's log lines of one kind."""
        lines = (self.run_dir / "perdure.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    # ---- what can be done ---------------------------------------------------------------------------------------

    def let_rank_exit(self, rank: int, code: int) -> None:
        draft = self.folder / "draft"
        draft.write_text(str(code))
        draft.rename(self.folder / f"exit-{rank}")

    def finish(self) -> tuple[str, str]:
        (self.folder / "finish").touch()
        return self.wait_end()

    def wait_end(self) -> tuple[str, str]:
        """How Slurm books the job: its state and its exit code, `code:signal`."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        until(lambda: self.slurm_state()["JobState"] in over, lambda: f"the end; {self.story()}")
        state = self.slurm_state()
        return state["JobState"], state["ExitCode"]

    def clean_up(self) -> None:
        """End the job if it is there, and wait until nothing of it is."""
        if self.id:
            slurm("scancel", self.id)
            until(lambda: not slurm("squeue", "-h", "-j", self.id), f"job {self.id} leaves the queue")
            until(lambda: not list(processes(SLURM_JOB_ID=self.id)), lambda: f"left of {self.id}: {self.left()}", 15.0)

    def left(self) -> list[str]:
        return [" ".join(command_of(pid)) for pid in processes(SLURM_JOB_ID=self.id)]

    def srun(self) -> int:
        """The batch script's srun. It has a child that goes by the same name."""
        found = {pid for pid in processes(SLURM_JOB_ID=self.id) if command_of(pid)[0] == "srun"}
        return next(pid for pid in found if parent_of(pid) not in found)


# ---- the cluster, whose nodes are all on this machine ------------------------------------------------------------


def processes(**variables: str) -> Iterator[int]:
    """Living processes of this cluster with these environment variables."""
    variables["SLURM_CONF"] = os.environ["SLURM_CONF"]
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = set((folder / "environ").read_bytes().split(b"\0"))
            state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
            if wanted <= environ and state != b"Z":
                yield int(folder.name)


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]


def node_daemon(node: str) -> int | None:
    """The pid of the slurmd that plays `node`, if it runs on this machine."""
    for pid in processes():
        words = command_of(pid)
        if words[0].endswith("slurmd") and words[1:3] == ["-N", node]:
            return pid
    return None


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def step_daemon(pid: int) -> int | None:
    """The slurmstepd that started `pid`."""
    parent = parent_of(pid)
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
            return parent
    return None


def kill_node(node: str) -> None:
    """Everything that runs on a node stops at one instant, and is dead.

    Parents are stopped first, so that none sees a child of its stop, and killed last: the kernel wakes stopped children
    that are orphaned.
    """
    daemon = node_daemon(node)
    assert daemon is not None, f"slurmd -N {node} does not run here"
    tasks = sorted(processes(SLURMD_NODENAME=node), key=lambda pid: (start_time(pid) or 0, pid))
    parents = {parent for pid in tasks if (parent := step_daemon(pid)) is not None}
    family = [daemon, *parents, *tasks]
    for number, pids in ((signal.SIGSTOP, family), (signal.SIGKILL, reversed(family))):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def heal(nodes: list[str]) -> None:
    """Start what `kill_node` killed, and have Slurm use it again."""
    for node in nodes:
        if node_daemon(node) is None:
            slurm("slurmd", "-N", node)

    def idle() -> bool:
        states = dict(line.split() for line in slurm("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
        broken = [node for node in nodes if states[node] != "idle"]
        for node in broken:
            subprocess.run(["scontrol", "update", f"node={node}", "state=resume"], capture_output=True, timeout=30)
        return not broken

    until(idle, lambda: f"all nodes idle; {slurm('sinfo', '-N', '-l')}")
