"""A controller's memory: the journal replayed into the state machine, and every event written before it is acted on."""

from collections.abc import Sequence

import msgspec
import trio

from .core.commands import Command
from .core.events import Entry, Event
from .core.job import Job
from .journal import Journal
from .journal_format import JournalError
from .logbook import Logbook
from .run_directory import RunDirectory

SYNC_TIMEOUT_S = 5.0
"""A disk that takes longer is treated as gone: the job is not held up, and the log says what is not safe."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def decode_entry(payload: bytes) -> Entry:
    """One record of a journal."""
    return _decoder.decode(payload)


class Memory:
    """The job's state and its journal, in step."""

    def __init__(self, directory: RunDirectory, job_id: str, attempt: int, logbook: Logbook) -> None:
        self.job = Job()
        self.recovered = 0
        """Events that were replayed."""
        self._log = logbook
        self._trouble = False
        self.journal = Journal.open(directory.journal, job_id, attempt)
        if self.journal.cut:
            logbook.line(
                "journal", f"cut {self.journal.cut} bytes of a half-written record at the end", level="warning"
            )
        self._replay(directory)

    def _replay(self, directory: RunDirectory) -> None:
        from .journal import read_records

        for offset, payload in read_records(directory.journal):
            try:
                entry = decode_entry(payload)
            except msgspec.MsgspecError as error:
                raise JournalError(
                    f"{directory.journal}: the record at offset {offset} is no event of this version: {error}"
                ) from None
            self.job.on(entry.event, entry.now)
            self.recovered += 1

    def take(self, events: Sequence[Event], now: float) -> list[Command]:
        """Journal events and decide. The commands must not leave this process before `make_safe` has returned."""
        if not events:
            return []
        try:
            self.journal.append(*[_encoder.encode(Entry(now, event)) for event in events])
        except JournalError as error:
            self._complain(str(error))
        return [command for event in events for command in self.job.on(event, now)]

    async def make_safe(self) -> None:
        """Bring everything that was taken to the disk, or say loudly that it is not."""
        safe = False
        if not self.journal.busy:  # a sync that never came back must not cost a thread and a wait each time
            with trio.move_on_after(SYNC_TIMEOUT_S):
                safe = await trio.to_thread.run_sync(self.journal.sync, abandon_on_cancel=True)
        if not safe:
            why = self.journal.trouble or f"no sync has finished within {SYNC_TIMEOUT_S:g} s"
            self._complain(f"the journal is {self.journal.behind} bytes behind: {why}")
        elif self._trouble:
            self._trouble = False
            self._log.line("journal", "the journal is complete on disk again", level="warning")

    def _complain(self, text: str) -> None:
        if not self._trouble:
            self._trouble = True
            lost = "the job goes on, but a controller that dies now forgets what is not on disk"
            self._log.line("journal", f"{text}; {lost}", level="error")
