"""Converts an incident to a trace: the incident is the root span, its stages are children. Pure; no OpenTelemetry.

Trace and span ids are derived from the job and the incident, so sending an incident again gives the same trace.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from regrow.core.ids import Instant, Seconds
from regrow.core.records import IncidentClosed, IncidentOpened, JobEnded, JobStarted, Record, WorkerGone
from regrow.observe.story import first_line

STAGES = ("detect", "abort", "regroup", "hydrate", "redo")
ROOT = "incident"
_BEFORE: Seconds = 1.0
"""Time before an incident's fault in which the recorded end of a worker still belongs to the incident."""
_MOST_GONE = 1000

Attribute = str | int | float | bool | Sequence[int]


class SpanEvent(NamedTuple):
    """An event in a span. `at`: nanoseconds since the epoch."""

    at: int
    name: str
    attributes: Mapping[str, Attribute]


class IncidentSpan(NamedTuple):
    """A span. Times in nanoseconds since the epoch. `parent`: 0 for a root. `failed`: the cause; empty: no failure."""

    trace: int
    number: int
    parent: int
    name: str
    start: int
    end: int
    attributes: Mapping[str, Attribute]
    failed: str = ""
    events: Sequence[SpanEvent] = ()


class IncidentSpans:
    """Converts the records of one job to spans, incrementally.

    Args:
        job: its name, used until a record has it.
        offset: wall clock minus the clock of the records, in seconds.
    """

    def __init__(self, job: str, *, offset: Seconds) -> None:
        self.job = job
        self._offset = offset
        self._began: Instant = 0.0
        self._gone: list[WorkerGone] = []
        self._open: dict[int, IncidentOpened] = {}

    def feed(self, records: Iterable[Record]) -> list[IncidentSpan]:
        """Spans of all incidents that end in these records; each root comes before its stages."""
        spans: list[IncidentSpan] = []
        for record in records:
            match record:
                case JobStarted():
                    self.job, self._began = record.job, record.at
                case WorkerGone():
                    self._gone = [*self._gone[1 - _MOST_GONE :], record]
                case IncidentOpened():
                    self._open[record.incident] = record
                case IncidentClosed():
                    self._open.pop(record.incident, None)
                    spans += self._closed(record)
                case JobEnded():
                    spans += [self._unmended(each, record.at) for each in self._open.values()]
                    self._open.clear()
                case _:
                    pass
        return spans

    def _closed(self, incident: IncidentClosed) -> list[IncidentSpan]:
        start = min(incident.fault_at, incident.opened_at)
        more: dict[str, Attribute] = {
            "regrow.rung": incident.rung,
            "regrow.steps_lost": incident.steps_lost,
            "regrow.hydrated_bytes": incident.hydrated_bytes,
        }
        more |= {f"regrow.replacement.{stage}": took for stage, took in incident.stages.items()}
        if incident.before or incident.after:
            more |= {"regrow.replicas.before": incident.before, "regrow.replicas.after": incident.after}
        root = self._root(incident, start, start + incident.total, failed=incident.faults > 0, more=more)
        spans, at = [root], start
        for stage in STAGES:
            took: Seconds = getattr(incident, stage)
            if took > 0:
                number = self._number(incident.incident, stage)
                about: dict[str, Attribute] = {"regrow.stage": stage}
                spans.append(
                    IncidentSpan(root.trace, number, root.number, stage, self._ns(at), self._ns(at + took), about)
                )
            at += took
        return spans

    def _unmended(self, incident: IncidentOpened, ended: Instant) -> IncidentSpan:
        return self._root(incident, incident.at, ended, failed=True, more={"regrow.mended": False})

    def _root(
        self,
        incident: IncidentOpened | IncidentClosed,
        start: Instant,
        end: Instant,
        *,
        failed: bool,
        more: Mapping[str, Attribute],
    ) -> IncidentSpan:
        attributes: dict[str, Attribute] = {
            "regrow.job": self.job,
            "regrow.incident": incident.incident,
            "regrow.kind": incident.kind,
            "regrow.ranks": [int(rank) for rank in incident.ranks],
            "regrow.generation": incident.generation,
            "regrow.step": incident.step,
        }
        if failed:
            attributes["error.type"] = incident.kind
        gone = [each for each in self._gone if each.rank in incident.ranks and start - _BEFORE <= each.at <= end]
        return IncidentSpan(
            self._digest(incident.incident, "", 16),
            self._number(incident.incident, ROOT),
            0,
            f"{ROOT} {incident.kind}",
            self._ns(start),
            self._ns(end),
            {**attributes, **more},
            first_line(incident.cause) if failed else "",
            [self._left(each) for each in gone],
        )

    def _left(self, gone: WorkerGone) -> SpanEvent:
        about: dict[str, Attribute] = {"regrow.worker": gone.worker, "process.exit.code": gone.code}
        if gone.rank is not None:
            about["regrow.rank"] = gone.rank
        return SpanEvent(self._ns(gone.at), "worker ended", about)

    def _ns(self, at: Instant) -> int:
        return round((at + self._offset) * 1e9)

    def _number(self, incident: int, part: str) -> int:
        return self._digest(incident, part, 8)

    def _digest(self, incident: int, part: str, size: int) -> int:
        text = f"{self.job}\0{self._began!r}\0{incident}\0{part}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1
