"""What the environment of a job must be like, judged before its first rank is started.

Pure: `judge` looks at an environment and at versions, and returns every violation at once. NCCL's rules count only
where the job can use NCCL; Slurm's only in a step. A broken one costs healthy ranks their lives at the first fault.
"""

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping

import msgspec

from ..protocol.knobs import show
from ..protocol.settings import OFF, Settings
from ..protocol.settings_rules import Violation

MIN_TORCH = (2, 8)
"""The oldest torch that perdure runs with."""

MIN_NCCL = (2, 26, 2)
"""The oldest NCCL with which NVIDIA's own in-process restart is supported."""

NCCL_MONITOR_TIMEOUT = 480.0
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC."""

FALSE_WORDS = frozenset({"0", "n", "no", "f", "false"})
QUIET_LEVELS = frozenset({"error", "2", "fatal", "3"})


class Stack(msgspec.Struct, frozen=True):
    """What is installed and visible. Versions as they call themselves, None if unknown. cuda: a rank can see a GPU."""

    cuda: bool = False
    torch: str | None = None
    nccl: str | None = None


def observe(environ: Mapping[str, str], devices: Callable[[], list[str]] = lambda: os.listdir("/dev")) -> Stack:
    """The stack of this machine, without importing torch (it costs seconds, and the agent does not need it)."""
    hidden = environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1", "NoDevFiles")
    cuda = not hidden and any(re.fullmatch(r"nvidia\d+", name) for name in devices())
    nccl = next(filter(None, (installed(f"nvidia-nccl-cu{major}") for major in (13, 12))), None)
    return Stack(cuda, installed("torch"), nccl)


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(environ: Mapping[str, str], stack: Stack, settings: Settings) -> list[Violation]:
    """Every rule that this environment breaks."""
    found = judge_slurm(environ)
    if stack.cuda:
        found += [*judge_nccl_variables(environ), *judge_nccl_monitor(environ, settings), *judge_versions(stack)]
    return found


def judge_nccl_variables(environ: Mapping[str, str]) -> list[Violation]:
    found: list[Violation] = []
    if environ.get("TORCH_CPP_LOG_LEVEL", "").lower() not in QUIET_LEVELS:
        rule = "TORCH_CPP_LOG_LEVEL is error or fatal: at lower levels an abort of communicators logs, and can deadlock"
        found.append(Violation((), rule, "export TORCH_CPP_LOG_LEVEL=error", given(environ, "TORCH_CPP_LOG_LEVEL")))
    if environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1").lower() not in FALSE_WORDS:
        rule = (
            "TORCH_NCCL_RETHROW_CUDA_ERRORS is 0: otherwise torch's watchdog throws CUDA errors on and ends the process"
        )
        fix = "export TORCH_NCCL_RETHROW_CUDA_ERRORS=0"
        found.append(Violation((), rule, fix, given(environ, "TORCH_NCCL_RETHROW_CUDA_ERRORS")))
    if environ.get("NCCL_NVLS_ENABLE") != "0":
        rule = "NCCL_NVLS_ENABLE is 0: memory of NVLink SHARP is not given back when a communicator is aborted"
        found.append(Violation((), rule, "export NCCL_NVLS_ENABLE=0", given(environ, "NCCL_NVLS_ENABLE")))
    return found


def judge_nccl_monitor(environ: Mapping[str, str], settings: Settings) -> list[Violation]:
    """torch's heartbeat monitor kills the whole process; perdure must have acted before."""
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    if environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower() in FALSE_WORDS or settings.hard_timeout == OFF:
        return []
    text = environ.get(name, f"{NCCL_MONITOR_TIMEOUT:g}")
    seconds = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else NCCL_MONITOR_TIMEOUT
    if seconds > settings.hard_timeout:
        return []
    return [
        Violation(
            ("hard_timeout",),
            f"hard_timeout < {name}: torch kills the process by itself when that has passed",
            f"lower hard_timeout, or export {name}={int(settings.hard_timeout * 2)}",
            f"hard_timeout = {show(settings.hard_timeout)}, {given(environ, name)} (torch's default: 480)",
        )
    ]


def judge_process_group(timeout_s: float, settings: Settings) -> list[Violation]:
    """The timeout of an NCCL process group, known when the training function has made it."""
    if settings.hard_timeout == OFF or timeout_s > settings.hard_timeout:
        return []
    return [
        Violation(
            ("hard_timeout",),
            "hard_timeout < the timeout of each NCCL process group: when that passes, torch ends all its processes",
            f"pass timeout=timedelta(seconds={int(settings.hard_timeout * 2)}) to init_process_group and new_group, "
            "or lower hard_timeout",
            f"hard_timeout = {show(settings.hard_timeout)}, process group timeout = {show(float(timeout_s))}",
        )
    ]


def judge_versions(stack: Stack) -> list[Violation]:
    found: list[Violation] = []
    for name, text, least in (("torch", stack.torch, MIN_TORCH), ("NCCL", stack.nccl, MIN_NCCL)):
        if text is not None and numbers(text) < least:
            wanted = ".".join(map(str, least))
            rule = f"{name} is {wanted} or newer: perdure does not abort the communicators of older ones"
            found.append(Violation((), rule, f"install {name} {wanted} or newer", f"{name} {text}"))
    return found


def judge_slurm(environ: Mapping[str, str]) -> list[Violation]:
    """In a step: srun must not end the other tasks when one ends."""
    if "SLURM_STEP_ID" not in environ:
        return []
    found: list[Violation] = []
    if environ.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        rule = "srun does not kill the step when one task fails"
        fix = "unset SLURM_KILL_BAD_EXIT, and start with srun --kill-on-bad-exit=0"
        found.append(Violation((), rule, fix, given(environ, "SLURM_KILL_BAD_EXIT")))
    if environ.get("SLURM_WAIT", "0") not in ("", "0"):
        rule = "srun does not kill the step some seconds after the first task ended"
        fix = "unset SLURM_WAIT, and start with srun --wait=0"
        found.append(Violation((), rule, fix, given(environ, "SLURM_WAIT")))
    return found


def given(environ: Mapping[str, str], name: str) -> str:
    return f"{name}={environ[name]}" if name in environ else f"{name} is not set"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
