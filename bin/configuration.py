"""Reads the knobs: perdure.toml, over it the environment (PERDURE_<KNOB>), over that the command line.

The file has the knobs at its top level, `soft_timeout = "60s"`. A value that is wrong is an error even where another
source overrides it, and all errors, from all sources and between knobs, come in one `ConfigurationError`. What is in
effect, and where each value is from, is told to the log.
"""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from ..protocol.knobs import KNOBS, REFUSED, Kind, Knob, Unusable, Value, nearest, parse, show
from ..protocol.settings import Settings
from ..protocol.settings_rules import ConfigurationError, Violation, violations

FILE_NAME = "perdure.toml"
FILE_VARIABLE = "PERDURE_CONFIG"
PREFIX = "PERDURE_"

RESERVED = frozenset(
    {
        FILE_VARIABLE,
        "PERDURE_AGENTS",
        "PERDURE_AUTO_STAMP_S",
        "PERDURE_BEAT_FD",
        "PERDURE_CHECKPOINTS",
        "PERDURE_GLOO_LIMIT_S",
        "PERDURE_HARD_LIMIT_S",
        "PERDURE_JOB",
        "PERDURE_KEYS",
        "PERDURE_LIFE",
        "PERDURE_MARK",
        "PERDURE_NODE",
        "PERDURE_NODE_GROUP",
        "PERDURE_RANK_FD",
        "PERDURE_ROUND",
        "PERDURE_RUN_DIR",
        "PERDURE_SLOT",
        "PERDURE_TOKEN",
    }
)
"""Variables of ours that are no knobs."""


class Configuration(msgspec.Struct, frozen=True):
    """The effective settings, and where each value is from; a knob that has its default is not in `sources`."""

    settings: Settings
    sources: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """One line a knob, for the log."""
        return [
            f"{name} = {show(getattr(self.settings, name))} ({self.sources.get(name, 'default')})" for name in KNOBS
        ]

    @property
    def chosen(self) -> dict[str, str]:
        """Every knob that somebody set, with its value as a text."""
        return {name: show(getattr(self.settings, name)) for name in KNOBS if name in self.sources}

    def command_line(self) -> list[str]:
        """The options that were given on the command line, to hand them on to another command."""
        options: list[str] = []
        for name, source in self.sources.items():
            if source.startswith("--"):
                kind, value = KNOBS[name].kind, self.chosen[name]
                # Times are shown as `60 s`, and a folder's name may have a blank of its own.
                value = value.replace(" ", "") if kind is Kind.DURATION else value
                options.append(source if kind is Kind.FLAG else f"{source}={value}")
        return options


class Reading:
    """What has been read so far, from the weakest source to the strongest."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.sources: dict[str, str] = {}
        self.wrong: list[Violation] = []

    def take(self, knob: Knob, given: object, source: str, shown: str, *, text: bool) -> None:
        try:
            self.values[knob.name] = parse(knob, given, text=text)
            self.sources[knob.name] = source
        except Unusable as error:
            self.wrong.append(Violation((knob.name,), error.rule, error.fix, given=shown))

    def refuse(self, source: str, names: list[str], line: str) -> None:
        """Known names without an effect here: one error for all, so that a pasted configuration is soon right."""
        reasons = "; ".join(f"{name}: {REFUSED[knob_name(name)]}" for name in names)
        fix = f"delete {'this' if len(names) == 1 else f'these {len(names)}'} {line}{'' if len(names) == 1 else 's'}"
        shown = f"{source}: {', '.join(names)}"
        self.wrong.append(Violation((), f"a knob without effect does not exist. {reasons}", fix, given=shown))

    def unknown(self, shown: str, name: str) -> None:
        meant = nearest(knob_name(name), list(KNOBS))
        if meant and name.startswith(PREFIX):
            meant = KNOBS[meant].variable
        fix = f"did you mean {meant}?" if meant else "delete it; `perdure run --help` lists the knobs"
        self.wrong.append(Violation((), f"there is no knob {name}", fix, given=shown))

    def finish(self) -> Configuration:
        """The configuration, or all that is wrong with it."""
        settings = Settings(**cast(dict[str, Any], self.values))
        # A rule between knobs says nothing true of a knob whose value could not be used.
        broken = {name for violation in self.wrong for name in violation.knobs}
        between = [each for each in violations(settings, self.sources) if not broken.intersection(each.knobs)]
        if self.wrong or between:
            raise ConfigurationError([*self.wrong, *between])
        return Configuration(settings, self.sources)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` one option for each knob, and `--config`."""
    group = parser.add_argument_group(
        "configuration",
        f"Each may also stand in {FILE_NAME} (soft_timeout) or in the environment (PERDURE_SOFT_TIMEOUT).",
    )
    group.add_argument("--config", metavar="FILE", help=f"read this file instead of {FILE_NAME}")
    defaults = Settings()
    for knob in KNOBS.values():
        summary = f"{knob.summary} (default: {show(getattr(defaults, knob.name))})"
        if knob.kind is Kind.FLAG:
            group.add_argument(knob.flag, action=argparse.BooleanOptionalAction, default=None, help=summary)
        else:
            metavar = "{" + ",".join(knob.choices) + "}" if knob.choices else metavar_of(knob)
            group.add_argument(knob.flag, metavar=metavar, default=None, help=summary)


def metavar_of(knob: Knob) -> str:
    return {Kind.DURATION: "TIME", Kind.COUNT: "N", Kind.FOLDER: "FOLDER"}.get(knob.kind, "VALUE")


def load(args: argparse.Namespace, environ: Mapping[str, str], folder: Path) -> Configuration:
    """The effective configuration. folder: where perdure.toml is looked for. Raises ConfigurationError."""
    reading = Reading()
    named = getattr(args, "config", None) or environ.get(FILE_VARIABLE)
    read_file(reading, folder / (named or FILE_NAME), must_exist=named is not None)
    read_environment(reading, environ)
    read_command_line(reading, args)
    return reading.finish()


def read_file(reading: Reading, path: Path, *, must_exist: bool) -> None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            fix = f"correct the path given by --config or {FILE_VARIABLE}"
            reading.wrong.append(Violation((), "the configuration file exists", fix, given=str(path)))
        return
    except OSError as error:
        rule = f"the configuration file can be read: {error.strerror}"
        reading.wrong.append(Violation((), rule, "correct its path or its permissions", given=str(path)))
        return
    except ValueError as error:  # both bad TOML and bad UTF-8
        rule = f"the configuration file is TOML: {error}"
        reading.wrong.append(Violation((), rule, "correct that line", given=str(path)))
        return
    take_content(reading, content, path.name)


def take_content(reading: Reading, content: dict[str, Any], source: str) -> None:
    if refused := [name for name in content if name in REFUSED]:
        reading.refuse(source, refused, "line")
    for name, given in content.items():
        if name in REFUSED:
            continue
        if knob := KNOBS.get(name):
            reading.take(knob, given, source, f"{source}: {name} = {toml_text(given)}", text=False)
        elif isinstance(given, dict):
            rule = "the knobs stand at the top level of the file, in no table"
            reading.wrong.append(Violation((), rule, f"delete the line [{name}]", given=f"{source}: [{name}]"))
        else:
            reading.unknown(f"{source}: {name} = {toml_text(given)}", name)


def read_environment(reading: Reading, environ: Mapping[str, str]) -> None:
    ours = {name: text for name, text in environ.items() if name.startswith(PREFIX) and name not in RESERVED}
    if refused := [name for name in ours if knob_name(name) in REFUSED]:
        reading.refuse("environment", refused, "variable")
    variables = {knob.variable: knob for knob in KNOBS.values()}
    for name, text in ours.items():
        if knob := variables.get(name):
            reading.take(knob, text, name, f"{name}={text}", text=True)
        elif name not in refused:
            reading.unknown(f"{name}={text}", name)


def read_command_line(reading: Reading, args: argparse.Namespace) -> None:
    for knob in KNOBS.values():
        given = getattr(args, knob.name, None)
        if isinstance(given, bool):
            flag = knob.flag if given else knob.flag.replace("--", "--no-", 1)
            reading.take(knob, given, flag, flag, text=True)
        elif given is not None:
            reading.take(knob, given, knob.flag, f"{knob.flag}={given}", text=True)


def knob_name(variable: str) -> str:
    """The knob's name, of the name itself or of its variable."""
    return variable.removeprefix(PREFIX).lower()


def toml_text(given: object) -> str:
    """A TOML value as it may have stood in the file."""
    if isinstance(given, bool):
        return "true" if given else "false"
    return f'"{given}"' if isinstance(given, str) else str(given)
