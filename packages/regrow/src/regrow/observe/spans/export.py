"""Sends spans of incidents by OTLP over HTTP, with OpenTelemetry's library (`regrow[otel]`)."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from regrow.core.errors import RegrowError, UsageError
from regrow.core.ids import Seconds
from regrow.core.process.extras import install_line
from regrow.observe.plot_clocks import wall_offset
from regrow.observe.spans.incidents import IncidentSpan, IncidentSpans
from regrow.observe.tail import RecordTail

_BATCH = 500
_TRACES = "/v1/traces"
_TIMEOUT: Seconds = 10.0
"""Time limit for sending one batch, including retries."""
_LOOK_S: Seconds = 0.5
_AGAIN_S: Seconds = 5.0


class SpansRefused(RegrowError):
    """The address does not accept the spans."""


class SpanSender(Protocol):
    """A destination of spans."""

    def send(self, job: str, spans: Sequence[IncidentSpan]) -> None:
        """Send spans. Raises `SpansRefused`."""
        ...


class OtlpSender:
    """Sends OTLP over HTTP, in protobuf. OpenTelemetry reads headers and certificates from `OTEL_EXPORTER_OTLP_*`.

    Args:
        address: address of a collector, `http://HOST:4318`, or the full URL for traces.

    Raises:
        UsageError: the address is invalid, or OpenTelemetry is not installed.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--otlp {address} is no address", hint="give http://HOST:4318 of a collector")
        self._address = address.rstrip("/") + _TRACES if parts.path in ("", "/") else address
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise UsageError(
                f"spans need OpenTelemetry, which cannot be imported: {error}", hint=install_line("otel")
            ) from error
        self._exporter = OTLPSpanExporter(endpoint=self._address, timeout=_TIMEOUT)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `SpansRefused` reports the same errors

    def send(self, job: str, spans: Sequence[IncidentSpan]) -> None:
        """Send spans. Raises `SpansRefused`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        resource = Resource({"service.name": "regrow", "service.instance.id": job})
        sampled = TraceFlags(TraceFlags.SAMPLED)
        made = [
            ReadableSpan(
                each.name,
                context=SpanContext(each.trace, each.number, is_remote=False, trace_flags=sampled),
                parent=SpanContext(each.trace, each.parent, is_remote=False, trace_flags=sampled)
                if each.parent
                else None,
                resource=resource,
                attributes=each.attributes,
                events=[Event(event.name, event.attributes, event.at) for event in each.events],
                status=Status(StatusCode.ERROR, each.failed) if each.failed else Status(),
                start_time=each.start,
                end_time=each.end,
            )
            for each in spans
        ]
        for start in range(0, len(made), _BATCH):
            if self._exporter.export(made[start : start + _BATCH]) is not SpanExportResult.SUCCESS:
                raise SpansRefused(
                    f"{self._address} did not take the spans within {_TIMEOUT:g} s",
                    hint="is it a collector's OTLP over HTTP, and do OTEL_EXPORTER_OTLP_HEADERS let this one in?",
                )


def follow_spans(
    job_dir: Path,
    sender: SpanSender,
    *,
    running: Callable[[], bool],
    say: Callable[[str], None],
    sleep: Callable[[Seconds], None] = time.sleep,
) -> int:
    """Send each incident of a job as soon as it is over, until `running()` is false; returns the number of spans sent.

    Spans that are not accepted are kept and sent later; if that fails at the end, `SpansRefused` is raised.

    Args:
        job_dir: the job's folder.
        sender: destination of the spans.
        running: returns True while records may still be written; the caller is responsible for a deadline.
        say: prints a sentence.
        sleep: waits.
    """
    events, tail = job_dir / "events.jsonl", RecordTail(job_dir)
    spans: IncidentSpans | None = None
    kept: list[IncidentSpan] = []
    sent, refused = 0, False
    while True:
        live = running()  # called first, so that the last records are read after the job's end
        offset = wall_offset(events) if spans is None else None
        if offset is not None:
            spans = IncidentSpans(job_dir.name, offset=offset)
        if spans is not None:
            kept += spans.feed(tail.read(events))
        try:
            if spans is not None and kept:
                sender.send(spans.job, kept)
                sent, kept, refused = sent + len(kept), [], False
        except SpansRefused as error:
            if not live:
                raise
            if not refused:
                say(f"{error}; they are kept, and sent later")
            refused = True
        if not live:
            return sent
        sleep(_AGAIN_S if refused else _LOOK_S)
