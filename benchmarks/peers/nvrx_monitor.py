"""The process with which nvidia-resiliency-ext's launcher watches one rank, alone."""

import argparse
import multiprocessing

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    config = FaultToleranceConfig(rank_section_timeouts={"step": 3600.0}, enable_nic_monitor=False)
    RankMonitorServer.run(config, options.socket, multiprocessing.Event(), False)


if __name__ == "__main__":
    main()
