"""The logbook: what people read while a job runs and at 3 a.m. when it does not.

Every line goes to up to three outputs: `perdure.log` (readable), `perdure.jsonl` (the same with every field) and a
stream, usually stderr, which is spared lines of level `debug`. The control loop only formats a line and puts it into
bounded queues; each output has a thread of its own, so that a frozen terminal holds back neither the files nor the job.
See `log_output.py` for what happens to lines that cannot be written.

Wall time is for display. Order is told by `seq`.
"""

import itertools
import time
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from .log_lines import Line, readable, structured
from .log_output import LogFile, Output, Target, target_of

READABLE_NAME = "perdure.log"
STRUCTURED_NAME = "perdure.jsonl"


class Logbook:
    """May be used from any thread. `line` never blocks and never raises for what it is given."""

    def __init__(self, directory: Path | None, job: str, host: str, stream: TextIO | None = None) -> None:
        self._job = job
        self._host = host
        self._seq = itertools.count(1)
        self._readable: list[Output] = []
        self._streams: list[Output] = []
        self._structured: list[Output] = []
        if directory is not None:
            self._readable.append(self._output(LogFile(directory / READABLE_NAME)))
            self._structured.append(Output(LogFile(directory / STRUCTURED_NAME), self._structured_gap))
        if stream is not None:
            self._streams.append(self._output(target_of(stream)))

    def line(
        self,
        event: str,
        text: str,
        *,
        level: str = "info",
        round: int | None = None,
        rank: int | None = None,
        slot: str | None = None,
        host: str | None = None,
        **fields: Any,
    ) -> None:
        """One line. `fields` are for programs and stand only in the JSON log: say in `text` what people need.

        Of a longer text the readable outputs have the first line; the others are the JSON log's field `detail`.
        """
        more = ""
        if self._structured and "\n" in text.strip():
            text, _, detail = text.partition("\n")
            fields.setdefault("detail", detail)
            count = len(detail.splitlines())
            more = f" [{count} more line{'' if count == 1 else 's'} in {STRUCTURED_NAME}]"
        record = self._record(event, text, level, round, rank, slot, host or self._host)
        outputs = self._readable if level == "debug" else [*self._readable, *self._streams]
        if outputs:
            data = readable(msgspec.structs.replace(record, text=text + more), self._host)
            for output in outputs:
                output.put(data)
        for output in self._structured:
            output.put(structured(record, fields))

    @property
    def _outputs(self) -> list[Output]:
        return [*self._readable, *self._streams, *self._structured]

    @property
    def lost(self) -> dict[str, int]:
        """Lines that did not reach an output, by its name; only outputs that lost some."""
        return {output.name: output.lost for output in self._outputs if output.lost}

    def close(self, deadline_s: float = 2.0) -> None:
        """Write what waits, for at most `deadline_s` seconds. Lines that come later are counted as lost."""
        deadline = time.monotonic() + deadline_s
        for output in self._outputs:
            output.close(deadline)

    def _record(
        self, event: str, text: str, level: str, round: int | None, rank: int | None, slot: str | None, host: str
    ) -> Line:
        now = datetime.now().astimezone()
        return Line(now, next(self._seq), level, self._job, round, rank, slot, host, event, text)

    def _output(self, target: Target) -> Output:
        return Output(target, self._readable_gap)

    def _gap(self, count: int) -> Line:
        text = f"{count} lines are missing here: this output could not be written"
        return self._record("log_gap", text, "warning", None, None, None, self._host)

    def _readable_gap(self, count: int) -> bytes:
        return readable(self._gap(count), self._host)

    def _structured_gap(self, count: int) -> bytes:
        return structured(self._gap(count), {"missing": count})
