"""What every way of checkpointing looks like to the worker: prepare, save, done, load, forget, close.

A method sees the state as a flat dictionary of tensors whose names differ between ranks: each rank has its own part.
"""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch

State = dict[str, torch.Tensor]


class Place(NamedTuple):
    """Where a method works. group: a gloo group of its own, beside the one the training loop uses."""

    rank: int
    world_size: int
    folder: Path
    group: Any


class Method:
    """Base of all: each save goes to a folder of its own, and is done when the call returns."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.state: State = {}

    def folder_of(self, step: int) -> Path:
        return self.place.folder / f"iter_{step:07d}"

    def prepare(self, state: State) -> None:
        """Whatever a job does once, before its first save."""
        self.state = state

    def save(self, step: int) -> None:
        """What the training thread waits for."""
        raise NotImplementedError

    def done(self, step: int) -> bool:
        """Asked once per training step; false while the save is being written. Raises if it failed."""
        return True

    def load(self, step: int, into: State) -> None:
        """Read a save back into tensors that exist already, as a restart has them."""
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Delete a save; called by rank 0 alone."""
        shutil.rmtree(self.folder_of(step), ignore_errors=True)

    def close(self) -> None:
        pass


def settle(folder: Path) -> None:
    """Make all that lies under `folder` durable."""
    for parent, _, files in os.walk(folder):
        for name in [*files, "."]:
            try:
                descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            except FileNotFoundError:
                continue  # a method that deletes old saves in the background has just done so
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def take_over(found: State, into: State) -> None:
    """For loaders that return new tensors: what a restart does with them."""
    for name, tensor in into.items():
        tensor.copy_(found[name])
