"""How the core says things to people: ranks, faults and rounds in one line each."""

import signal
from collections.abc import Iterable

from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import ExitRecord, SlotState
from ...protocol.names import NO_ROUND
from .blame import Verdict
from .roster import SlotRecord
from .rounds import Round

LIST_LIMIT = 16
"""Names listed in one line; the rest is counted."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(fault: Fault, rank: int | None = None) -> str:
    """`rank 3 (n1/1): killed by SIGKILL`."""
    who = fault.slot if rank is None else f"rank {rank} ({fault.slot})"
    at = f" at {fault.place}" if fault.place else ""
    step = f", step {fault.step}" if fault.step >= 0 else ""
    return f"{who}: {fault.message}{at}{step}"


def listing(names: Iterable[object]) -> str:
    """At most LIST_LIMIT names, and how many more."""
    all_names = [str(name) for name in names]
    shown = ", ".join(all_names[:LIST_LIMIT])
    more = len(all_names) - LIST_LIMIT
    return f"{shown} and {more} more" if more > 0 else shown


def ranks(numbers: Iterable[int]) -> str:
    """`0-3, 7`: rank numbers as ranges."""
    ordered = sorted(numbers)
    parts: list[str] = []
    start = 0
    for i in range(len(ordered)):
        if i + 1 == len(ordered) or ordered[i + 1] != ordered[i] + 1:
            first, last = ordered[start], ordered[i]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i + 1
    return listing(parts)


def fault_of_exit(state: SlotState) -> Fault:
    """What the death of a process says by itself."""
    record = state.exit or ExitRecord(code=0)
    in_round = state.round != NO_ROUND
    if record.oom:
        kind, code, message = FaultKind.OOM, -record.code, "killed by the kernel, out of memory (OOM)"
    elif record.code < 0:
        kind, code, message = FaultKind.SIGNAL, -record.code, f"killed by {signal_name(-record.code)}"
    elif in_round:
        kind, code, message = (
            FaultKind.EXIT,
            record.code,
            f"exited with code {record.code} inside the training function",
        )
    else:
        kind, code, message = (
            FaultKind.EXIT,
            record.code,
            f"exited with code {record.code} before it reached the training function",
        )
    return Fault(
        slot=state.slot,
        life=state.life,
        round=state.round,
        kind=kind,
        message=message,
        detail=record.stderr,
        code=code,
        step=state.step,
        entered=in_round,
    )


def moves(old: Round, new: Round) -> str:
    """Who sits where a dead one sat: `n0/4 takes rank 1`."""
    said: list[str] = []
    for rank, record in sorted(new.seats.items()):
        before = old.seats.get(rank)
        if before is record and old.lives[rank] != new.lives[rank]:
            said.append(f"{record.slot} (respawned) takes rank {rank}")
        elif before is not record and before is not None:
            said.append(f"{record.slot} takes rank {rank}")
    return listing(said)


def milliseconds(start: float | None, end: float | None) -> float | None:
    if start is None or end is None:
        return None
    return round(max(end - start, 0.0) * 1e3, 1)


def victims_of(verdict: Verdict) -> str:
    return ranks(finding.rank for finding in verdict.victims)


def missing(records: Iterable[SlotRecord]) -> str:
    return listing(f"{record.slot} ({record.state.stage.value})" for record in records)
