"""One replica group of one process under torchft: an all-reduce of gradients, and a commit, every 20 ms.

torchft has no rounds. The last replica dies after its first second of commits; what is measured is the survivors' next
commit without it.
"""

import argparse
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from events import Events
from torchft import Manager, ProcessGroupGloo

TIMEOUT = timedelta(seconds=5)
QUIET_S = 1.0


def make_manager(replica: int, store: dist.TCPStore) -> Any:
    model = torch.nn.Linear(64, 64)
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        replica_id=f"replica{replica}",
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    events = Events(options.events)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = make_manager(options.replica, store)
    victim = options.replica == options.replicas - 1
    complete_since: float | None = None
    while True:
        manager.start_quorum()
        manager.allreduce(torch.randn(64 * 64)).wait()
        time.sleep(0.02)
        if not manager.should_commit():
            continue
        participants = manager.num_participants()
        events.emit("commit", replica=options.replica, participants=participants)
        if participants == options.replicas:
            complete_since = complete_since or time.monotonic()
        if victim and complete_since and time.monotonic() > complete_since + QUIET_S:
            events.emit("fault", replica=options.replica)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
