"""The workload under nvidia-resiliency-ext's in-process restart.

Profiles: `default` leaves every interval and timeout as the library has it; `fast` polls every 10 ms and waits no
longer than a clear fault needs. At 1 ms it kills healthy ranks when cores are short, so there is no faster profile.
"""

import argparse
import os
from datetime import timedelta
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
import workload
from events import Events
from nvidia_resiliency_ext.inprocess.rank_assignment import ActivateAllRanks, Layer, LayerFlag, ShiftRanks, Tree

PROFILES: dict[str, dict[str, float]] = {
    "default": {},
    "fast": {
        "monitor_thread_interval": 0.01,
        "monitor_process_interval": 0.01,
        "progress_watchdog_interval": 0.01,
        "last_call_wait": 0.01,
        "heartbeat_interval": 0.25,
        "heartbeat_timeout": 2.0,
        "soft_timeout": 1.0,
        "hard_timeout": 3.0,
        "barrier_timeout": 30.0,
        "completion_timeout": 30.0,
        "termination_grace_time": 0.05,
    },
}


def wrapper_arguments(options: argparse.Namespace) -> dict[str, Any]:
    if options.reserves:
        assignment: Any = Tree([Layer(min_ranks=1, max_ranks=options.active, flag=LayerFlag.RESERVE)])
    else:
        assignment = inprocess.Compose(ActivateAllRanks(), ShiftRanks())
    port = int(os.environ["MASTER_PORT"])
    return {
        "rank_assignment": assignment,
        "store_kwargs": {"host_name": "127.0.0.1", "port": port, "timeout": timedelta(seconds=60)},
        "initialize": inprocess.initialize.RetryController(max_iterations=options.faults + 3),
        **{name: timedelta(seconds=seconds) for name, seconds in PROFILES[options.profile].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    workload.add_arguments(parser)
    parser.add_argument("--profile", choices=list(PROFILES), required=True)
    parser.add_argument("--active", type=int, required=True)
    parser.add_argument("--reserves", type=int, required=True)
    parser.add_argument("--store-port", type=int, required=True, help="of the trainer's own store")
    options = parser.parse_args()
    torch.set_num_threads(1)
    events = Events(options.events)
    store = dist.TCPStore("127.0.0.1", options.store_port, None, False, timeout=timedelta(seconds=60))

    def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        place = workload.Place(call_wrapper.iteration, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        workload.work(place, options, events, call_wrapper.ping, dist.PrefixStore(str(place.round), store))

    inprocess.Wrapper(**wrapper_arguments(options))(train)()


if __name__ == "__main__":
    main()
