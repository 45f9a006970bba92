"""A real training in the pods of a JobSet, and of a TrainJob: a lost pod comes back, and nobody else starts anew."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import Bed, bed
from tests.cluster.fake_jobset import FakeJobSet
from tests.cluster.trained import MICRO, STEPS, TrainedJob
from tests.ports import held_port

from regrow_guests.pods import manifests
from regrow_guests.pods.manifests import GuestJob, jobset

pytestmark = pytest.mark.soak
TOKEN = "0123456789abcdef0123456789abcdef"
WORDS = (*MICRO, "--steps", str(STEPS), "--pace", "0.6", "--invariant", "--out", "job.out")


@contextlib.asynccontextmanager
async def set_of(cluster: Bed, made: dict[str, Any]) -> AsyncIterator[FakeJobSet]:
    """A JobSet that is looked after; at the end its pods are deleted."""
    secret = {"metadata": {"name": manifests.TOKEN_SECRET}, "stringData": {"token": TOKEN}}
    cluster.store.create("secrets", "team", secret)
    found = FakeJobSet(cluster.store, made)

    async def live() -> None:
        while True:
            found.turn()
            await asyncio.sleep(0.02)

    living = asyncio.create_task(live())
    try:
        yield found
        assert not living.done(), living.exception()
    finally:
        living.cancel()
        await asyncio.wait({living})


def pod_of(cluster: Bed, index: int) -> str:
    """Name of the pod that runs with an index."""
    label = "batch.kubernetes.io/job-completion-index"
    names = [each["metadata"] for each in cluster.pods("Running")]
    (found,) = [str(meta["name"]) for meta in names if meta["labels"][label] == str(index)]
    return found


async def test_a_lost_pod_comes_back_into_the_running_job_and_no_other_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "PORT", held_port())
    made = jobset(GuestJob("job", "team/train:1", nodes=2, words=("--data-cache=off", *WORDS)))
    async with bed(tmp_path, {"n1": 4}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        async with set_of(cluster, made) as found:
            await job.until_world(2)
            cluster.kubelet.kill(pod_of(cluster, 1))
            await cluster.until(lambda: found.made == [0, 1, 1], "it is replaced")
            await job.until_world(2)
            job.let_go()
            await cluster.until(lambda: found.condition, "the set has ended")
            assert (found.condition, found.made, found.failures) == ("Completed", [0, 1, 1], 1), found.message
        kinds = job.assert_undisturbed(2)
        await cluster.until(lambda: not cluster.kubelet.running(), "its processes have ended")
    assert kinds, "the loss was an incident"
