"""The demonstration: the same small training twice, left alone and broken in four ways, with the same end.

`bin/demo` runs this. Four ranks of examples/train_gpt.py, on this machine; it takes a minute or two.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PERDURE = [sys.executable, "-P", "-m", "perdure.bin.main"]
RANKS = 4
STEPS = 160
FAULTS = {
    "exception@2:30": "rank 2 raises an exception",
    "hang@3:60": "rank 3 hangs: it lives, but makes no progress",
    "sigkill@1:90": "rank 1 is killed with SIGKILL",
    "sigkill@0:120": "rank 0 is killed with SIGKILL: elsewhere that ends a job",
}
SETTINGS = ["--granularity=rank", "--soft-timeout=3", "--hard-timeout=6"]


def title(text: str) -> None:
    print(f"\n\033[1m=== {text}\033[0m\n" if sys.stdout.isatty() else f"\n=== {text}\n", flush=True)


QUIET = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "error",
    # torch asks the name server for the name of 127.0.0.1, and waits 5 s for an answer that was lost; TCP loses none.
    "RES_OPTIONS": "use-vc",
}


def run(folder: Path, faults: list[str]) -> str:
    """Train under `perdure run`, show what it says, and return the trainer's final line."""
    folder.mkdir(parents=True)
    trainer = [str(HERE / "train_gpt.py"), f"--steps={STEPS}"]
    if faults:
        marks = f"--marks={folder / 'marks'}"
        trainer = [str(HERE / "faulty.py"), marks, *(f"--fault={fault}" for fault in faults), *trainer]
    perdure = [*PERDURE, "run", f"--nproc={RANKS}", f"--run-dir={folder / 'run'}", *SETTINGS]
    perdure += [f"--save={folder / 'checkpoints'}", "--save-interval=20", "--most-recent-k=2"]
    command = [*perdure, "--", sys.executable, *trainer]
    environment = {**os.environ, **QUIET}
    final = ""
    started = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(f"  {line}", end="", flush=True)
            if "final step=" in line:
                final = line[line.index("final step=") :].strip()
    if job.returncode != 0 or not final:
        sys.exit(f"the training ended with exit code {job.returncode}; its files are in {folder}")
    print(f"\n  took {time.monotonic() - started:.0f} s")
    return final


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on four ranks, break it, and see it recover.")
    default = HERE.parent / "perdure-runs" / "demo"
    parser.add_argument("--folder", type=Path, default=default, help="for journals and checkpoints; emptied first")
    options = parser.parse_args()
    folder: Path = options.folder
    for part in ("undisturbed", "broken"):
        shutil.rmtree(folder / part, ignore_errors=True)

    title(f"1. A training of {STEPS} steps on {RANKS} ranks, undisturbed")
    undisturbed = run(folder / "undisturbed", [])

    title("2. The same, and now")
    for what in FAULTS.values():
        print(f"  - {what}")
    print()
    broken = run(folder / "broken", list(FAULTS))

    title("3. What happened, told from the journal: perdure inspect")
    subprocess.run([*PERDURE, "inspect", str(folder / "broken" / "run" / "journal")], check=True)

    title("4. How it ended")
    print(f"  undisturbed:  {undisturbed}")
    print(f"  {len(FAULTS)} faults:     {broken}")
    print(f"  files:        {folder}\n")
    if undisturbed != broken:
        sys.exit("DIFFERENT: a fault has left its mark on the training.")
    print("  The same, to the bit.\n")


if __name__ == "__main__":
    main()
