"""A job's story as a person reads it in a terminal.

First how it ended, then one block a round: when and with whom it ran, one line that tells how it ended and what came of
it, then the cause in full. A block that is asked for by its round's number is told without any cut.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from ..protocol.exit_codes import ExitCode
from ..protocol.faults import Fault, FaultKind
from ..protocol.knobs import KNOBS, show
from ..protocol.messages import ExitRecord
from ..protocol.settings import Settings
from . import narrative_checkpoints
from .core import wording
from .core.blame import Finding, Verdict
from .core.verdict import blamed
from .lease import Condition, read_holder
from .log_lines import one_line
from .narrative import Chapter, Note, Story, attempts

TOLD_ELSEWHERE = frozenset({"fault", "killed", "running", "recovered", "complete", "ending", "checkpoint"})
"""Events of the log that the blocks tell in another place."""

LEASE_NAME = "lock"

DETAIL_LINES = 30
OTHERS = 6
EVENTS = 12
"""What a block shows at most of a traceback, of other faults and of events, unless its round was asked for."""

_LABEL = 11
_EDGE = "| "


Told = dict[object, int]
"""What has been shown, a traceback for instance, and in which round's block."""


def tell(story: Story) -> Iterator[str]:
    """The whole story, line by line."""
    yield from _head(story)
    told: Told = {}
    for chapter in story.chapters:
        if chapter.round is None and not _events(chapter):
            continue
        yield ""
        yield from _block(story, chapter, told, full=False)
    yield ""
    yield from _end(story, told)


def tell_round(story: Story, chapter: Chapter) -> Iterator[str]:
    """One round, with everything that is known of it."""
    yield from _block(story, chapter, {}, full=True)


# ---- the whole ------------------------------------------------------------------------------------------------


def _head(story: Story) -> Iterator[str]:
    header, settings = story.header, story.job.settings
    began = story.chapters[0].began
    yield f"job {one_line(header.job)}, attempt {header.attempt}: {_state(story)} after {_span(story.last - began)}"
    yield _row("journal", f"{one_line(str(story.path))}, {_count(story.events, 'event')}")
    yield _row("began", time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began)))
    yield _row("spent", spent(story))
    chosen = ", ".join(_chosen(settings))
    yield _row("settings", chosen or "all have their defaults")
    if old := attempts(story.path.parent):
        yield _row("earlier", f"attempts {', '.join(map(str, old))}: inspect {story.path.parent}/attempt-N")


def _state(story: Story) -> str:
    if story.ended is not None:
        return f"ended with code {story.ended.code} ({_code_name(story.ended.code)})"
    return f"{story.job.phase.value} (no end in the journal)"


def spent(story: Story) -> str:
    """The budgets, and what of them is used up."""
    settings, budget = story.job.settings, story.job.budget
    rounds = _of(len(story.rounds), settings.max_iterations, "round", "max_iterations")
    faults = _of(budget.rank_faults, settings.max_rank_faults, "rank fault", "max_rank_faults")
    incarnation = story.job.incarnation
    controllers = "" if incarnation == 1 else f", {incarnation} controllers one after the other"
    return f"{rounds}, {faults}{controllers}"


def _of(count: int, limit: int | None, word: str, knob: str) -> str:
    return _count(count, word) if limit is None else f"{count} of {limit} {word}s ({knob})"


def _chosen(settings: Settings) -> Iterator[str]:
    defaults = Settings()
    for name in KNOBS:
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            yield f"{name}={show(value)}"


def _end(story: Story, told: Told) -> Iterator[str]:
    if story.ended is None:
        yield f"NO END    {_clock(story.last)}   {story.job.phase.value} at its last event; {_leader(story)}"
        return
    code = story.ended.code
    reason, _, detail = story.ended.reason.partition("\n")
    yield f"END       {_clock(story.last)}   code {code} ({_code_name(code)}): {one_line(reason)}"
    if detail.strip() and detail.strip() not in told:
        yield from _rows("detail", (_EDGE + line for line in detail.splitlines()))


def _leader(story: Story) -> str:
    """Who leads a job that has not ended, as far as its lease's file tells; the lease is not touched."""
    holder = read_holder(story.path.parent / LEASE_NAME)
    if holder is None:
        return "no controller leads it"
    match holder.condition():
        case Condition.ELSEWHERE:
            return f"led by {holder.describe()}, if that lives: look there"
        case Condition.GONE:
            return f"its controller is gone: {holder.describe()}"
        case condition:
            return f"its controller is {condition.value}: {holder.describe()}"


def _code_name(code: int) -> str:
    try:
        return ExitCode(code).name
    except ValueError:
        return "the trainer's own"


# ---- a round --------------------------------------------------------------------------------------------------


def _block(story: Story, chapter: Chapter, told: Told, *, full: bool) -> Iterator[str]:
    round = chapter.round
    if round is None:
        yield f"FORMING   {_clock(chapter.began)}"
    else:
        yield f"ROUND {round.index:<3} {_clock(chapter.began)}   {_run(story, chapter)}"
        if full or chapter is story.rounds[0]:
            yield _row("seats", wording.seating(round))
        if resumed := narrative_checkpoints.resumed_from(chapter):
            yield _row("resumed", f"from {resumed}")
        saved = narrative_checkpoints.lines(chapter, full=full)
        yield from _rows("saved", (f"{_clock(at)}   {text}" if at else text for at, text in saved))
        yield _row(*_result(story, chapter))
        yield from _cause(story, chapter, told, full=full)
    yield from _rows("events", _told_events(chapter, full=full))


def _run(story: Story, chapter: Chapter) -> str:
    """`4 ranks, 1 reserve; formed in 0.7 s, ran 12.3 s to step 41`."""
    round = chapter.round
    assert round is not None
    said = [f"{_count(round.size, 'rank')}, {_count(chapter.reserves, 'reserve')};"]
    if chapter is story.rounds[0]:
        said.append(f"formed in {_span(chapter.began - story.chapters[0].began)},")
    reached = f" to step {chapter.step}" if chapter.step >= 0 else ""
    until = chapter.fault or chapter.completed or (story.last if story.job.reason else None)
    if chapter.entered is None:
        said.append("not all ranks had entered it")
    elif until is None:
        said.append(f"runs since {_clock(chapter.entered)}")
    else:
        said.append(f"ran {_span(until - chapter.entered)}{reached}")
    return " ".join(said)


def _result(story: Story, chapter: Chapter) -> tuple[str, str]:
    if chapter.round is not None and chapter.verdict is not None:
        followed = "no round followed" if chapter is story.chapters[-1] else "the next round was not entered by all"
        return "ended", one_line(chapter.story or f"{'; '.join(blamed(chapter.round, chapter.verdict))}; {followed}")
    if chapter.completed is not None:
        return "ended", f"completed {_clock(chapter.completed)}: every rank returned"
    if story.job.reason:
        return "ended", f"stopped: {one_line(story.job.reason.partition(chr(10))[0])}"
    return "runs", "as far as the journal goes"


# ---- its cause ------------------------------------------------------------------------------------------------


def _cause(story: Story, chapter: Chapter, told: Told, *, full: bool) -> Iterator[str]:
    verdict, round = chapter.verdict, chapter.round
    if verdict is None or round is None:
        return
    finding = verdict.cause
    fault = finding.fault
    same = (fault.kind, fault.message, fault.place, fault.detail)
    if same in told:
        yield _row("cause", f"the same as in round {told[same]}; {who(story, chapter, finding)}")
    else:
        told[same] = round.index
        yield _row("cause", f"{_at(chapter, finding)}   {who(story, chapter, finding)}")
        for line in (*fault.message.splitlines(), *facts(fault)):
            yield _row("", line)
        yield from _details(story, chapter, finding, told, full=full)
    yield from _others(story, chapter, verdict, full=full)
    yield from _rows("killed", _killed(story, chapter, finding, full=full))


def _killed(story: Story, chapter: Chapter, cause: Finding, *, full: bool) -> Iterator[str]:
    round = chapter.round
    assert round is not None
    told = _death(story, chapter, cause.fault) is not None
    late = [(rank, why) for rank, why in sorted(round.late.items()) if not (told and rank == cause.rank)]
    shown = _some(late, full=full)
    for rank, why in shown:
        yield f"rank {rank} ({round.seats[rank].slot}): {why}"
    if len(late) > len(shown):
        yield f"and {len(late) - len(shown)} more: {wording.ranks(rank for rank, _ in late[len(shown) :])}"


def who(story: Story, chapter: Chapter, finding: Finding) -> str:
    """`soft_hang of rank 3: slot n0/3, life 1, pid 4711, host n0`."""
    fault = finding.fault
    pid = story.pids.get((fault.slot, fault.life))
    assert chapter.round is not None
    host = chapter.round.seats[finding.rank].agent.host
    process = f"life {fault.life}, pid {pid}" if pid else f"life {fault.life}"
    return f"{fault.kind.value} of rank {finding.rank}: slot {fault.slot}, {process}, host {host}"


def facts(fault: Fault) -> Iterator[str]:
    """What is known beside the message, a line each."""
    if fault.place:
        yield f"at {fault.place}"
    known: list[str] = []
    if fault.kind is FaultKind.EXIT:
        known.append(f"exit code {fault.code}")
    elif fault.kind is FaultKind.SIGNAL and fault.code:
        known.append(f"signal {fault.code}")
    if fault.stale_s:
        known.append(f"{fault.stale_s:.2f} s without progress when judged")
    known.append(f"step {fault.step}" if fault.step >= 0 else "no step known")
    if not fault.entered:
        known.append("before it had entered the training function")
    if fault.in_collective:
        known.append("inside a collective")
    if fault.peer_error:
        known.append("an error that a rank sees when another one is gone")
    yield ", ".join(known)


def how_it_died(exit: ExitRecord) -> str:
    """`killed by SIGKILL, by perdure: no progress for 6.0 s`."""
    if exit.oom:
        how = "killed by the kernel, out of memory"
    elif exit.code < 0:
        how = f"killed by {wording.signal_name(-exit.code)}"
    else:
        how = f"exited with code {exit.code}"
    return f"{how}, by perdure: {exit.killed_by}" if exit.killed_by else how


def _details(story: Story, chapter: Chapter, finding: Finding, told: Told, *, full: bool) -> Iterator[str]:
    """The traceback or the last stderr lines; once, if several rounds have the same."""
    fault = finding.fault
    assert chapter.round is not None
    exit = _death(story, chapter, fault)
    texts = [("traceback" if fault.kind is FaultKind.EXCEPTION else "stderr", fault.detail)]
    if exit is not None:
        yield _row("process", how_it_died(exit))
        texts.append(("stderr", exit.stderr))
    shown = ""
    for label, text in texts:
        if not text or text == shown:
            continue
        shown = text
        if text.strip() in told:
            yield _row(label, f"the same as in round {told[text.strip()]}")
            continue
        told[text.strip()] = chapter.round.index
        yield from _rows(label, (_EDGE + line for line in _clipped(text.splitlines(), full=full)))


def _clipped(lines: list[str], *, full: bool) -> list[str]:
    if full or len(lines) <= DETAIL_LINES:
        return lines
    head = DETAIL_LINES // 5
    gone = len(lines) - DETAIL_LINES
    return [*lines[:head], f"... {gone} lines left out here, shown with --round ...", *lines[head - DETAIL_LINES :]]


def _others(story: Story, chapter: Chapter, verdict: Verdict, *, full: bool) -> Iterator[str]:
    for label, findings in (("also failed", verdict.companions), ("victims", verdict.victims)):
        groups = _alike(story, chapter, findings)
        shown = _some(groups, full=full)
        yield from _rows(label, (f"{_at(chapter, group[0])}   {text}" for text, group in shown))
        if len(groups) > len(shown):
            rest = [finding.rank for _, group in groups[len(shown) :] for finding in group]
            yield _row("", f"and {len(rest)} more: {wording.ranks(rest)}")
        for finding in findings if full else ():
            if finding.fault.detail:
                yield _row("", f"rank {finding.rank}:")
                yield from _rows("", (_EDGE + line for line in finding.fault.detail.splitlines()))


def _alike(story: Story, chapter: Chapter, findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    """Findings that say the same, each with the line that tells of them all."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        exit = _death(story, chapter, finding.fault)
        text = wording.what(msgspec.structs.replace(finding.fault, step=-1), short=True)
        groups.setdefault(text if exit is None else f"{text}; {how_it_died(exit)}", []).append(finding)
    return [(_of_whom(text, group), group) for text, group in groups.items()]


def _of_whom(text: str, group: list[Finding]) -> str:
    if len(group) > 1:
        return f"{wording.ranks(finding.rank for finding in group)}: {text}"
    fault = group[0].fault
    step = f", step {fault.step}" if fault.step >= 0 else ""
    return f"rank {group[0].rank} ({fault.slot}): {text}{step}"


def _death(story: Story, chapter: Chapter, fault: Fault) -> ExitRecord | None:
    """How the process died in this round, if it did and the fault itself does not say it."""
    process = (fault.slot, fault.life)
    exit = story.exits.get(process) if process in chapter.deaths else None
    says_it = fault.kind in (FaultKind.EXIT, FaultKind.SIGNAL, FaultKind.OOM) and fault.code != 0
    return None if exit is None or (says_it and not exit.killed_by) else exit


# ---- what happened beside -------------------------------------------------------------------------------------


def _events(chapter: Chapter) -> list[Note]:
    return [n for n in chapter.notes if n.tell.event not in TOLD_ELSEWHERE and n.tell.level != "debug"]


def _told_events(chapter: Chapter, *, full: bool) -> Iterator[str]:
    notes = _events(chapter)
    shown = notes if full or len(notes) <= EVENTS else [*notes[: EVENTS // 2], *notes[-EVENTS // 2 :]]
    for number, note in enumerate(shown):
        if len(shown) < len(notes) and number == EVENTS // 2:
            hint = "" if chapter.round is None else ", shown with --round"
            yield f"... {len(notes) - len(shown)} more{hint} ..."
        yield f"{_clock(note.at)}   {note.tell.text.partition(chr(10))[0]}"


# ---- small helpers --------------------------------------------------------------------------------------------


T = TypeVar("T")


def _some(items: Sequence[T], *, full: bool) -> Sequence[T]:
    return items if full else items[:OTHERS]


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}} {one_line(text)}".rstrip()


def _rows(label: str, texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        yield _row(label, text)
        label = ""


def _at(chapter: Chapter, finding: Finding) -> str:
    return _clock(chapter.evidence[finding.fault.slot, finding.fault.life])


def _clock(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
