"""What the benchmarks share: jobs of processes that leave nothing behind, rows of a comparison, and their printing.

Two rules make a figure comparable: both sides run in turns within one call, so that whatever else the machine does hits
both, and only medians and their ratio are compared. Stamps are CLOCK_MONOTONIC, which all processes of a machine share.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PEERS = Path(__file__).resolve().parent / "peers"
PERDURE = [sys.executable, "-P", "-m", "perdure.bin.main"]

Event = dict[str, Any]


class BenchmarkFailed(Exception):
    """A job did not do what it was started for; the message has the end of its output."""


# ---- measurements ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One comparison. Smaller is better on both sides."""

    case: str
    metric: str
    unit: str
    ours: list[float]
    peer: list[float]
    peer_name: str

    def as_dict(self) -> dict[str, Any]:
        ours, peer = middle(self.ours), middle(self.peer)
        return {
            "case": self.case,
            "metric": self.metric,
            "unit": self.unit,
            "ours": ours,
            "peer": peer,
            "peer_name": self.peer_name,
            "ratio": digits(peer / ours) if ours and peer is not None else None,
            "runs": max(len(self.ours), len(self.peer)),
            "ours_spread": spread(self.ours),
            "peer_spread": spread(self.peer),
        }


def digits(value: float) -> float:
    """`value` to four significant digits."""
    return float(f"{value:.4g}")


def middle(values: Sequence[float]) -> float | None:
    return digits(statistics.median(values)) if values else None


def spread(values: Sequence[float]) -> list[float]:
    return [digits(min(values)), digits(max(values))] if values else []


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages: dict[str, str] = {}
    for name in ("perdure", "torch", "pyzmq", "trio", "nvidia-resiliency-ext"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "packages": packages,
    }


def in_turns(sides: Sequence[Callable[[], None]], times: int) -> None:
    """Call each side `times` times: ours, theirs, ours, theirs ..."""
    for _ in range(times):
        for side in sides:
            side()


# ---- command line and output ----------------------------------------------------------------------------------


def argument_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer runs: finishes within a minute")
    return parser


def say(text: str) -> None:
    """Progress, for the person who waits; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def report(benchmark: str, rows: Sequence[Row], as_json: bool, **more: Any) -> None:
    """Print the result; `more` are further fields of the JSON object."""
    found = [row.as_dict() for row in rows]
    if as_json:
        print(json.dumps({"benchmark": benchmark, "machine": machine(), "rows": found, **more}))
        return
    for row in found:
        where = f"{row['case']:<34} {row['metric']:<22}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:8.1f}x"
        print(f"{where} ours {row['ours']} {row['unit']}, {row['peer_name']} {row['peer']} {row['unit']} {ratio}")
    for name, value in more.items():
        print(f"{name}: {value}")


# ---- jobs -----------------------------------------------------------------------------------------------------


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_CPP_LOG_LEVEL": "fatal",
    "PYTHONWARNINGS": "ignore",
    # torch's store client asks for the name of 127.0.0.1; a lost UDP answer costs 5 s, and on either side.
    "RES_OPTIONS": "use-vc",
}
"""Every process of a job has it, whichever side it is on."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Processes started together, with a folder for what they write; at the end they are dead, and the folder is gone.

    Every process that descends from them is found by a word in its environment: some peers fork daemons into
    sessions of their own.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        self.events_file = self.folder / "events.jsonl"
        self.events_file.touch()
        self.mark = f"BENCHMARK_JOB={uuid.uuid4().hex}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.essential: list[subprocess.Popen[bytes]] = []
        """Those that must not fail; the others may be killed on purpose."""

    def __enter__(self) -> "Job":
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a benchmark that is stopped cleans up as well
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, command: Sequence[str], commands: bool = False, **environment: str) -> subprocess.Popen[bytes]:
        """Start one process; its output goes to a file of its own. With `commands` its standard input is a pipe."""
        name, _, value = self.mark.partition("=")
        with open(self.folder / f"output-{len(self.processes)}.log", "wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, "TMPDIR": str(self.folder), **environment, name: value},
                stdin=subprocess.PIPE if commands else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def events(self, kind: str | None = None, after: float = 0.0, **wanted: Any) -> list[Event]:
        """The events so far, in order of time; a line that is being written does not count yet."""
        lines = self.events_file.read_text().split("\n")[:-1]
        found = [event for event in map(json.loads, lines) if event["t"] > after]
        if kind is not None:
            wanted["kind"] = kind
        found = [event for event in found if all(event.get(name) == value for name, value in wanted.items())]
        return sorted(found, key=lambda event: event["t"])

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `condition` holds. What is measured are stamps of the workers: looking now and then is enough."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if any(process.poll() for process in self.essential):
                raise BenchmarkFailed(f"waiting for {what}: a process has failed\n{self.tail()}")
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"no {what} within {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(0.02)

    def wait_for_end(self, timeout_s: float) -> None:
        self.wait_for("end of the job", lambda: all(each.poll() is not None for each in self.processes), timeout_s)

    def tail(self) -> str:
        """The end of each process's output."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def kill_all(self) -> None:
        for _ in range(5):  # a process may fork while the list is read
            members = self.members()
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not members:
                break
            time.sleep(0.02)
        for process in self.processes:
            process.wait(timeout=10)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # a command that it did not live to read
                    process.stdin.close()

    def members(self) -> list[int]:
        mark = self.mark.encode()
        found: list[int] = []
        for entry in os.scandir("/proc"):
            try:
                if entry.name.isdecimal() and mark in Path(entry.path, "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, or is another user's
        return found
