"""What must hold between knobs, and the one error that names everything that does not.

A contradiction is never resolved silently: somebody would find out days later which of two limits won. All violations
are collected, from every source, and reported together, each with the values, the rule and the fix.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

import msgspec

from .knobs import show
from .settings import OFF, Settings


class Violation(msgspec.Struct, frozen=True):
    """One thing that is wrong.

    knobs: which ones. rule: what must hold. fix: what to do. given: the values, and where they are from.
    """

    knobs: tuple[str, ...]
    rule: str
    fix: str
    given: str = ""

    def __str__(self) -> str:
        return f"{self.given}\n      rule: {self.rule}\n      fix:  {self.fix}"


class ConfigurationError(Exception):
    """The configuration cannot be used. Nothing was started."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__(self.violations)

    def __str__(self) -> str:
        count = len(self.violations)
        head = "1 error in the configuration" if count == 1 else f"{count} errors in the configuration"
        return "\n".join([head + ":", *(f"  {number}. {each}" for number, each in enumerate(self.violations, 1))])


NOWHERE: Mapping[str, str] = MappingProxyType({})

LESS_THAN: tuple[tuple[str, str, str], ...] = (
    ("soft_timeout", "hard_timeout", "a rank is interrupted in place before it is killed"),
    ("soft_timeout", "barrier_timeout", "a hang must be noticed before the wait for the hanging rank is over"),
    ("hard_timeout", "barrier_timeout", "a hanging rank must be killed before the wait for it is over"),
    ("heartbeat_interval", "heartbeat_timeout", "a living agent sends at least one heartbeat within the timeout"),
    ("heartbeat_timeout", "barrier_timeout", "a lost node must be known before the wait for its ranks is over"),
    ("termination_grace_time", "barrier_timeout", "a killed rank must be gone before the wait for it is over"),
    ("last_call_wait", "barrier_timeout", "faults are collected before the ranks are waited for"),
)
"""(smaller, larger, why). A limit that is off takes part in no rule."""

SAVE, LOCAL = "save", "non_persistent_local_ckpt_dir"
TIERS = (SAVE, LOCAL)
NEEDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("save_interval", (SAVE,), "without a folder nothing is saved there"),
    ("most_recent_k", (SAVE,), "without a folder nothing is kept there"),
    ("ckpt_step", TIERS, "a checkpoint is looked for where checkpoints are saved"),
    ("async_save", TIERS, "without a folder nothing is saved"),
    ("on_busy", TIERS, "without a folder nothing is saved"),
    ("save_timeout", TIERS, "without a folder nothing is saved"),
    ("non_persistent_save_interval", (LOCAL,), "without a folder nothing is saved there"),
    ("non_persistent_local_ckpt_algo", (LOCAL,), "it says what is kept in that folder"),
    ("replication", (LOCAL,), "what is copied to other nodes is what a node keeps in that folder"),
)
"""(knob, folders of which it needs one, why). Only of knobs that are asked for: a default needs nothing."""


def violations(settings: Settings, sources: Mapping[str, str] = NOWHERE) -> list[Violation]:
    """Everything that contradicts something else in `settings`; `sources` says where each knob's value is from."""
    found = [
        *order_violations(settings),
        *world_violations(settings),
        *tier_violations(settings, sources),
        *interval_violations(settings),
    ]
    return [cite(violation, settings, sources) for violation in found]


def size_violations(settings: Settings, ranks: int) -> list[Violation]:
    """What asks for more ranks than the job has, `ranks` of them, reserves included."""
    found: list[Violation] = []
    for name in ("active_world_size", "min_world_size", "world_size_multiple_of"):
        value = getattr(settings, name)
        if value is not None and value > ranks:
            fix = f"lower {name} to {ranks} or less, or start more ranks"
            found.append(Violation((name,), f"{name} is at most the number of ranks, here {ranks}", fix))
    return [cite(violation, settings, NOWHERE) for violation in found]


def check(settings: Settings) -> None:
    """Raises ConfigurationError if any rule between knobs is violated."""
    if found := violations(settings):
        raise ConfigurationError(found)


def order_violations(settings: Settings) -> list[Violation]:
    found: list[Violation] = []
    for smaller, larger, why in LESS_THAN:
        low, high = getattr(settings, smaller), getattr(settings, larger)
        if OFF in (low, high) or low < high:
            continue
        fix = f"raise {larger} above {show(low)}, or lower {smaller} below {show(high)}"
        found.append(Violation((smaller, larger), f"{smaller} < {larger}: {why}", fix))
    return found


def world_violations(settings: Settings) -> list[Violation]:
    """Rules between the numbers of ranks that hold however many there are."""
    active, least, step = settings.active_world_size, settings.min_world_size, settings.world_size_multiple_of
    found: list[Violation] = []
    if active is not None and active < least:
        found.append(
            Violation(
                ("min_world_size", "active_world_size"),
                "min_world_size <= active_world_size: no more ranks than active_world_size ever run",
                f"lower min_world_size to {active} or less, or raise active_world_size to {least} or more",
            )
        )
    if active is not None and active % step:
        below, above = active // step * step, (active // step + 1) * step
        found.append(
            Violation(
                ("active_world_size", "world_size_multiple_of"),
                "active_world_size is a multiple of world_size_multiple_of",
                f"set active_world_size to {f'{below} or {above}' if below else above}",
            )
        )
    return found


def tier_violations(settings: Settings, sources: Mapping[str, str]) -> list[Violation]:
    """What asks for something that the folders which are given cannot do."""
    found: list[Violation] = []
    for name, folders, why in NEEDS:
        if asked(name, settings, sources) and all(getattr(settings, folder) is None for folder in folders):
            needed = " or ".join(folders)
            fix = f"name a folder with {needed}, or leave out {name}"
            found.append(Violation((name, *folders), f"{name} needs {needed}: {why}", fix))
    if not settings.async_save and asked("on_busy", settings, sources):
        rule = "on_busy needs async_save: a save that training waits for is over before the next one begins"
        found.append(Violation(("on_busy", "async_save"), rule, "leave out on_busy, or set async_save to true"))
    if settings.save is not None and settings.non_persistent_local_ckpt_dir is not None:
        save, local = PurePosixPath(settings.save), PurePosixPath(settings.non_persistent_local_ckpt_dir)
        if save.is_relative_to(local):
            rule = f"save is not in {LOCAL}: one is seen by all nodes, the other is each node's own"
            found.append(Violation(TIERS, rule, f"name another folder for {LOCAL}, on a disk of the node"))
    return found


def interval_violations(settings: Settings) -> list[Violation]:
    """Rules of how often is saved where."""
    every, durable = settings.non_persistent_save_interval, settings.save_interval
    found: list[Violation] = []
    if settings.non_persistent_local_ckpt_dir is not None and every is None:
        knobs = (LOCAL, "non_persistent_save_interval")
        rule = f"{LOCAL} needs non_persistent_save_interval: without it nothing is saved there"
        found.append(Violation(knobs, rule, f"set non_persistent_save_interval, or leave out {LOCAL}"))
    if every is not None and durable is not None and every >= durable:
        rule = "non_persistent_save_interval < save_interval: a node's own checkpoints are the more frequent ones"
        fix = f"lower non_persistent_save_interval below {durable}, or raise save_interval above {every}"
        found.append(Violation(("non_persistent_save_interval", "save_interval"), rule, fix))
    return found


def asked(name: str, settings: Settings, sources: Mapping[str, str]) -> bool:
    """Whether somebody wants what this knob does: it is not its default, or it was given and is not off."""
    value = getattr(settings, name)
    return bool(value != getattr(Settings(), name) or (name in sources and value))


def cite(violation: Violation, settings: Settings, sources: Mapping[str, str]) -> Violation:
    """`violation` with its knobs' values, and where they are from, as what was given."""
    values: list[str] = []
    for name in violation.knobs:
        source = f" ({sources[name]})" if name in sources else ""
        values.append(f"{name} = {show(getattr(settings, name))}{source}")
    return msgspec.structs.replace(violation, given=", ".join(values))
