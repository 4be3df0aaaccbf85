"""The trainer of these tests: says which process has which seat, and trains until the test lets it go.

    python trainer.py FOLDER

FOLDER/events gets a line of JSON for every round that a rank enters. FOLDER/finish ends the training, and a number in
FOLDER/exit-RANK makes that rank leave with this exit code.
"""

import json
import os
import sys
import time
from pathlib import Path

import perdure

FOLDER = Path(sys.argv[1])
NAMES = ("SLURMD_NODENAME", "SLURM_RESTART_COUNT", "PERDURE_SLOT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def tell(round: perdure.Round) -> None:
    """One small write at the end of a file is whole or absent."""
    environment = {name: os.environ.get(name) for name in NAMES}
    seat = {"round": round.index, "rank": round.rank, "world": round.world_size, "pid": os.getpid(), **environment}
    descriptor = os.open(FOLDER / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(descriptor, json.dumps(seat).encode() + b"\n")
    os.close(descriptor)


@perdure.resilient
def train(round: perdure.Round) -> None:
    tell(round)
    order = FOLDER / f"exit-{round.rank}"
    step = round.index * 1_000_000
    while not (FOLDER / "finish").exists():
        step += 1
        round.ping(step)
        if order.exists():
            code = int(order.read_text())
            order.unlink()
            sys.exit(code)
        time.sleep(0.05)


train()
