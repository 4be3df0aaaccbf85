"""A job's past, from its journal: the events are replayed through the core, and what it did is kept, round by round.

Rules:
- Read only. No lease is taken, nothing is cut or repaired: a running job's journal may be read at any time.
- The core itself says what happened; nothing is decided or guessed here a second time.
- Whatever can be read is told. What ends the reading early is kept as `trouble`, which names the offset.

The journal holds the controller's monotonic clock. Each controller also notes the wall time at which it began to lead,
and from that its events are dated, for people only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..protocol.messages import ExitRecord, SlotState, Stage
from .core.blame import Verdict, judge
from .core.commands import Finished, Tell
from .core.events import Attached, Entry, Opened, Reported
from .core.job import Job
from .core.rounds import Round
from .journal import JournalError, JournalHeader, read_header, read_records
from .recovery import decode_entry

Process = tuple[str, int]
"""A slot and a life: one process of the job."""


@dataclass(slots=True)
class Note:
    """Something that the controller said. at: wall time."""

    at: float
    tell: Tell


@dataclass(slots=True)
class Chapter:
    """One round, or (`round` None) the time before the first. All times are wall times.

    evidence: when something first spoke of a fault in each process. deaths: processes that died meanwhile.
    story: how the next round came to be, in one line. step: the furthest one known. reserves: when all had entered.
    """

    round: Round | None
    began: float
    entered: float | None = None
    fault: float | None = None
    completed: float | None = None
    reserves: int = 0
    step: int = -1
    story: str = ""
    phases: dict[str, float | None] = field(default_factory=dict[str, float | None])
    notes: list[Note] = field(default_factory=list[Note])
    evidence: dict[Process, float] = field(default_factory=dict[Process, float])
    deaths: set[Process] = field(default_factory=set[Process])

    @property
    def outcome(self) -> str:
        """`fault`, `completed`, or `open`: neither, as far as the journal goes."""
        if self.fault is not None:
            return "fault"
        return "open" if self.completed is None else "completed"

    @property
    def verdict(self) -> Verdict | None:
        """Who was to blame for its end; None if no fault ended it."""
        findings = list(self.round.findings.values()) if self.round is not None else []
        return judge(findings) if findings and self.fault is not None else None


class Story:
    """What `path` tells. `job` is the core's state after the last event."""

    def __init__(self, path: Path, header: JournalHeader) -> None:
        self.path = path
        self.header = header
        self.job = Job()
        self.events = 0
        self.last = header.created
        """When the last event was."""
        self.ended: Finished | None = None
        self.trouble = ""
        self.chapters = [Chapter(None, header.created)]
        self.exits: dict[Process, ExitRecord] = {}
        self.pids: dict[Process, int] = {}
        self._base: float | None = None

    @property
    def rounds(self) -> list[Chapter]:
        return [chapter for chapter in self.chapters if chapter.round is not None]

    def chapter(self, index: int) -> Chapter | None:
        return next((c for c in self.chapters if c.round is not None and c.round.index == index), None)

    # ---- replay -----------------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> None:
        """Replay one event."""
        event = entry.event
        self._set_clock(entry)
        self.last = at = (self._base or 0.0) + entry.now
        if not self.events:
            self.chapters[0].began = at
        commands = self.job.on(event, entry.now)
        self.events += 1
        if self.job.round is not None and self.chapters[-1].round is not self.job.round:
            self.chapters.append(Chapter(self.job.round, at))
        if isinstance(event, Attached):
            self._note_states((*event.hello.pending, *event.hello.slots))
        elif isinstance(event, Reported):
            self._note_states(event.slots)
        for command in commands:
            if isinstance(command, Tell):
                self._hear(command, at)
            elif isinstance(command, Finished):
                self.ended = command
        self._note_times(self.chapters[-1], at)

    def _set_clock(self, entry: Entry) -> None:
        if not isinstance(entry.event, Opened):
            return
        if entry.event.wall:
            self._base = entry.event.wall - entry.now
        elif self._base is None:
            self._base = self.header.created - entry.now

    def _note_times(self, chapter: Chapter, at: float) -> None:
        round = chapter.round
        if round is None:
            return
        if chapter.entered is None and round.times.entered is not None:
            chapter.entered = at
        if chapter.fault is None and round.times.fault is not None:
            chapter.fault = at
        for process in reversed(round.findings):
            if process in chapter.evidence:
                break
            chapter.evidence[process] = at
            chapter.step = max(chapter.step, round.findings[process].fault.step)

    def _note_states(self, states: Iterable[SlotState]) -> None:
        for state in states:
            process = (state.slot, state.life)
            if state.pid:
                self.pids[process] = state.pid
            last = self.chapters[-1]
            if state.exit is not None and process not in self.exits:
                self.exits[process] = state.exit
                last.deaths.add(process)
            if state.stage is Stage.RETURNED and last.round is not None and state.round == last.round.index:
                last.step = max(last.step, state.step)

    def _hear(self, said: Tell, at: float) -> None:
        chapter = self.chapters[0] if said.round is None else self.chapter(said.round)
        assert chapter is not None, "nothing is said of a round that never was"
        chapter.notes.append(Note(at, said))
        if said.event in ("running", "recovered"):
            chapter.reserves = sum(
                1 for r in self.job.roster.slots() if chapter.round and r.at_gate and chapter.round.seat_of(r) is None
            )
        if said.event == "complete":
            chapter.completed = at
        before = self.chapter(said.round - 1) if said.event == "recovered" and said.round else None
        if before is not None:
            before.story = said.text
            before.phases = dict(said.fields.get("phases", {}))


def read_story(path: Path) -> Story:
    """Replay the journal `path` as far as it can be read.

    Raises:
        JournalError: if it is not a journal at all, or nothing in it belongs to a job.
    """
    story = Story(path, read_header(path))
    offset = 0
    try:
        for offset, payload in read_records(path):
            entry = _understand(path, offset, payload)
            if not story.events and not isinstance(entry.event, Opened):
                raise JournalError(
                    f"{path} is the journal of no job: its first event, at offset {offset}, does not open one"
                )
            _replay(story, path, offset, entry)
    except JournalError as error:
        if not story.events:
            raise
        story.trouble = str(error)
    if not story.events:
        raise JournalError(
            f"{path} holds no event: its controller has only just started, or died before it began to lead job "
            f"{story.header.job}"
        )
    return story


def _understand(path: Path, offset: int, payload: bytes) -> Entry:
    try:
        return decode_entry(payload)
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{path}: the record at offset {offset} is no event of this version of perdure: {error}; "
            "read it with the version that wrote it"
        ) from None


def _replay(story: Story, path: Path, offset: int, entry: Entry) -> None:
    try:
        story.take(entry)
    except Exception as error:
        # The core refuses impossible events by any exception; what came before is worth telling all the same.
        raise JournalError(
            f"{path}: the {type(entry.event).__name__} at offset {offset} cannot be replayed "
            f"({type(error).__name__}: {error}); another version of perdure wrote it, or this one has a defect"
        ) from error


def find_journal(given: Path) -> Path:
    """The journal that `given` means: itself, or that of the run directory or attempt `given`, the newest if it is old.

    Raises:
        JournalError: if there is none.
    """
    if not given.is_dir():
        if not given.exists():
            raise JournalError(f"{given} does not exist; name a journal, or the run directory that it is in")
        return given
    if (given / "journal").exists():
        return given / "journal"
    if newest := max(attempts(given), default=0):
        return given / f"attempt-{newest}" / "journal"
    raise JournalError(
        f"{given} holds no journal, and no attempt-N with one; name the run directory of the job (--run-dir, "
        "PERDURE_RUN_DIR, or perdure-runs/JOB where it was started)"
    )


def attempts(run_dir: Path) -> list[int]:
    """Numbers of the finished attempts that were put away in a run directory."""
    found = [path.parent.name.removeprefix("attempt-") for path in run_dir.glob("attempt-*/journal")]
    return sorted(int(number) for number in found if number.isdecimal())
