"""`perdure checkpoints`: what there is on both tiers, whether it is good, and what is done with it by hand.

It looks at the folders and at nothing else: there may be no job and no controller. So it cannot know who is writing:
what is unfinished and was written to within the last hour is taken for a save under way, and left alone.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
from tqdm import tqdm

from ..checkpoint_io.names import published_name
from ..protocol.exit_codes import ExitCode
from ..protocol.settings_rules import ConfigurationError
from . import configuration
from .checkpoint_copy import CopyError, Source, copy
from .checkpoint_list import Row, encode, read_rows, size, span, table
from .checkpoint_prune import chosen_for_step, delete, outdated
from .checkpoint_verify import verify
from .early_signals import ENDING

ACTIONS = {
    "list": "what there is; also without any action",
    "verify": "compare every byte with its digest; exit code 1 if anything is bad",
    "prune": "delete old checkpoints, and what is left of saves that were never finished",
    "copy": "copy a published checkpoint into another folder, verified while it is copied",
}


class Failure(Exception):
    """What was asked for cannot be done. The message names why, and what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code


class Stopped(BaseException):
    """A signal asked this process to end."""


class Folders(msgspec.Struct, frozen=True):
    """Of the durable tier and of the local one, all nodes'; None: is not looked at."""

    save: Path | None
    local: Path | None

    def __str__(self) -> str:
        return " and ".join(str(folder) for folder in (self.save, self.local) if folder is not None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser)
    add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    made: dict[str, argparse.ArgumentParser] = {}
    for name, summary in ACTIONS.items():
        description = summary[0].upper() + summary[1:] + "."
        made[name] = actions.add_parser(name, help=summary, description=description, allow_abbrev=False)
        add_folders(made[name])
    for name in ("list", "verify"):
        add_json(made[name])
        made[name].add_argument("--step", type=int, metavar="N", help="only this step")
    which = made["prune"].add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=whole_number, metavar="K", help="on each tier keep the K newest complete ones")
    which.add_argument("--step", type=int, metavar="N", help="delete this step, and nothing else")
    made["prune"].add_argument("--yes", action="store_true", help="do it; without, only say what would be deleted")
    made["copy"].add_argument("--step", type=int, metavar="N", required=True, help="which one")
    made["copy"].add_argument("to", type=Path, metavar="TO", help="the folder that will have the copy in it")


def add_folders(parser: argparse.ArgumentParser) -> None:
    # Options may stand before the action and after it: one that is not given must not undo the other.
    missing = argparse.SUPPRESS
    parser.add_argument("--save", metavar="DIR", default=missing, help="the durable tier (default: as configured)")
    parser.add_argument("--local", metavar="DIR", default=missing, help="the local tier, with a folder for each node")
    parser.add_argument("--config", metavar="FILE", default=missing, help="read this file instead of perdure.toml")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line for each save"
    )


def whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more: the newest complete checkpoint is never deleted")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Do it; 0, 1 if something is bad or went wrong, 2 if the folders are not known."""
    try:
        folders = find_folders(args)
        return int(DOES[args.action or "list"](args, folders))
    except ConfigurationError as error:
        print(f"perdure checkpoints: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
    except (Failure, CopyError, OSError) as error:
        print(f"perdure checkpoints: {error}", file=sys.stderr)
        return int(error.code if isinstance(error, Failure) else ExitCode.FAILED)
    except Stopped as stopped:
        return 128 + int(stopped.args[0])


def find_folders(args: argparse.Namespace) -> Folders:
    """Those that are named by options, and no others; without any, those of the configuration."""
    save, local = getattr(args, "save", None), getattr(args, "local", None)
    named = save is not None or local is not None
    if not named:
        settings = configuration.load(args, os.environ, Path.cwd()).settings
        save, local = settings.save, settings.non_persistent_local_ckpt_dir
    if save is None and local is None:
        fix = "name one with --save or --local, or start this where perdure.toml is"
        raise Failure(f"there is no folder to look at, no configuration names one; {fix}", ExitCode.USAGE)
    folders = Folders(there(save, named), there(local, named))
    if folders == Folders(None, None):
        raise Failure("there is nothing to look at; the job's first save makes these folders")
    return folders


def there(folder: str | None, named: bool) -> Path | None:
    """The folder, if it is there. A configured one need not be: this may be another machine than the job's."""
    if folder is None:
        return None
    path = Path(folder).absolute()
    if path.is_dir():
        return path
    if named:
        raise Failure(f"{path} is not a folder on this machine; correct the path", ExitCode.USAGE)
    print(f"perdure checkpoints: {path} is configured, and not on this machine", file=sys.stderr)
    return None


# ---- actions --------------------------------------------------------------------------------------------------


def do_list(args: argparse.Namespace, folders: Folders) -> ExitCode:
    show(chosen(folders, getattr(args, "step", None)), args, folders)
    return ExitCode.COMPLETED


def do_verify(args: argparse.Namespace, folders: Folders) -> ExitCode:
    rows = chosen(folders, args.step)
    with tqdm(total=sum(map(bytes_to_read, rows)), unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for row in rows:
            bar.set_description(f"step {row.step}, {row.tier.value}")
            verify(row, bar.update)
    show(rows, args, folders)
    for row in rows:
        for problem in row.problems:
            print(f"perdure checkpoints: {row.name}: {problem}", file=sys.stderr)
    return ExitCode.COMPLETED if all(row.good for row in rows) else ExitCode.FAILED


def do_prune(args: argparse.Namespace, folders: Folders) -> ExitCode:
    rows = read_rows(folders.save, folders.local)
    if args.step is None:
        doomed = outdated(rows, args.keep)
    else:
        doomed, why = chosen_for_step(rows, args.step)
        if not doomed:
            raise Failure(why)
    problems: list[str] = []
    for row in tqdm(doomed, unit="save", disable=None if args.yes else True, leave=False):
        verb = "deleting" if args.yes else "would delete"
        tell(f"{verb} {row.name}: {row.tier.value}, {size(row.nbytes)}, {span(row.age)} old")
        problems += delete(row, folders.save, folders.local) if args.yes else []
    for problem in problems:
        print(f"perdure checkpoints: {problem}", file=sys.stderr)
    if not doomed:
        tell("there is nothing to delete")
    elif not args.yes:
        tell("nothing was deleted; add --yes to do it")
    return ExitCode.FAILED if problems else ExitCode.COMPLETED


def do_copy(args: argparse.Namespace, folders: Folders) -> ExitCode:
    if folders.save is None:
        raise Failure("only a published checkpoint can be copied; name the durable tier's folder with --save")
    folder = folders.save / published_name(args.step)
    if not folder.exists():
        raise Failure(f"step {args.step} is not published; {steps_of(read_rows(folders.save, None))}")
    source = Source(folder)
    bar = tqdm(total=source.manifest.nbytes, unit="B", unit_scale=True, disable=None, leave=False)
    with signals_raise(), bar:
        final = copy(source, args.to.absolute(), bar.update)
    tell(f"copied step {args.step}, {size(source.manifest.nbytes)}, every byte verified: {final}")
    return ExitCode.COMPLETED


DOES: dict[str, Callable[[argparse.Namespace, Folders], ExitCode]] = {
    "list": do_list,
    "verify": do_verify,
    "prune": do_prune,
    "copy": do_copy,
}


@contextmanager
def signals_raise() -> Generator[None]:
    """A signal that asks to end raises Stopped meanwhile, so that what is half done is cleared away."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def chosen(folders: Folders, step: int | None) -> list[Row]:
    rows = read_rows(folders.save, folders.local)
    if step is None:
        return rows
    if found := [row for row in rows if row.step == step]:
        return found
    raise Failure(f"step {step} is in neither tier; {steps_of(rows)}")


def steps_of(rows: Iterable[Row]) -> str:
    steps = sorted({row.step for row in rows if row.complete})
    shown = ", ".join(map(str, steps[-10:]))
    return f"complete are {'..., ' if len(steps) > 10 else ''}{shown}" if steps else "no step is complete"


def bytes_to_read(row: Row) -> int:
    """A local save is read on every node that has it."""
    return sum(found.nbytes for found in row.found)


def show(rows: list[Row], args: argparse.Namespace, folders: Folders) -> None:
    if getattr(args, "json", False):
        tell(*encode(rows))
    elif rows:
        tell(*table(rows))
    else:
        tell(f"no checkpoints in {folders}")


def tell(*lines: str) -> None:
    try:
        for line in lines:
            tqdm.write(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough; without this Python complains when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
