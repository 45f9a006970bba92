"""Progress of a job: the coordinator's answer, and the operator's request and display."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from aiohttp import web
from tests.cluster.jobs import training_job
from tests.unit.observe.observe_records import FakeJob, Moment
from tests.unit.observe.test_watch import progress

from regrow.core.ids import Generation, NodeId, StepNo
from regrow.core.records import IncidentClosed, IncidentOpened, NodeJudged, NodeQuarantined, StepCommitted
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import DrainRequest
from regrow.observe.watch.figures import FiguresApi
from regrow.observe.watch.present import JobFigures, SuspectNode
from regrow_clusters.operator.asking import JobAsker
from regrow_clusters.operator.objects import token_of
from regrow_clusters.operator.observed.observing import read
from regrow_clusters.operator.resource import TrainingJob, TrainingJobStatus, read_job
from regrow_clusters.operator.status import next_status

KEY = b"0123456789abcdef0123456789abcdef"


def job(port: int = 29400, status: TrainingJobStatus | None = None) -> TrainingJob:
    found = training_job(port=port)
    found["metadata"]["uid"] = "u1"
    made = read_job(found)
    return made if status is None else TrainingJob("team", "job", "u1", 1, made.spec, status)


def test_a_job_that_trained_nine_steps_through_a_kill_says_so() -> None:
    clock = Moment()
    desk = FiguresApi(clock)
    assert desk.figures() == JobFigures(0, 0, None)
    for record in FakeJob().run(9, {4: 1}):
        clock.at = record.at
        desk.feed(progress(record) if isinstance(record, StepCommitted) else record)
        if isinstance(record, StepCommitted):
            desk.figures()
    found = desk.figures()
    assert (found.step, found.incidents) == (9, 1)
    desk.feed(IncidentOpened(clock.at, 2, Generation(2), StepNo(9), "move", [], "regrow move"))
    assert desk.figures().incidents == 1, "nothing has failed"
    stages = 0.0, 0.0, 0.0, 0.0, 0.5, 0.8, 0, 0
    desk.feed(IncidentClosed(clock.at, 2, Generation(2), StepNo(9), "exit", [], "", "node", 1, *stages, 8.2, 8.2, 2, 2))
    assert desk.figures().incidents == 2, "a fault struck the move"
    assert found.goodput is not None and 0.3 < found.goodput < 0.9  # 4.5 s of steps, of 3 s of building and a kill


async def _asked(answer: Callable[[web.Request], web.StreamResponse], *, within: float = 5.0) -> JobFigures | None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] != f"Bearer {token_of(KEY, 'u1')}":
            return web.Response(status=401)
        found = answer(request)
        if found.status == 202:
            await asyncio.sleep(60)
        return found

    app = web.Application()
    app.router.add_get("/figures", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with JobAsker(KEY, within=within) as asker:
            return await asker.ask(job(runner.addresses[0][1]), "127.0.0.1")
    finally:
        await runner.cleanup()


async def test_the_operator_asks_with_the_jobs_own_token() -> None:
    found = await _asked(lambda _: web.json_response({"step": 7, "incidents": 1, "goodput": 0.5}))
    assert found == JobFigures(7, 1, 0.5)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: web.Response(status=404),
        lambda _: web.Response(text="no JSON"),
        lambda _: web.Response(text="[" * 100_000),
        lambda _: web.Response(status=302, headers={"Location": "/elsewhere"}),
        lambda _: web.Response(status=202),
    ],
)
async def test_who_does_not_answer_so_in_time_is_not_waited_for(
    answer: Callable[[web.Request], web.StreamResponse],
) -> None:
    assert await asyncio.wait_for(_asked(answer, within=0.3), 20) is None


async def test_nobody_there_is_no_error() -> None:
    async with JobAsker(KEY, within=0.3) as asker:
        assert await asker.ask(job(1024), "127.0.0.1") is None


def test_what_was_said_last_stays_until_more_is_said() -> None:
    known = job(status=TrainingJobStatus(step=5, incidents=2, goodput=0.25))
    reading = read(known, [], 0.0)
    assert next_status(known, reading, [], 0.0).step == 5
    told = next_status(known, reading, [], 0.0, JobFigures(8, 3, 0.33333))
    assert (told.step, told.incidents, told.goodput) == (8, 3, 0.333)


def test_nodes_that_failed_an_examination_are_named_and_those_that_are_only_suspect_are_not() -> None:
    desk = FiguresApi(Moment())

    def judged(node: str, severity: str) -> NodeJudged:
        return NodeJudged(0.0, NodeId(node), "gpu0", severity, "reset", "nvml", "xid 79")

    for each in (judged("node0", "suspect"), judged("node1", "leave"), judged("node2", "fatal")):
        desk.feed(each)
    desk.feed(NodeQuarantined(0.0, NodeId("node2"), "fatal: nvml gpu0: xid 79", alone=False, text="node2 has failed"))
    desk.feed(judged("node2", "leave"))
    assert desk.figures().nodes == [
        SuspectNode(NodeId("node1"), "nvml: gpu0 xid 79"),
        SuspectNode(NodeId("node2"), "fatal: nvml gpu0: xid 79", quarantined=True),
    ]


async def test_a_node_that_the_cluster_has_given_up_is_dropped_under_the_name_that_the_job_knows() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {token_of(KEY, 'u1')}"
        drain = msgspec.json.decode(await request.read(), type=DrainRequest)
        asked.append(drain.node)
        assert drain.certain and drain.grace == 60.0
        return web.Response(body=msgspec.json.encode(AnswerScale(drain.node == "node1", "")))

    app = web.Application()
    app.router.add_post("/drain", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        given = job(runner.addresses[0][1])
        async with JobAsker(KEY, within=60.0) as asker:
            assert await asker.drop(given, "127.0.0.1", ("job-1-1-2", "node1", "node7"))
            assert not await asker.drop(given, "127.0.0.1", ("other",))
    finally:
        await runner.cleanup()
    assert asked == ["job-1-1-2", "node1", "other"]
