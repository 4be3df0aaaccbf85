"""How the core says things to people: ranks, faults and rounds in one line each."""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...protocol.faults import Fault, FaultKind
from ...protocol.messages import ExitRecord, SlotState
from ...protocol.names import NO_ROUND
from .roster import SlotRecord
from .rounds import Round

LIST_LIMIT = 16
"""Names listed in one line; the rest is counted."""

SHORT_LIMIT = 160
"""Characters of a fault's message where it is told a second time."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def what(fault: Fault, *, short: bool = False) -> str:
    """`ValueError: boom at /home/me/train.py:12, step 20`: its first line; the rest is in the fault's detail.

    short: without the folder of the place, and with no more than SHORT_LIMIT characters of the message.
    """
    message = fault.message.partition("\n")[0]
    place = fault.place
    if short:
        message = message if len(message) <= SHORT_LIMIT else message[: SHORT_LIMIT - 3] + "..."
        place = place.rpartition("/")[2]
    at = f" at {place}" if place else ""
    step = f", step {fault.step}" if fault.step >= 0 else ""
    return f"{message}{at}{step}"


def describe(fault: Fault, rank: int | None = None, *, short: bool = False) -> str:
    """`rank 3 (n1/1): killed by SIGKILL`."""
    who = fault.slot if rank is None else f"rank {rank} ({fault.slot})"
    return f"{who}: {what(fault, short=short)}"


def listing(names: Iterable[object]) -> str:
    """At most LIST_LIMIT names, and how many more."""
    all_names = [str(name) for name in names]
    shown = ", ".join(all_names[:LIST_LIMIT])
    more = len(all_names) - LIST_LIMIT
    return f"{shown} and {more} more" if more > 0 else shown


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`: at most LIST_LIMIT ranges, and how many ranks more."""
    ordered = sorted(numbers)
    word = "rank" if len(ordered) == 1 else "ranks"
    return f"{word} {numbers_as_ranges(ordered)}"


def numbers_as_ranges(ordered: list[int]) -> str:
    """`0-3, 7`, of numbers in ascending order."""
    spans: list[tuple[int, int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:LIST_LIMIT])
    more = sum(last - first + 1 for first, last in spans[LIST_LIMIT:])
    return f"{shown} and {more} more" if more else shown


def fault_of_exit(state: SlotState) -> Fault:
    """What the death of a process says by itself."""
    record = state.exit or ExitRecord(code=0)
    in_round = state.round != NO_ROUND
    if record.oom:
        kind, code, message = FaultKind.OOM, -record.code, "killed by the kernel, out of memory (OOM)"
    elif record.code < 0:
        kind, code, message = FaultKind.SIGNAL, -record.code, f"killed by {signal_name(-record.code)}"
    else:
        where = "inside the training function" if in_round else "before it reached the training function"
        kind, code, message = FaultKind.EXIT, record.code, f"exited with code {record.code} {where}"
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


def exit_status(exit: ExitRecord) -> int:
    """The exit code that a shell would show."""
    return exit.code if exit.code >= 0 else 128 - exit.code


@dataclass(frozen=True, slots=True)
class Move:
    """`rank` is taken by a process that is new there. was: its rank before, None if it was a reserve or respawned."""

    rank: int
    record: SlotRecord
    respawned: bool
    was: int | None

    def continues(self, last: "Move") -> bool:
        """Whether this is the neighbour of `last` in rank and slot, and came the same way."""
        ours, theirs = self.record, last.record
        near = ours.agent is theirs.agent and (ours.state.index, self.rank) == (theirs.state.index + 1, last.rank + 1)
        was = None if last.was is None else last.was + 1
        return near and self.respawned == last.respawned and self.was == was


def moves(old: Round, new: Round) -> str:
    """Who sits where somebody else sat: `n0/4 takes rank 1`, `n7/0-7 take ranks 8-15`."""
    return _tell_runs(_moved(old, new), _one_move)


def seating(round: Round) -> str:
    """Who sits where: `ranks 0-7: n0/0-7, rank 8: n4/0`."""
    seats = (Move(rank, record, respawned=False, was=None) for rank, record in sorted(round.seats.items()))
    return _tell_runs(seats, lambda run: f"{ranks(move.rank for move in run)}: {_slots(run)}")


def _tell_runs(every: Iterable[Move], tell: Callable[[list[Move]], str]) -> str:
    runs: list[list[Move]] = []
    for move in every:
        if runs and move.continues(runs[-1][-1]):
            runs[-1].append(move)
        else:
            runs.append([move])
    said = ", ".join(tell(run) for run in runs[:LIST_LIMIT])
    more = sum(len(run) for run in runs[LIST_LIMIT:])
    return f"{said} and {more} more" if more else said


def _moved(old: Round, new: Round) -> Iterator[Move]:
    for rank, record in sorted(new.seats.items()):
        was = old.rank_of.get(record)
        respawned = was is not None and old.lives[was] != new.lives[rank]
        if respawned or was != rank:
            yield Move(rank, record, respawned, was=None if respawned else was)


def _one_move(run: list[Move]) -> str:
    first, last = run[0], run[-1]
    many = len(run) > 1
    came = " (respawned)" if first.respawned else ""
    if first.was is not None:
        came = f" (were ranks {first.was}-{last.was})" if many else f" (was rank {first.was})"
    return f"{_slots(run)}{came} {'take ranks' if many else 'takes rank'} {numbers_as_ranges([m.rank for m in run])}"


def _slots(run: list[Move]) -> str:
    first, last = run[0].record, run[-1].record
    return first.slot if first is last else f"{first.slot}-{last.state.index}"


def given_up(late: Mapping[int, str]) -> str:
    """`ranks 3, 5-7 (barrier_timeout)`: who was killed, by the knob that a reason ends with, or by the reason."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(late.items()):
        knob = why.removesuffix(")").rpartition("(")[2] if why.endswith(")") else why
        by_reason.setdefault(knob, []).append(rank)
    return listing(f"{ranks(numbers)} ({why})" for why, numbers in by_reason.items())


def milliseconds(start: float | None, end: float | None) -> float | None:
    if start is None or end is None:
        return None
    return round(max(end - start, 0.0) * 1e3, 1)


def size(nbytes: int) -> str:
    """`1.2 GB`: three digits at most, in powers of 1,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount, units = nbytes / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while amount >= 999.5 and unit != "TB":
        amount, unit = amount / 1000, next(units)
    return f"{amount:.{0 if amount >= 99.95 else 1}f} {unit}"


def missing(records: Iterable[SlotRecord]) -> str:
    return listing(f"{record.slot} ({record.state.stage.value})" for record in records)
