"""Incidents as traces: what a collector gets, once or twice, now or when it is there again."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tests.unit.observe.observe_records import FakeJob

from regrow.cli.jobs import spans as command
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Rank, StepNo
from regrow.core.records import IncidentClosed, IncidentOpened, JobEnded, Record
from regrow.observe.spans.export import OtlpSender, SpansRefused, follow_spans
from regrow.observe.spans.incidents import STAGES, IncidentSpan, IncidentSpans

WALL = 1_700_000_000.0


def made(records: Sequence[Record]) -> list[IncidentSpan]:
    return IncidentSpans("job", offset=WALL).feed(records)


def write(folder: Path, records: Sequence[Record]) -> Path:
    lines = [json.loads(msgspec.json.encode(each)) | {"time": each.at + WALL} for each in records]
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines if line["type"] != "StepCommitted")
    return folder


def test_an_incident_is_a_trace_whose_stages_follow_one_another_and_fill_it() -> None:
    records = FakeJob().run(10, kills={4: 2, 7: 0})
    spans = made(records)
    closed = [each for each in records if isinstance(each, IncidentClosed)]
    roots = [span for span in spans if not span.parent]
    assert len(roots) == len({span.trace for span in spans}) == 2
    for root, incident in zip(roots, closed, strict=True):
        assert root.start == round((incident.fault_at + WALL) * 1e9)
        children = [span for span in spans if span.parent == root.number]
        assert [span.name for span in children] == list(STAGES)
        assert {span.trace for span in children} == {root.trace}
        ends = [root.start, *(span.end for span in children)]
        assert [span.start for span in children] == pytest.approx(ends[:-1], abs=1000)
        assert ends[-1] == pytest.approx(root.end, abs=1000)
    first = roots[0]
    assert (first.failed, first.attributes["error.type"], first.attributes["regrow.ranks"]) == (
        "killed by SIGKILL",
        "exit",
        [2],
    )
    assert [(event.name, event.attributes["process.exit.code"]) for event in first.events] == [("worker ended", -9)]
    assert len({span.number for span in spans}) == len(spans)


def test_what_is_made_twice_is_the_same_and_another_jobs_is_not() -> None:
    assert made(FakeJob().run(10, kills={4: 2})) == made(FakeJob().run(10, kills={4: 2}))
    other = made(FakeJob(start=5.0).run(10, kills={4: 2}))
    assert not {span.trace for span in other} & {span.trace for span in made(FakeJob().run(10, kills={4: 2}))}


def test_a_change_of_the_world_is_no_error_and_an_incident_that_was_never_mended_is_one() -> None:
    place = (Generation(1), StepNo(4), "grow", [Rank(2)], "an operator asked for it")
    grown = IncidentClosed(9.0, 1, *place, "grow", 0, 0.0, 0.1, 0.2, 0.0, 0.5, 0.8, 0, 0, 8.2, 8.2, 2, 3)
    open_one = IncidentOpened(10.0, 2, Generation(2), StepNo(5), "exit", [Rank(0)], "killed")
    (root, *children, last) = made([grown, open_one, JobEnded(12.0, 75, "")])
    assert (root.failed, "error.type" in root.attributes, root.attributes["regrow.replicas.after"]) == ("", False, 3)
    assert [span.name for span in children] == ["abort", "regroup", "redo"]
    assert (last.failed, last.attributes["regrow.mended"], last.end - last.start) == ("killed", False, 2_000_000_000)


# --- sending -------------------------------------------------------------------------------------------------------


class Collector:
    """Takes OTLP on loopback. `refuses`: it answers with an error."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.refuses = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not outer.refuses:
                    outer.bodies.append((self.path, body))
                self.send_response(400 if outer.refuses else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="regrow[otel] is not installed")
    there = Collector()
    thread = threading.Thread(target=there.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield there
    there.server.shutdown()
    thread.join()
    there.server.server_close()


def test_a_collector_gets_the_spans_as_otlp(tmp_path: Path, collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    folder = write(tmp_path / "job", FakeJob().run(10, kills={4: 2}))
    done = CliRunner().invoke(command, [str(folder), "--otlp", collector.address])
    assert done.exit_code == 0, done.output
    assert "6 spans sent" in done.output
    ((path, body),) = collector.bodies
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("regrow", "job")
    root, *children = resource.scope_spans[0].spans
    assert (root.name, root.parent_span_id, root.status.code, root.events[0].name) == (
        "incident exit",
        b"",
        2,
        "worker ended",
    )
    assert [each.name for each in children] == list(STAGES)
    assert {each.parent_span_id for each in children} == {root.span_id}
    expected = made(FakeJob().run(10, kills={4: 2}))[0]
    assert (int.from_bytes(root.trace_id, "big"), root.start_time_unix_nano) == (expected.trace, expected.start)


def test_a_collector_that_refuses_is_an_error_with_a_cure(collector: Collector) -> None:
    collector.refuses = True
    with pytest.raises(SpansRefused, match="did not take the spans.*OTEL_EXPORTER_OTLP_HEADERS"):
        OtlpSender(collector.address).send("job", made(FakeJob().run(10, kills={4: 2})))


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="--otlp collector:4318 is no address"):
        OtlpSender("collector:4318")


class FlakyCollector:
    """Remembers spans; refuses the first `refusals` times."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.got: list[IncidentSpan] = []

    def send(self, job: str, spans: Sequence[IncidentSpan]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise SpansRefused("nobody is there")
        self.got += spans


def following(folder: Path, sender: FlakyCollector, then: Sequence[Callable[[], object]]) -> tuple[int, list[str]]:
    """Follow a job in which one thing after the other happens, a look between two of them."""
    left, said = list(then), list[str]()

    def sleep(_: float) -> None:
        left.pop(0)()

    return follow_spans(folder, sender, running=lambda: bool(left), say=said.append, sleep=sleep), said


def test_a_job_is_followed_and_each_incident_sent_once_when_it_is_over(tmp_path: Path) -> None:
    records = FakeJob().run(10, kills={4: 2, 7: 0})
    half = next(i for i, each in enumerate(records) if isinstance(each, IncidentClosed)) + 1
    counts, sender = list[int](), FlakyCollector(0)
    folder = tmp_path / "job"
    sent, said = following(
        folder,
        sender,
        [
            lambda: write(folder, records[:half]),
            lambda: counts.append(len(sender.got)),
            lambda: write(folder, records[half:]),
        ],
    )
    assert (counts, sent, said) == ([6], 12, [])
    assert sender.got == made(records)


def test_spans_are_kept_for_a_collector_that_comes_back_and_one_that_never_does_is_an_error(tmp_path: Path) -> None:
    records = FakeJob().run(10, kills={4: 2})
    folder = write(tmp_path / "job", records)
    sender = FlakyCollector(2)
    sent, said = following(folder, sender, [lambda: None] * 3)
    assert (sent, sender.got, len(said)) == (6, made(records), 1)
    with pytest.raises(SpansRefused):
        following(folder, FlakyCollector(100), [lambda: None] * 3)
