"""Metrics that an agent serves of its node: right whatever its workers go through, and never in the job's way."""

import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from regrow.agent.metrics_site import NodeMetricsSite
from regrow.agent.worker_states import WorkerStates, node_series
from regrow.core.config import AgentConfig, Script
from regrow.core.hosts import answers_to, nth_place
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Role, Warmth

NODE = NodeId("node1")
W0, W1 = WorkerId("w0"), WorkerId("w1")
ONE, TWO = Generation(1), Generation(2)
FACTS = JobSpec(JobId("job"), 2, 3, 0, Warmth.BUILT, 100, 3600.0, None, False)


def spawned(sight: WorkerStates, worker: WorkerId, role: Role = Role.RANK) -> None:
    sight.ordered(orders.SpawnWorker(NODE, worker, role, Rank(0), 0, 2, ONE, 0, False))
    sight.sent(facts.WorkerStarted(worker, os.getpid()))
    assert sight.counts()["starting"] == 1
    sight.sent(facts.WorkerReady(worker, StepNo(0), "", ""))


def formed(sight: WorkerStates, worker: WorkerId, generation: Generation, hydrated: int = 0) -> None:
    sight.ordered(orders.NoteGeneration(NODE, generation, StepNo(0)))
    sight.ordered(orders.FormGeneration(worker, generation, Rank(0), 0, StepNo(0), [], [], []))
    before = sight.counts()["training"]
    sight.sent(facts.WorkerResumed(worker, generation, hydrated_bytes=hydrated))
    assert sight.counts()["training"] == before + 1


def states(sight: WorkerStates) -> dict[str, int]:
    return {state: number for state, number in sight.counts().items() if number}


def commit(worker: WorkerId, at: float, seconds: float, *, adopted: bool = False) -> facts.NodeProgress:
    return facts.NodeProgress(NODE, [facts.WorkerCommitted(worker, ONE, StepNo(3), at, seconds, adopted=adopted)])


def values(sight: WorkerStates, name: str) -> dict[tuple[str, ...], float]:
    found = node_series(sight, job=JobId("job"), node=NODE, memory={}, offset=1000.0)
    (one,) = [each for each in found if each.name == name]
    assert all(sample.labels["node"] == NODE for each in found for sample in each.samples)
    return {tuple(v for k, v in sample.labels.items() if k != "node"): sample.value for sample in one.samples}


def test_a_worker_is_counted_in_one_state_from_its_order_to_its_end() -> None:
    sight = WorkerStates()
    spawned(sight, W0)
    assert states(sight) == {"starting": 1}
    formed(sight, W0, ONE)
    assert states(sight) == {"training": 1}
    sight.ordered(orders.HaltGeneration(W0, ONE, "planned", at=StepNo(9)))
    assert states(sight) == {"training": 1}
    sight.ordered(orders.HaltGeneration(W0, ONE, "a rank is lost"))
    assert states(sight) == {"mending": 1}
    formed(sight, W0, TWO)
    sight.sent(facts.WorkerFinished(W0, TWO, StepNo(10)))
    assert states(sight) == {"done": 1}
    sight.sent(facts.WorkerExited(W0, 0, 9.0))
    assert (states(sight), sight.pids) == ({}, [])


def test_a_standby_waits_until_it_is_seated_and_its_state_is_counted_as_received() -> None:
    sight = WorkerStates()
    spawned(sight, W1, Role.STANDBY)
    assert states(sight) == {"standby": 1}
    formed(sight, W1, TWO, hydrated=4096)
    assert states(sight) == {"training": 1}
    assert values(sight, "regrow_hydrated_bytes_total") == {(): 4096}
    assert values(sight, "regrow_generation") == {(): 2}


def test_the_newest_commit_is_that_of_living_workers_and_of_their_own() -> None:
    sight = WorkerStates()
    assert values(sight, "regrow_newest_timestamp_seconds") == {}
    for worker in (W0, W1):
        spawned(sight, worker)
        formed(sight, worker, ONE)
    sight.sent(commit(W0, 5.0, 0.5))
    sight.sent(commit(W1, 7.0, 0.9))
    sight.sent(commit(W0, 8.0, 0.0, adopted=True))
    assert values(sight, "regrow_newest_timestamp_seconds") == {("commit",): 1007.0}
    assert values(sight, "regrow_step_seconds") == {("median",): 0.7, ("max",): 0.9}
    sight.sent(facts.WorkerExited(W1, -9, 8.0))
    assert values(sight, "regrow_newest_timestamp_seconds") == {("commit",): 1005.0}


# --- over HTTP -----------------------------------------------------------------------------------------------------


def config(folder: Path, place: tuple[str, int] | None) -> AgentConfig:
    home = str(folder)
    script = Script("train.py", [])
    return AgentConfig(FACTS, NODE, 1, "", "secret", script, home, home, home, data_dir=home, metrics=place)


@asynccontextmanager
async def serving(site: NodeMetricsSite) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with site, aiohttp.ClientSession(f"http://127.0.0.1:{site.port or 1}", timeout=timeout) as session:
        yield session


async def test_a_scrape_tells_of_workers_and_of_the_memory_of_all(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "entry").write_bytes(b"x" * 100_000)
    sight = WorkerStates()
    spawned(sight, W0)
    async with serving(NodeMetricsSite(config(tmp_path, ("127.0.0.1", 0)), sight, lambda: 77)) as session:
        async with session.get("/metrics") as answer:
            assert answer.status == 200
            lines = (await answer.text()).splitlines()
        async with session.get("/metrics", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
    found = {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}
    assert found['regrow_workers{node="node1",state="starting"}'] == 1
    memory = {name: found[f'regrow_memory_bytes{{node="node1",of="{name}"}}'] for name in ("agent", "workers", "cache")}
    assert memory["agent"] == pytest.approx(memory["workers"], rel=0.1)  # the worker is this process here
    assert memory["agent"] > 1e6
    assert 100_000 <= memory["cache"] < 300_000
    assert found['regrow_memory_bytes{node="node1",of="copies"}'] == 77


async def test_nothing_listens_unless_asked(tmp_path: Path) -> None:
    async with NodeMetricsSite(config(tmp_path, None), WorkerStates(), lambda: 0) as site:
        assert site.port == 0


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "beyond the last"])
async def test_a_port_that_cannot_be_had_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, taken: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.WARNING):
        port = other.getsockname()[1] if taken else 65536
        async with NodeMetricsSite(config(tmp_path, ("127.0.0.1", port)), WorkerStates(), lambda: 0) as site:
            assert site.port == 0
    assert f"node1: --node-metrics cannot listen on 127.0.0.1:{port}: " in caplog.text


def test_each_agent_of_a_machine_has_a_port_of_its_own() -> None:
    assert [nth_place(("127.0.0.1", 9410), number) for number in (0, 2)] == [("127.0.0.1", 9410), ("127.0.0.1", 9412)]
    assert nth_place(("127.0.0.1", 0), 2) == ("127.0.0.1", 0)
    assert nth_place(None, 2) is None


def test_a_name_of_somebody_elses_is_not_answered_to_on_loopback() -> None:
    assert [answers_to("127.0.0.1", name) for name in ("localhost", "127.0.0.1", "[::1]", "", "evil.example")] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert answers_to("0.0.0.0", "node7.example")
