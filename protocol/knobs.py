"""How each knob is written: its kind, the values it allows, and how a text or a TOML value becomes one.

A value is never bent into shape: a wrong type, a zero where time must pass and a misspelt name are errors that say what
to write instead. `off` (also `none`, `null`) is allowed only where doing without has a meaning.
"""

import difflib
import math
import re
from enum import Enum

import msgspec

from .settings import OFF, Settings

Value = str | int | float | bool | None


class Kind(Enum):
    """What a knob's value is."""

    DURATION = "a time: seconds as a number, or a text such as 90s, 2m, 500ms or 1.5h"
    COUNT = "a whole number"
    FLAG = "true or false"
    CHOICE = "one of a few words"
    FOLDER = "an absolute path of a folder"


class Knob(msgspec.Struct, frozen=True):
    """One knob. off: `off` is a value. zero: zero is a value (of a time, a number). summary: the command line's help.

    foreign: values that other frameworks know under this name, and what to write here instead.
    """

    name: str
    kind: Kind
    summary: str
    off: bool = False
    zero: bool = False
    choices: tuple[str, ...] = ()
    foreign: dict[str, str] = {}

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PERDURE_" + self.name.upper()


OTHER_FORMATS = ("zarr", "fsdp_dtensor", "torch", "torch_dcp")
"""Megatron's other names of formats."""

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("granularity", Kind.CHOICE, "what a dead rank takes out of the plan", choices=("node", "rank")),
        Knob("active_world_size", Kind.COUNT, "ranks that run, the others are warm reserves; off: all run", off=True),
        Knob("min_world_size", Kind.COUNT, "with fewer ranks than that the job ends"),
        Knob("world_size_multiple_of", Kind.COUNT, "the number of running ranks is a multiple of it"),
        Knob("max_iterations", Kind.COUNT, "rounds in all, the first one counted", off=True),
        Knob("max_rank_faults", Kind.COUNT, "faults of ranks in all", off=True),
        Knob("soft_timeout", Kind.DURATION, "no progress for so long: interrupt the rank in place", off=True),
        Knob("hard_timeout", Kind.DURATION, "no progress for so long: kill the rank", off=True),
        Knob("heartbeat_interval", Kind.DURATION, "between two heartbeats of an agent"),
        Knob("heartbeat_timeout", Kind.DURATION, "an agent that is silent for so long is lost"),
        Knob("barrier_timeout", Kind.DURATION, "for every rank to come back when a round has ended"),
        Knob("completion_timeout", Kind.DURATION, "for the others to finish, once one rank has"),
        Knob("forming_timeout", Kind.DURATION, "for all agents and ranks to be there at the start"),
        Knob("startup_timeout", Kind.DURATION, "for a new process to import its program"),
        Knob("controller_timeout", Kind.DURATION, "an agent without a controller for so long ends its ranks"),
        Knob(
            "termination_grace_time",
            Kind.DURATION,
            "for ranks to leave when the job is to stop; between SIGTERM and SIGKILL",
            zero=True,
        ),
        Knob("last_call_wait", Kind.DURATION, "for faults that belong together, at most", zero=True),
        Knob("respawn", Kind.FLAG, "start a new process in the slot of a dead one, as a reserve"),
        Knob("observe_only", Kind.FLAG, "log what the detectors find, and do nothing about it"),
        Knob("empty_cuda_cache", Kind.FLAG, "give cached device memory back between two rounds"),
        Knob("monitor_process_logdir", Kind.FOLDER, "where each agent keeps a copy of the logs", off=True),
        Knob("save", Kind.FOLDER, "where checkpoints are published, seen by all nodes; off: nowhere", off=True),
        Knob("save_interval", Kind.COUNT, "steps between two saves there", off=True),
        Knob(
            "most_recent_k",
            Kind.COUNT,
            "so many published checkpoints are kept; off: all",
            off=True,
            foreign={"-1": 'write "off" to keep all of them'},
        ),
        Knob("ckpt_step", Kind.COUNT, "resume from this step and no other; off: from the newest", off=True),
        Knob(
            "ckpt_format",
            Kind.CHOICE,
            "how a checkpoint is written: files of torch.distributed.checkpoint",
            choices=("torch_dist",),
            foreign=dict.fromkeys(OTHER_FORMATS, 'write "torch_dist", the one format that is written here'),
        ),
        Knob("async_save", Kind.FLAG, "training goes on while another process writes; false: it waits for the disk"),
        Knob("on_busy", Kind.CHOICE, "a save while all buffers are being written", choices=("skip", "wait")),
        Knob("save_timeout", Kind.DURATION, "for one save to be written and published"),
        Knob(
            "non_persistent_local_ckpt_dir",
            Kind.FOLDER,
            "where each node keeps checkpoints of its own, fast and gone with the node; off: nowhere",
            off=True,
        ),
        Knob("non_persistent_save_interval", Kind.COUNT, "steps between two saves to the node's own folder", off=True),
        Knob(
            "non_persistent_local_ckpt_algo",
            Kind.CHOICE,
            "each rank keeps its share of what several hold, or all it holds",
            choices=("fully_parallel", "atomic"),
        ),
        Knob(
            "replication",
            Kind.COUNT,
            "other nodes that hold a copy of what a node keeps of its own",
            zero=True,
            foreign={"true": "write replication = 1, the number of other nodes", "false": "write replication = 0"},
        ),
    )
}

ALWAYS = "this is always so"
ONE_WRITER = "each rank has one writer process of perdure's, used for every save"
COPIES = "replication says how many other nodes hold a copy (a factor of 2 is replication = 1), and perdure says which"

REFUSED: dict[str, str] = {
    "enabled": "perdure is on for what `perdure run` starts and off for everything else",
    "monitor_thread_interval": "an interrupt is delivered when it comes; no thread polls for it",
    "monitor_process_interval": "the kernel tells the agent of an exit at once; no process polls for it",
    "progress_watchdog_interval": "progress is stamped where it happens; no watchdog polls for it",
    "monitor_process_logfile": "there is one file for each rank: name their folder, with monitor_process_logdir",
    "cuda_health_check_timeout": "a health check that hangs is ended by barrier_timeout",
    "load": "a job resumes from where it saves; `perdure checkpoints copy` brings a checkpoint there",
    "save_retain_interval": "checkpoints are kept by number, with most_recent_k",
    "non_persistent_ckpt_type": "it is local as soon as non_persistent_local_ckpt_dir is set, and there is no other",
    "non_persistent_global_ckpt_dir": "what all nodes see is in save; a node's own is in non_persistent_local_ckpt_dir",
    "async_strategy": ONE_WRITER,
    "use_persistent_ckpt_worker": ONE_WRITER,
    "ckpt_assume_constant_structure": "the layout is checked at every save, and made anew only where it changed",
    "fully_parallel_save": ALWAYS,
    "fully_parallel_load": ALWAYS,
    "ckpt_fully_parallel_save": ALWAYS,
    "ckpt_fully_parallel_load": ALWAYS,
    "verify_integrity": ALWAYS,
    "replication_jump": COPIES,
    "replication_factor": COPIES,
}
"""Names of restart and checkpoint settings of Megatron Bridge, Megatron-LM and NeMo that could have no effect here, and
why."""

OFF_WORDS = frozenset({"off", "none", "null"})
FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
DURATION = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([a-zA-Z]*)\s*")


class Unusable(ValueError):
    """A value that a knob does not allow. rule: what is allowed. fix: what to write."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule = rule
        self.fix = fix


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def parse(knob: Knob, given: object, *, text: bool) -> Value:
    """The value of `knob` that `given` stands for.

    text: it comes from the environment or the command line, where all is text; from a file a number must be a number.
    Raises Unusable.
    """
    try:
        return parse_kind(knob, given, text=text)
    except Unusable as error:
        known = knob.foreign.get(str(given).strip().lower())
        if known is None:
            raise
        raise Unusable(error.rule, known) from error


def parse_kind(knob: Knob, given: object, *, text: bool) -> Value:
    if isinstance(given, str) and given.strip().lower() in OFF_WORDS and knob.kind is not Kind.FLAG:
        return off_value(knob)
    match knob.kind:
        case Kind.DURATION:
            return parse_duration(knob, given)
        case Kind.COUNT:
            return parse_count(knob, given, text)
        case Kind.FLAG:
            return parse_flag(knob, given, text)
        case Kind.CHOICE:
            if isinstance(given, str) and given in knob.choices:
                return given
            raise Unusable(f"{knob.name} is {' or '.join(knob.choices)}", f"write {knob.name} = {default_of(knob)}")
        case Kind.FOLDER:
            return parse_folder(knob, given)


def off_value(knob: Knob) -> Value:
    if not knob.off and knob.zero and knob.kind is Kind.COUNT:
        raise Unusable(f"{knob.name} is {knob.kind.value}", f"write {knob.name} = 0")
    if not knob.off:
        why = "every wait has an end" if knob.kind is Kind.DURATION else "there is no doing without it"
        raise Unusable(f"{knob.name} cannot be off: {why}", f"give a value, or leave it out for {default_of(knob)}")
    return OFF if knob.kind is Kind.DURATION else None


def parse_duration(knob: Knob, given: object) -> float:
    seconds: float | None = None
    if isinstance(given, int | float) and not isinstance(given, bool):
        seconds = float(given)
    elif isinstance(given, str) and (found := DURATION.fullmatch(given)):
        scale = UNITS.get(found[2].lower() or "s")
        seconds = None if scale is None else float(found[1]) * scale
    if seconds is None or not math.isfinite(seconds):
        raise Unusable(f"{knob.name} is {knob.kind.value}", f'write for example {knob.name} = "90s"')
    if seconds < 0 or (seconds == 0 and not knob.zero):
        least = "0 or more" if knob.zero else "more than 0"
        fix = 'write "off" to do without it' if knob.off else f"leave it out for {default_of(knob)}"
        raise Unusable(f"{knob.name} is {least} seconds", fix)
    return seconds


def parse_count(knob: Knob, given: object, text: bool) -> int:
    number = given
    if text and isinstance(given, str) and re.fullmatch(r"\s*[+-]?\d{1,12}\s*", given):
        number = int(given)
    if not isinstance(number, int) or isinstance(number, bool):
        raise Unusable(f"{knob.name} is {knob.kind.value}", f"write for example {knob.name} = 8")
    if number < (0 if knob.zero else 1):
        fix = 'write "off" to do without it' if knob.off else f"leave it out for {default_of(knob)}"
        if knob.name in ("max_iterations", "max_rank_faults"):
            fix = 'write "off" for no limit; max_iterations = 1 ends the job at its first fault'
        raise Unusable(f"{knob.name} is {0 if knob.zero else 1} or more", fix)
    return number


def parse_flag(knob: Knob, given: object, text: bool) -> bool:
    flag = FLAG_WORDS.get(given.strip().lower()) if text and isinstance(given, str) else given
    if not isinstance(flag, bool):
        raise Unusable(f"{knob.name} is {knob.kind.value}", f"write {knob.name} = true, or false, without quotes")
    return flag


def parse_folder(knob: Knob, given: object) -> str:
    if not isinstance(given, str) or not given.startswith("/") or "\0" in given:
        raise Unusable(
            f"{knob.name} is {knob.kind.value}, since agents run in different folders", 'write it from "/" on'
        )
    return given


def default_of(knob: Knob) -> str:
    return show(getattr(Settings(), knob.name))


def show(value: object) -> str:
    """A value as a person writes it."""
    if value is None or value == OFF:
        return "off"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g} s"
    return str(value)
