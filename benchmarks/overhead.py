"""What being watched costs the training thread: perdure's ping and sections against nvidia-resiliency-ext's.

Both watch the same process: a rank under `perdure run`, which nvidia-resiliency-ext's rank monitor serves besides.
"""

import json
import sys
from pathlib import Path

import systems
from harness import PEERS, PERDURE, BenchmarkFailed, Job, Row, argument_parser, report

STEP_CASE = "step"


def start_rank_monitor(job: Job) -> Path:
    """The peer's monitor process, which one of its launchers would start for each rank; returns its socket."""
    path = job.folder / "rank-monitor.socket"
    job.start([sys.executable, str(PEERS / "nvrx_monitor.py"), f"--socket={path}"])
    job.wait_for("rank monitor", path.exists, 60.0)
    return path


def measure(blocks: int, calls: int) -> dict[str, dict[str, list[float]]]:
    with Job() as job:
        monitor = start_rank_monitor(job)
        out = job.folder / "figures.json"
        worker = [str(PEERS / "overhead_worker.py"), f"--out={out}", f"--blocks={blocks}", f"--calls={calls}"]
        rank = job.start(
            [*PERDURE, "run", "--nproc=1", f"--run-dir={job.folder / 'run'}", "--", sys.executable, *worker],
            FT_RANK_MONITOR_IPC_SOCKET=str(monitor),
        )
        job.essential.append(rank)
        job.wait_for("end of the measurement", lambda: rank.poll() is not None, 300.0)
        if not out.exists():
            raise BenchmarkFailed(f"the worker left no figures\n{job.tail()}")
        return json.loads(out.read_text())


def main() -> int:
    parser = argument_parser("Costs of being watched: perdure and nvidia-resiliency-ext in one process.")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--calls", type=int, default=400, help="of each action in a block")
    options = parser.parse_args()
    blocks, calls = (3, 200) if options.quick else (options.blocks, options.calls)
    figures = measure(blocks, calls)
    step = figures.pop(STEP_CASE)
    name = systems.peer_name("nvrx")
    rows = [Row(case, "cost of a call", "ns", sides["ours"], sides["peer"], name) for case, sides in figures.items()]
    rows.append(Row("step with a section and a ping", "time added", "ns", step["ours"], step["peer"], name))
    bare = sorted(step["bare"])[len(step["bare"]) // 2]
    slowdown = {side: round(100 * sorted(step[side])[blocks // 2] / bare, 3) for side in ("ours", "peer")}
    report("overhead", rows, options.json, step_ns=bare, slowdown_percent=slowdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
