"""A real job for a test: `perdure run` and `perdure controller` as processes, with faults made from outside or inside.

    job = launch("run(fault)", nproc=3)      # a fixture; see conftest.py. The source is a trainer, see trainer_kit.py
    before = job.wait_round(0)               # rank -> process, once all ranks are inside the training function
    os.kill(before[1].pid, signal.SIGKILL)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0

Nothing here sleeps for the sake of an order of events: every wait is for a condition and has a deadline, and says what
the job's log says when it fails. When a test is over, the fixture demands that nothing of the job is left anywhere.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .processes import Key, command_of, is_zombie, kill_all_with, lives, processes_with

T = TypeVar("T")

DEADLINE_S = 30.0
LOOK_S = 0.005
PERDURE = Path(sys.executable).with_name("perdure")
HEAD = """
import os, signal, sys, time
import perdure
from trainer_kit import is_said, meet, run, say, tell, wait_said
"""

KNOBS: dict[str, object] = {
    "granularity": "rank",
    "soft_timeout": 20,
    "hard_timeout": 25,
    "heartbeat_interval": 1,
    "heartbeat_timeout": 10,
    "barrier_timeout": 30,
    "completion_timeout": 20,
    "forming_timeout": 60,
    "startup_timeout": 60,
    "controller_timeout": 30,
    "termination_grace_time": 0.5,
}
"""Short, but long enough that a loaded machine raises no false alarm; a test about a limit sets that one."""

HANGS: dict[str, object] = {"soft_timeout": 1, "hard_timeout": 2}
"""For tests about hangs."""


@dataclass(frozen=True)
class Event:
    """What a trainer told: see `trainer_kit.tell`."""

    event: str
    pid: int
    start: int
    slot: str
    at: float
    round: int = -1
    rank: int = -1
    world: int = 0
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> Key:
        return self.pid, self.start


Seats = dict[int, Event]
"""rank -> the event by which its process told that it is inside a round."""


def command_line(knobs: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in {**KNOBS, **knobs}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


class Job:
    """One job. `agents` and `controller` are its processes; the latter is None where the agent keeps its own."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *,
        nproc: int = 3,
        nodes: Sequence[str] = ("n0",),
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        prefixes: Mapping[str, Sequence[str]] | None = None,
        host: str = "127.0.0.1",
        run_dir: Path | None = None,
        **knobs: object,
    ) -> None:
        """nodes: one agent with `nproc` ranks on each; with more than one the controller is a process of its own.

        knobs: of the configuration; None leaves one of `KNOBS` at perdure's default. prefix: a command that starts the
        agent; prefixes: the same by name of a node, or "controller". host: where a controller of its own listens.
        """
        self.folder = folder
        self.run_dir = run_dir or folder / "run"
        self.mark = secrets.token_hex(8)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.controller: subprocess.Popen[bytes] | None = None
        self.nproc, self.nodes = nproc, tuple(nodes)
        self._options = command_line(knobs)
        self._temporary = folder / "tmp"
        for each in (folder, self.run_dir, self._temporary):
            each.mkdir(exist_ok=True)
        script = folder / "train.py"
        script.write_text(HEAD + textwrap.dedent(source))
        self._program = [sys.executable, str(script)]
        self._prefix = list(prefix)
        self._prefixes = {name: list(words) for name, words in (prefixes or {}).items()}
        self._host = host
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "SLURM"))}
        self.env = {
            **kept,
            "FAULTS_MARK": self.mark,
            "FAULTS_FOLDER": str(folder),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [kept.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch makes it as soon as an optimizer is used
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PERDURE_JOB": f"faults-{self.mark}",
            **(env or {}),
        }
        self._shared_memory = set(os.listdir("/dev/shm"))

    # ---- starting and ending ----------------------------------------------------------------------------------

    def start(self) -> "Job":
        if len(self.nodes) > 1:
            self.start_controller()
        for order, node in enumerate(self.nodes):
            self.start_agent(node, order)
        return self

    def start_agent(self, node: str, order: int = 0) -> subprocess.Popen[bytes]:
        where = ["--nproc", str(self.nproc), "--run-dir", str(self.run_dir), "--agents", str(len(self.nodes))]
        prefix = self._prefixes.get(node, self._prefix)
        command = [*prefix, str(PERDURE), "run", *where, *self._options, "--", *self._program]
        self.agents[node] = self._process(node, command, {"PERDURE_NODE": node})
        return self.agents[node]

    def start_controller(self) -> subprocess.Popen[bytes]:
        where = ["--run-dir", str(self.run_dir), "--agents", str(len(self.nodes)), "--host", self._host]
        prefix = self._prefixes.get("controller", [])
        command = [*prefix, str(PERDURE), "controller", *where, *self._options]
        self.controller = self._process("controller", command, {})
        return self.controller

    def _process(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.output", "ab") as output:
            return subprocess.Popen(
                command,
                env={**self.env, **env},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def say(self, name: str) -> None:
        """What trainers may wait for with `wait_said`, or ask for with `is_said`."""
        (self.folder / f"said-{name}").touch()

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Let the trainers finish, and wait for the end of the job; its exit code."""
        self.say("release")
        return self.wait_end(deadline_s)

    def wait_end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait until every agent and the controller have ended, all with the same code, which is the job's."""
        self.wait_for(lambda: all(p.poll() is not None for p in self.processes()), "the end of the job", deadline_s)
        codes = {process.returncode for process in self.processes()}
        assert len(codes) == 1, self._explain(f"different exit codes: {codes}")
        return codes.pop()

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [*self.agents.values(), *([self.controller] if self.controller else [])]

    def kill_everything(self) -> None:
        kill_all_with(self.mark)
        for process in self.processes():
            process.kill()
            process.wait(10)

    def kill(self, who: Event, number: int = signal.SIGKILL) -> None:
        """Signal a rank's process; after SIGKILL, wait until it is dead."""
        os.kill(who.pid, number)
        if number == signal.SIGKILL:
            self.wait_for(lambda: not lives(who.key), f"the death of pid {who.pid}")

    # ---- what trainers told -----------------------------------------------------------------------------------

    def events(self, event: str | None = None, **wanted: object) -> list[Event]:
        """What trainers have told so far; `wanted` names values (round=1, rank=0, ...) that must be equal."""
        found: list[Event] = []
        path = self.folder / "events"
        names = Event.__dataclass_fields__.keys()
        for line in path.read_bytes().splitlines() if path.exists() else []:
            record = json.loads(line)
            known = {name: value for name, value in record.items() if name in names}
            each = Event(**known, more={name: value for name, value in record.items() if name not in names})
            if event in (None, each.event) and all(getattr(each, n) == value for n, value in wanted.items()):
                found.append(each)
        return found

    def rounds(self) -> dict[int, Seats]:
        """round -> rank -> who entered."""
        found: dict[int, Seats] = {}
        for each in self.events("entered"):
            assert each.rank not in found.get(each.round, {}), self._explain(f"two processes entered as {each}")
            found.setdefault(each.round, {})[each.rank] = each
        return found

    def wait_round(self, index: int, event: str = "entered", deadline_s: float = DEADLINE_S) -> Seats:
        """Wait until all ranks of round `index` have told `event`."""

        def seats() -> Seats | None:
            found = {each.rank: each for each in self.events(event, round=index)}
            whole = found and len(found) == next(iter(found.values())).world
            return found if whole else None

        return self.wait_for(seats, f"every rank to tell {event!r} in round {index}", deadline_s)

    def wait_event(self, event: str, deadline_s: float = DEADLINE_S, **wanted: object) -> Event:
        found = self.wait_for(lambda: self.events(event, **wanted), f"a trainer to tell {event} {wanted}", deadline_s)
        return found[0]

    # ---- what the job tells -----------------------------------------------------------------------------------

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of perdure.jsonl, of one kind."""
        path = self.run_dir / "perdure.jsonl"
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def wait_log(self, event: str, text: str = "", deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for a line of this kind that contains `text`."""
        what = f"a line {event!r} with {text!r} in the log"
        return self.wait_for(lambda: [x for x in self.log(event) if text in x["text"]], what, deadline_s)[0]

    def output(self, name: str = "n0") -> str:
        """What this agent (or "controller"), its ranks and its own controller wrote to stdout and stderr."""
        path = self.folder / f"{name}.output"
        return path.read_text(errors="replace") if path.exists() else ""

    def reason(self) -> str:
        """Why the job ended, as its verdict says."""
        return str(json.loads((self.run_dir / "verdict.json").read_bytes())["cause"])

    def endpoint(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "endpoint.json").read_bytes())

    def controller_pid(self) -> int:
        """Of the controller that leads now, whoever started it."""
        process = self.endpoint()["process"]
        return int(process[1] if isinstance(process, list) else process["pid"])

    # ---- judging ----------------------------------------------------------------------------------------------

    def survivors(self, before: Seats, after: Seats, dead: Collection[int] = (), *, all_seated: bool = True) -> int:
        """Demand that every process of `before` but those of the ranks `dead` lives and runs on; how many these are.

        all_seated: each has a seat in `after`, the same one if the world has kept its size.
        """
        healthy = {rank: each for rank, each in before.items() if rank not in dead}
        for rank, each in healthy.items():
            assert lives(each.key), self._explain(f"rank {rank} (pid {each.pid}) was healthy and is dead")
        seated = {each.key: rank for rank, each in after.items()}
        for rank, each in healthy.items() if all_seated else ():
            now = seated.get(each.key)
            assert now is not None, self._explain(f"rank {rank} (pid {each.pid}) has no seat in the next round")
            assert now == rank or len(before) != len(after), self._explain(f"rank {rank} became rank {now}")
        for rank in dead:
            assert not lives(before[rank].key), self._explain(f"the old process of rank {rank} still lives")
        return len(healthy)

    def assert_rounds(self, count: int) -> None:
        """Demand that the job had exactly the rounds 0 .. count - 1."""
        assert sorted(self.rounds()) == list(range(count)), self._explain(f"rounds {sorted(self.rounds())}")

    def wait_for(self, condition: Callable[[], T | None], what: str, deadline_s: float = DEADLINE_S) -> T:
        """Wait until `condition` returns something true, and return it. The end of the job ends the wait, too."""
        end = time.monotonic() + deadline_s
        while True:
            over = bool(self.processes()) and all(process.poll() is not None for process in self.processes())
            if found := condition():
                return found
            if over:
                raise AssertionError(self._explain(f"the job ended while the test waited for {what}"))
            if time.monotonic() > end:
                raise AssertionError(self._explain(f"{deadline_s:g} s passed without {what}"))
            time.sleep(LOOK_S)

    def assert_nothing_left(self, deadline_s: float = 5.0) -> None:
        """Demand that of the job nothing is left: process, zombie, socket, shared memory, temporary file."""
        end = time.monotonic() + deadline_s
        seen = {each.key for each in self.events()}
        while left := [*processes_with(self.mark), *filter(is_zombie, seen)]:
            if time.monotonic() > end:
                names = [f"{pid} ({command_of(pid)})" for pid, _ in left]
                raise AssertionError(self._explain(f"processes are left: {names}"))
            time.sleep(LOOK_S)
        assert os.listdir(self._temporary) == [], os.listdir(self._temporary)
        hidden = [name for name in os.listdir(self.run_dir) if name.startswith(".") or name.endswith(".tmp")]
        assert hidden == [], f"temporary files are left in the run directory: {hidden}"
        marks = ("perdure", self.mark, *(f"_{pid}_" for pid, _ in seen))
        shared = [n for n in set(os.listdir("/dev/shm")) - self._shared_memory if any(mark in n for mark in marks)]
        assert shared == [], f"shared memory is left: {shared}"
        self._assert_port_closed()

    def _assert_port_closed(self) -> None:
        if not (self.run_dir / "endpoint.json").exists():
            return
        host, _, port = self.endpoint()["address"].rpartition("//")[2].rpartition(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0, f"somebody still listens on {host}:{port}"

    def _explain(self, text: str) -> str:
        counted = Counter((each.event, each.round) for each in self.events())
        parts = [text, f"events: {dict(counted)}"]
        for name in ("controller", *self.nodes):
            lines = [line for line in self.output(name).splitlines() if " DEBUG " not in line]
            parts += [f"--- {name}", "\n".join(lines)[-8000:]]
        return "\n".join(parts)
