"""A running job over HTTP: its metrics, its page, and that neither grows, waits, nor does harm."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.unit.observe.observe_records import NODE, FakeJob, Moment

from regrow.agent.worker_states import WorkerStates, node_series
from regrow.core.errors import UsageError
from regrow.core.hosts import place_to_listen
from regrow.core.ids import Generation, Instant, JobId, Rank, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role
from regrow.core.records import (
    IN_TRAINING,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    NodeJudged,
    Record,
    StepCommitted,
    WorkerSpawned,
    WorldChanged,
)
from regrow.observe.ledger import Ledger
from regrow.observe.watch import site as site_module
from regrow.observe.watch.exposition import exposition, series
from regrow.observe.watch.frames import WatchSnapshot, WatchTick, snapshot, tick
from regrow.observe.watch.present import MOST_INCIDENTS, MOST_METRICS, MOST_POINTS, Present
from regrow.observe.watch.progress_lines import ProgressLines
from regrow.observe.watch.site import WatchSite

DOCS = Path(__file__).parents[3] / "docs" / "monitoring.md"
DEPLOY = Path(__file__).parents[3] / "deploy" / "monitoring"
PATIENCE = 30.0


def progress(*commits: StepCommitted) -> facts.NodeProgress:
    """Report of an agent about commits."""
    said = [
        facts.WorkerCommitted(c.worker, c.generation, c.step, c.at, c.seconds, dict(c.metrics), rank=c.rank)
        for c in commits
    ]
    return facts.NodeProgress(NODE, said)


def watched(records: list[Record]) -> Present:
    """A job as the coordinator hears of it, looked at with every commit."""
    job = Present()
    for record in records:
        if isinstance(record, StepCommitted):
            job.feed(progress(record))
            job.fold(record.at)
            job.mark(record.at)
        else:
            job.feed(record)
    return job


def values(job: Present, name: str) -> dict[tuple[str, ...], float]:
    (found,) = [each for each in series(job, offset=0.0) if each.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in found.samples}


OF_JOB = series(watched(FakeJob().run(10, kills={4: 2})), offset=0.0)
OF_NODE = node_series(WorkerStates(), job=JobId("job"), node=NODE, memory={"agent": 1}, offset=0.0)
ALL_SERIES = [*OF_JOB, *OF_NODE]


# --- metrics -------------------------------------------------------------------------------------------------------


def test_there_are_seventeen_series_at_most_each_in_the_documentation_with_a_base_unit() -> None:
    found = ALL_SERIES
    documented = set(re.findall(r"^\| `(regrow_\w+)", DOCS.read_text(), re.MULTILINE))
    assert {each.name for each in found} == documented
    assert len({each.name for each in found}) <= 17
    for each in found:
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        assert not re.search(r"_(ms|minutes|hours|percent|mb)(_|$)", each.name)


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_alerts_and_dashboard_ask_for_series_that_there_are(name: str) -> None:
    asked = set(re.findall(r"\bregrow_\w+", (DEPLOY / name).read_text()))
    assert asked
    assert asked <= {each.name for each in ALL_SERIES}


def test_every_alert_is_explained() -> None:
    alerts = re.findall(r"alert: (\w+)", (DEPLOY / "alerts.yml").read_text())
    assert alerts
    assert re.findall(r"^\| (Regrow\w+)", DOCS.read_text(), re.MULTILINE) == alerts


def test_the_text_is_what_prometheus_reads() -> None:
    job = watched(FakeJob().run(10, kills={4: 2}))
    job.metrics = {'odd "name"\\\n': float("nan"), "large": float("inf")}
    label = r'[a-z_]+="(?:[^"\\\n]|\\[\\n"])*"'
    sample = re.compile(rf"[a-z_]+(\{{{label}(,{label})*\}})? (NaN|[+-]Inf|-?[0-9.]+(e[+-]?[0-9]+)?)")
    typed = ""
    for line in exposition(job, offset=1e9, refused={"coordinator": 3}).splitlines():
        if line.startswith("# TYPE "):
            typed = line.split()[2]
        elif not line.startswith("# HELP "):
            assert sample.fullmatch(line), line
            assert line.startswith(typed)


def test_the_figures_are_those_of_the_job() -> None:
    job = watched(FakeJob(step=0.5).run(10, kills={4: 2, 7: 0}))
    assert values(job, "regrow_steps") == {(): 10}
    assert values(job, "regrow_incidents_total") == {("exit",): 2}
    assert values(job, "regrow_incident_stage_seconds_total") == pytest.approx(
        {("detect",): 0.02, ("abort",): 0.04, ("regroup",): 0.12, ("hydrate",): 0.32, ("redo",): 1.0}
    )
    assert values(job, "regrow_step_seconds") == {("median",): 0.5, ("max",): 0.5}
    assert values(job, "regrow_newest_timestamp_seconds") == {("commit",): pytest.approx(3.0 + 10 * 0.5 + 2 * 0.5)}


def test_rank_seconds_add_up_to_the_world_over_time_and_productive_ones_are_those_of_the_steps() -> None:
    records = FakeJob(step=0.5).run(40, kills={4: 2, 30: 1})
    job = watched(records)
    assert sum(job.spent.values()) == pytest.approx(4 * (records[-1].at - records[0].at))
    assert job.spent["productive"] == pytest.approx(4 * 40 * 0.5, rel=0.1)


def test_steps_between_two_looks_are_counted_and_steps_given_up_are_not() -> None:
    job = Present()
    job.feed(JobStarted(0.0, "job", 1, 1, 0, []))  # type: ignore[arg-type]
    job.feed(WorkerSpawned(0.0, WorkerId("w0"), NODE, Role.RANK, Rank(0), Generation(1)))

    def look(step: int, at: Instant) -> float:
        job.feed(
            facts.NodeProgress(NODE, [facts.WorkerCommitted(WorkerId("w0"), Generation(1), StepNo(step), at, 0.9)])
        )
        job.fold(at)
        return job.spent["productive"]

    assert look(0, 1.0) == pytest.approx(0.9)
    assert look(10, 11.0) == pytest.approx(9.9)
    assert look(5, 21.0) == pytest.approx(9.9)
    assert sum(job.spent.values()) == pytest.approx(21.0)


def test_places_that_a_fault_empties_are_wanted_and_places_given_up_on_purpose_are_not() -> None:
    def wanted(kind: str) -> dict[tuple[str, ...], float]:
        job = Present()
        job.feed(JobStarted(0.0, "job", 4, 1, 0, []))  # type: ignore[arg-type]
        job.feed(WorldChanged(1.0, Generation(2), StepNo(0), kind, 4, 2, ""))
        members = {str(rank): WorkerId(f"w{rank}") for rank in range(2)}
        job.feed(GenerationFormed(1.0, Generation(2), StepNo(0), members))
        return values(job, "regrow_world_ranks")

    both = ({("present",): 2, ("wanted",): 4}, {("present",): 2, ("wanted",): 2})
    assert (wanted("fault"), wanted("shrink")) == both


def test_nothing_grows_with_the_length_of_a_job() -> None:
    job = Present()
    job.feed(JobStarted(0.0, "job", 1, 1, 0, []))  # type: ignore[arg-type]
    for number in range(3 * MOST_POINTS):
        worker, at = WorkerId(f"w{number}"), float(number)
        place = (number, Generation(number), StepNo(number), "exit", [Rank(0)], "x")
        job.feed(WorkerSpawned(at, worker, NODE, Role.RANK, Rank(0), Generation(number)))
        job.feed(GenerationFormed(at, Generation(number), StepNo(number), {"0": worker}))
        logged = {f"m{number}.{k}": 1.0 for k in range(MOST_METRICS)}
        job.feed(
            facts.NodeProgress(
                NODE, [facts.WorkerCommitted(worker, Generation(number), StepNo(number), at, 0.1, logged)]
            )
        )
        job.feed(IncidentOpened(at, *place))
        job.feed(IncidentClosed(at, *place, "fork", 1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0, 0, at, at))
        job.mark(at)
    assert len(job.incidents) == MOST_INCIDENTS
    assert MOST_POINTS / 3 < len(job.points) <= MOST_POINTS
    assert job.points[-1].at - job.points[0].at > 2.5 * MOST_POINTS, "the curves still tell of the beginning"
    assert len(job.metrics) <= MOST_METRICS
    kept = [value for value in vars(job).values() if hasattr(value, "__len__")]
    assert max(len(value) for value in kept) <= MOST_POINTS


# --- what the page is told -----------------------------------------------------------------------------------------


def test_a_snapshot_has_every_rank_and_incident_and_a_tick_a_letter_for_each_rank() -> None:
    job = watched([each for each in FakeJob().run(10, kills={4: 2}) if not isinstance(each, JobEnded)])
    seen = snapshot(job, 9.0)
    assert (seen.ranks, seen.nodes, seen.home) == ([0, 1, 2, 3], [NODE], [0, 0, 0, 0])
    assert [(each.step, each.ranks, each.rung) for each in seen.incidents] == [(4, [2], "standby")]
    assert seen.tick.states == "tttt"
    job.feed(IncidentOpened(9.0, 2, Generation(2), StepNo(9), "exit", [Rank(1)], "killed\nwith a stack"))
    now = tick(job, 9.1)
    assert (now.states, now.incident is not None and now.incident.cause) == ("mlmm", "killed")
    assert now.version != seen.tick.version, "the page asks for the incidents again"


def test_numbers_that_json_has_no_word_for_are_left_out() -> None:
    job = watched(FakeJob().run(3, kills={}))
    job.metrics = {"loss": float("nan"), "lr": 0.1}
    assert tick(job, 9.0).metrics == {"lr": 0.1}
    msgspec.json.decode(msgspec.json.encode(snapshot(job, 9.0)), type=WatchSnapshot)


# --- the site ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(said: list[str], *, port: int = 0) -> AsyncIterator[tuple[WatchSite, aiohttp.ClientSession]]:
    async with (
        WatchSite("127.0.0.1", port, say=said.append, every=0.01) as site,
        aiohttp.ClientSession(f"http://127.0.0.1:{site.port}" if site.port else None) as session,
    ):
        for record in FakeJob().run(10, kills={4: 2})[:-1]:
            site.feed(record)
        yield site, session


async def test_it_serves_a_page_a_script_and_metrics_to_whoever_asks_and_changes_nothing() -> None:
    async with serving([]) as (_, session):
        for path, kind in (("/", "text/html"), ("/watch.js", "text/javascript"), ("/snapshot", "application/json")):
            async with session.get(path) as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with session.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert 'regrow_incidents_total{kind="exit"} 1\n' in await answer.text()
        async with session.post("/snapshot") as answer:
            assert answer.status == 405
        async with session.get("/nothing") as answer:
            assert answer.status == 404


def test_the_page_asks_nobody_else_for_anything() -> None:
    for name in ("page.html", "watch.js"):
        assert "//" not in re.sub(r"// .*", "", resources.files("regrow.observe.watch").joinpath(name).read_text())


async def test_a_page_of_somebody_else_cannot_read_it_under_a_name_of_its_own() -> None:
    async with serving([]) as (site, session):
        async with session.get("/snapshot", headers={"Host": f"evil.example:{site.port}"}) as answer:
            assert answer.status == 403
        async with session.get("/snapshot", headers={"Host": f"localhost:{site.port}"}) as answer:
            assert answer.status == 200


async def test_ticks_come_one_after_another_and_the_last_one_tells_the_end() -> None:
    async def read(answer: aiohttp.ClientResponse) -> WatchTick:
        line = await asyncio.wait_for(answer.content.readline(), PATIENCE)
        assert await answer.content.readline() == b"\n"
        return msgspec.json.decode(line.removeprefix(b"data: "), type=WatchTick)

    said: list[str] = []
    async with aiohttp.ClientSession() as session:
        async with serving(said) as (site, _):
            answer = await session.get(f"{site.address}ticks")
            first, second = await read(answer), await read(answer)
            assert first.ended is None
            assert second.at > first.at
            site.feed(JobEnded(9.0, 75, "stopped"))
        while (last := await read(answer)).ended is None:
            pass
        assert last.ended == 75
        answer.close()
    assert said == []


async def test_there_are_no_more_readers_than_it_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "MOST_READERS", 1)
    async with serving([]) as (_, session), session.get("/ticks") as reading:
        assert reading.status == 200
        async with session.get("/ticks") as refused:
            assert refused.status == 503
        async with session.get("/metrics") as answer:
            assert answer.status == 200


async def test_a_reader_that_takes_nothing_is_let_go_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "_PATIENCE", 0.2)
    async with serving([]) as (site, session):
        world = {str(rank): WorkerId(f"r{rank}") for rank in range(20_000)}
        site.feed(GenerationFormed(9.0, Generation(9), StepNo(9), world))
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1)
        writer.write(f"GET /ticks HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE):
            while not site.readers:
                await asyncio.sleep(0.01)
            while site.readers:
                async with session.get("/metrics") as answer:
                    assert answer.status == 200
        assert reader is not None
        writer.close()


async def test_where_it_cannot_listen_it_says_so_and_the_job_goes_on() -> None:
    said: list[str] = []
    async with serving([]) as (first, _), serving(said, port=first.port) as (second, _):
        assert second.address == ""
    (text,) = said
    assert "Address already in use; the job goes on without it" in text


async def test_an_error_of_its_own_is_said_and_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with serving(said) as (site, session):
        monkeypatch.setattr(Present, "fold", lambda self, now: 1 / 0)
        async with session.get("/metrics") as answer:
            assert (answer.status, "ZeroDivisionError" in await answer.text()) == (500, True)
        async with asyncio.timeout(PATIENCE):
            while not said:
                await asyncio.sleep(0.01)
        site.feed(JobEnded(9.0, 0, ""))
    assert "the live view has stopped: ZeroDivisionError" in said[0]


@pytest.mark.parametrize(
    ("text", "place"),
    [("", None), ("9400", ("127.0.0.1", 9400)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:80", ("::1", 80))],
)
def test_where_to_listen(text: str, place: tuple[str, int] | None) -> None:
    assert place_to_listen("--watch", text) == place


@pytest.mark.parametrize("text", ["here", ":80", "host:", "1:70000", "99999"])
def test_no_place_to_listen(text: str) -> None:
    with pytest.raises(UsageError, match="--watch"):
        place_to_listen("--watch", text)


def test_what_is_held_of_devices_counts_until_it_is_over() -> None:
    job = Present()
    for slot, severity in ((0, "suspect"), (1, "suspect"), (1, "suspect"), (0, "ok")):
        job.feed(NodeJudged(1.0, NODE, f"slot{slot}", severity, "none", "straggler", "", IN_TRAINING))
    job.feed(NodeJudged(1.0, NODE, "gpu0", "suspect", "none", "nvml", "", "joined"))
    assert values(job, "regrow_suspects") == {("straggler",): 1}


def test_goodput_is_the_same_on_the_page_as_in_the_records_whatever_the_start_took() -> None:
    for kills in ({}, {4: 1}, {2: 0, 5: 3}):
        run = FakeJob().run(9, kills)
        page = watched(run).goodput
        assert page == pytest.approx(Ledger(run).goodput, abs=0.03), kills
    assert watched(FakeJob().run(0, {})).goodput is None


def test_the_launcher_says_when_steps_begin_and_each_half_minute_how_far_they_are() -> None:
    clock, said = Moment(), list[str]()
    lines = ProgressLines(said.append, repeats=True, clock=clock)
    for record in FakeJob(step=5.0).run(14, {}):
        clock.at = record.at
        lines.feed(progress(record) if isinstance(record, StepCommitted) else record)
    assert said[0] == "training 8.00 s after the start: 4 ranks on 1 node"
    assert [line.partition(",")[0] for line in said[1:]] == ["step 7", "step 13"]
    assert re.fullmatch(r"step 7, loss \d\.\d{4}, .* a step, goodput 1?\d\d\.\d%", said[1])
    quiet = list[str]()
    once = ProgressLines(quiet.append, repeats=False, clock=clock)
    once.replaceable = lambda: "replaceable: not proven yet"
    for record in FakeJob(step=5.0).run(14, {}):
        clock.at = record.at
        once.feed(progress(record) if isinstance(record, StepCommitted) else record)
    assert quiet == ["training 8.00 s after the start: 4 ranks on 1 node; replaceable: not proven yet"]
