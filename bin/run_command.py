"""`perdure run [options] -- python train.py ...`: this machine's agent, and where it is alone the controller too."""

import argparse
import os
import socket
import sys
from pathlib import Path

import trio

from ..protocol.exit_codes import ExitCode
from ..protocol.settings_rules import ConfigurationError, Violation, size_violations
from ..worker_runtime.agent.options import Options
from ..worker_runtime.agent.service import Agent
from ..worker_runtime.agent.signals import survive_warnings
from ..worker_runtime.environment_rules import judge, observe
from . import configuration, early_signals
from .launcher import Place, find_place, find_run_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks that this agent starts (default: 1)")
    parser.add_argument("--job", metavar="ID", help="the job's id (default: PERDURE_JOB, Slurm's, or a random one)")
    parser.add_argument("--run-dir", metavar="DIR", help="shared by all machines of the job (default: perdure-runs/ID)")
    parser.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="agents in the whole job (default: a Slurm step's tasks, elsewhere 1); 1 that was not taken from Slurm "
        "makes this agent start the controller too",
    )
    configuration.add_arguments(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what a rank runs")


def main(args: argparse.Namespace) -> int:
    """Run the agent until the job is over; the job's exit code."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    try:
        chosen = configuration.load(args, os.environ, Path.cwd())
        settings = chosen.settings
        place = find_place(os.environ, args.job, args.agents)
        wrong = judge(os.environ, observe(os.environ), settings) + _wrong_arguments(args.nproc, place, command)
        if place.agents == 1:
            wrong += size_violations(settings, args.nproc)
        if wrong:
            raise ConfigurationError(wrong)
    except ConfigurationError as error:
        print(f"perdure run: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    run_dir = find_run_dir(os.environ, args.run_dir, place.job)
    options = Options(
        job=place.job,
        agent=place.agent,
        node=place.node,
        host=socket.gethostname(),
        order=place.order,
        expected=place.agents,
        group=place.group,
        run_dir=run_dir,
        command=tuple(command),
        slots=args.nproc,
        settings=settings,
        first_index=place.local_id * args.nproc if place.tasks_on_node > 1 else 0,
        controller=_controller_command(place, run_dir, chosen, args) if place.alone else (),
        signalled=early_signals.hold(),
    )
    survive_warnings()
    return trio.run(Agent(options).run)


def _wrong_arguments(nproc: int, place: Place, command: list[str]) -> list[Violation]:
    found: list[Violation] = []
    if nproc < 1:
        found.append(Violation((), "at least one rank", "give --nproc 1 or more", f"--nproc {nproc}"))
    if place.agents < 1:
        found.append(Violation((), "at least one agent", "give --agents 1 or more", f"--agents {place.agents}"))
    if not command:
        found.append(
            Violation((), "a command to run", "end the line with `-- python train.py ...`", "nothing after --")
        )
    return found


def _controller_command(
    place: Place, run_dir: Path, chosen: configuration.Configuration, args: argparse.Namespace
) -> tuple[str, ...]:
    """A controller for this machine alone: it listens on the loopback, and has the same configuration."""
    boot = "import sys; from perdure.bin.main import main; sys.exit(main())"
    knobs = [*(["--config", args.config] if args.config else []), *chosen.command_line()]
    where = ("--job", place.job, "--run-dir", str(run_dir), "--agents", "1", "--host", "127.0.0.1")
    return (sys.executable, "-P", "-c", boot, "controller", *where, *knobs)
