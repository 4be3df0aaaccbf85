"""Breaks a trainer that knows nothing of it: runs a script, and makes chosen ranks fail when they report chosen steps.

    perdure run --nproc 4 -- python examples/faulty.py --marks /tmp/marks \\
        --fault exception@1:20 --fault sigkill@0:40 examples/train_gpt.py --steps 100

A fault is KIND@RANK:STEP and strikes when that rank first pings that step or a later one. It strikes once in the life
of the job: a file in the folder of marks, made before the blow, remembers it through every restart.
"""

import argparse
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn, SupportsIndex

import perdure


class InjectedFault(RuntimeError):
    """Raised in place of a trainer's own error."""


def raise_exception() -> NoReturn:
    raise InjectedFault("injected")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> NoReturn:
    sys.exit(3)


def spin() -> NoReturn:
    """Alive, but without progress: the interpreter goes on, the training does not."""
    while True:
        time.sleep(0.01)


KINDS = {"exception": raise_exception, "sigkill": die, "sigstop": freeze, "exit": leave, "hang": spin}


class Injection(NamedTuple):
    kind: str
    rank: int
    step: int

    @classmethod
    def parse(cls, text: str) -> "Injection":
        kind, _, place = text.partition("@")
        rank, _, step = place.partition(":")
        if kind not in KINDS or not rank.isdecimal() or not step.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not KIND@RANK:STEP with a KIND of {', '.join(KINDS)}")
        return cls(kind, int(rank), int(step))

    def strike(self, marks: Path) -> None:
        """Fail, if this fault has not struck before."""
        mark = marks / f"{self.kind}-{self.rank}-{self.step}"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return
        print(f"injecting {self.kind} into rank {self.rank} at step {self.step}", flush=True)
        KINDS[self.kind]()


def arm(injections: list[Injection], marks: Path) -> None:
    """From now on, `Round.ping` strikes."""
    ping = perdure.Round.ping

    def ping_and_fail(self: perdure.Round, step: SupportsIndex) -> None:
        ping(self, step)
        for injection in injections:
            if self.rank == injection.rank and step.__index__() >= injection.step:
                injection.strike(marks)

    perdure.Round.ping = ping_and_fail


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a trainer and break it at chosen steps.")
    parser.add_argument("--fault", dest="faults", type=Injection.parse, action="append", default=[])
    parser.add_argument("--marks", type=Path, required=True, help="folder that remembers which faults have struck")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.marks.mkdir(parents=True, exist_ok=True)
    arm(options.faults, options.marks)
    sys.argv = [options.script, *options.arguments]
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
