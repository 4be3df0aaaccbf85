"""The workload under torchrun and ft_launcher, which restart whole processes: each life of them is one round."""

import argparse
import os

import torch
import workload
from events import Events


def heartbeat_sender() -> "workload.Ping":
    """Connects to ft_launcher's monitor of this rank."""
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    workload.add_arguments(parser)
    parser.add_argument("--heartbeats", action="store_true", help="report to the rank monitor of ft_launcher")
    options = parser.parse_args()
    torch.set_num_threads(1)
    events = Events(options.events)
    ping: workload.Ping = heartbeat_sender() if options.heartbeats else lambda: None
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place = workload.Place(life, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    workload.work(place, options, events, ping, None)


if __name__ == "__main__":
    main()
