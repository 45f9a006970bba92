"""The scenarios on the fake cluster; and on a real one where `python -m tests.cluster.real` has prepared it."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from lightkube import KubeConfig
from tests.cluster.bed import KEY, Bed, bed
from tests.cluster.real.scenarios import FAILS, SCENARIOS, SUCCEEDS, Trial

from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.lightkube_api import LightkubeApi

pytestmark = pytest.mark.full
REAL = os.environ.get("REGROW_TEST_KUBECONFIG", "")
NAMESPACE = os.environ.get("REGROW_TEST_NAMESPACE", "team")
IMAGE = os.environ.get("REGROW_TEST_IMAGE", "python:3.11-slim")
QUEUE = os.environ.get("REGROW_TEST_QUEUE", "")
"""A LocalQueue of that namespace with room for 4 pods; without one a real cluster is taken to have no Kueue."""


@pytest_asyncio.fixture(params=["none", "kueue"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[LightkubeApi, str]]:
    """A client, and the queue to use; an operator of this process works there."""
    queued = request.param == "kueue"
    if REAL:
        if queued and not QUEUE:
            pytest.skip("REGROW_TEST_QUEUE names no LocalQueue")
        async with LightkubeApi(KubeConfig.from_file(REAL).get()) as api, _Operator(api):
            yield api, QUEUE if queued else ""
        return
    async with bed(tmp_path, {f"n{number}": 2 for number in range(4)}) as made:
        _prepare(made, queued=queued)
        async with made.client() as api, made.operator():
            yield api, "queue" if queued else ""


def _prepare(made: Bed, *, queued: bool) -> None:
    if queued:
        made.use_kueue({"queue": 4}, {})
    made.said.ends.update({FAILS: 1, SUCCEEDS: 0})


@pytest_asyncio.fixture
async def trial(cluster: tuple[LightkubeApi, str], request: pytest.FixtureRequest) -> AsyncIterator[Trial]:
    api, queue = cluster
    number = [each.__name__ for each in SCENARIOS].index(request.node.callspec.params["scenario"].__name__)
    made = Trial(api, NAMESPACE, f"real-{number}{'-q' if queue else ''}", image=IMAGE, queue=queue)
    yield made
    await made.end()


class _Operator:
    """One on a real cluster, for as long as the block: nobody else's may work there."""

    def __init__(self, api: LightkubeApi) -> None:
        self._controller = Controller(api, KEY, resync_every=5.0)

    async def __aenter__(self) -> None:
        self._running = asyncio.create_task(self._controller.run())

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
async def test_a_job(trial: Trial, scenario: object) -> None:
    await scenario(trial)  # type: ignore[operator]
