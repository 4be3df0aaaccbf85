"""The workload under perdure."""

import argparse

import torch
import workload
from events import Events

import perdure


@perdure.resilient
def train(round: perdure.Round, options: argparse.Namespace, events: Events) -> None:
    place = workload.Place(round.index, round.rank, round.world_size)
    workload.work(place, options, events, lambda: round.ping(round.index), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    workload.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options, Events(options.events))


if __name__ == "__main__":
    main()
