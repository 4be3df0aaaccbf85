"""`perdure controller`: leads a job whose agents run elsewhere (beside srun in a batch script, say)."""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import cast

import trio

from ..controller.journal_format import JournalError
from ..controller.lease import Lease, LeaseError, LeaseHeld
from ..controller.logbook import Logbook
from ..controller.recovery import Memory
from ..controller.run_directory import RunDirectory, RunDirectoryError, attempt_number
from ..controller.service import Controller, Options
from ..protocol.endpoint import EndpointError
from ..protocol.exit_codes import ExitCode
from ..protocol.keys import KeysError, create_keys, keys_from_environment
from ..protocol.settings_rules import ConfigurationError
from ..protocol.wire import WireError
from . import configuration, early_signals
from .launcher import find_job, find_run_dir

REFUSALS = (
    ConfigurationError,
    EndpointError,
    JournalError,
    KeysError,
    LeaseError,
    LeaseHeld,
    RunDirectoryError,
    WireError,
)
"""What a user can mend; everything else is a defect of ours and gets a traceback."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="ID", help="the job's id (default: PERDURE_JOB, Slurm's, or a random one)")
    parser.add_argument("--run-dir", metavar="DIR", help="shared by all machines of the job (default: perdure-runs/ID)")
    parser.add_argument("--agents", type=int, default=0, metavar="N", help="agents to wait for (default: they know)")
    parser.add_argument("--host", default="*", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on (default: any free one)")
    parser.add_argument(
        "--advertise", default="", metavar="NAME", help="how agents reach this host (default: its address)"
    )
    parser.add_argument(
        "--plain-text", action="store_true", help="no encryption and no keys: only on a network you trust"
    )
    configuration.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Lead the job to its end; its exit code."""
    try:
        chosen = configuration.load(args, os.environ, Path.cwd())
        job = find_job(os.environ, args.job)
        directory = RunDirectory(find_run_dir(os.environ, args.run_dir, job))
        with Lease.acquire(directory.lock, f"controller of job {job}"):
            return _lead(args, chosen, job, directory)
    except REFUSALS as error:
        print(f"perdure controller: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    except BaseExceptionGroup as group:
        known, rest = group.split(REFUSALS)
        if known is None or rest is not None:
            raise
        for error in _leaves(known):
            print(f"perdure controller: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)


def _lead(args: argparse.Namespace, chosen: configuration.Configuration, job: str, directory: RunDirectory) -> int:
    signalled = early_signals.hold()
    attempt = attempt_number(directory, os.environ.get)
    logbook = Logbook(directory.path, job, socket.gethostname(), sys.stderr)
    try:
        for line in chosen.lines:
            logbook.line("setting", line, level="debug")
        if chosen.sources:
            said = ", ".join(f"{name}={value} ({chosen.sources[name]})" for name, value in chosen.chosen.items())
            logbook.line("settings", f"settings that differ from the defaults: {said}")
        keys = None if args.plain_text else keys_from_environment(os.environ) or create_keys(directory.keys)
        memory = Memory(directory, job, attempt, logbook)
        where = (args.host, args.port, args.advertise)
        options = Options(job, attempt, chosen.settings, args.agents, *where, signalled=signalled)
        try:
            return trio.run(Controller(options, directory, keys, memory, logbook).run)
        finally:
            memory.journal.close()
    finally:
        logbook.close()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found.extend(_leaves(cast("BaseExceptionGroup[BaseException]", error)))
        else:
            found.append(error)
    return found
