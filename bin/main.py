"""The `perdure` command: finds the subcommand and hands over to it.

A subcommand is one module `<name>_command.py` here with `add_arguments(parser)` and `main(args) -> exit code`. Only the
one that is asked for is imported: `perdure run` starts on every node of a job and must not wait for what it does not
use. Options are never abbreviated: what an abbreviation means changes when an option is added.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from .. import __version__
from . import early_signals

COMMANDS = {
    "run": "start the agent of this node, and the controller too when the job has just this one machine",
    "controller": "start the controller of a job whose agents run elsewhere",
    "inspect": "tell the story of a job from its journal",
    "checkpoints": "list the checkpoints of a job, verify them, delete old ones, or copy one out",
}


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def main(self, args: argparse.Namespace) -> int: ...


def load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"{__package__}.{name}_command"))


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all commands; only `chosen` gets its arguments, since only its module is imported."""
    parser = argparse.ArgumentParser(prog="perdure", description="Keeps a distributed PyTorch job alive.")
    parser.add_argument("--version", action="version", version=f"perdure {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        description = summary[0].upper() + summary[1:] + "."
        command = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
        if name == chosen:
            load(name).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:
        early_signals.end_at_once()
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words and words[0] in COMMANDS else None
    args = build_parser(chosen).parse_args(words)
    return load(args.command).main(args)


if __name__ == "__main__":
    sys.exit(main())
