"""Pods that get a name as the operator is about to write it: the one that it meant is gone, and they stay untouched."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.bed import bed
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import Manifest, Refused
from tests.cluster.jobs import training_job
from tests.cluster.turned import TurnedJob

from regrow.core.errors import UsageError
from regrow_clusters.operator import commands
from regrow_clusters.operator.api import ApiKind
from regrow_clusters.operator.backends import KUEUE_FINALIZER
from regrow_clusters.operator.objects import NODE_RANK, TOPOLOGY, UID_LABEL


class MadeAgain:
    """The first pod that the operator is about to write in this way is gone by then, and another job's has its name."""

    def __init__(self, job: TurnedJob, verb: str, *, finalizers: tuple[str, ...] = ()) -> None:
        self._job, self._verb, self._finalizers = job, verb, finalizers
        self.found: Manifest | None = None
        job.operator.api.before = self._before

    def _before(self, verb: str, kind: ApiKind, namespace: str, name: str) -> None:
        if self.found is not None or (verb, kind) != (self._verb, ApiKind.PODS):
            return
        store = self._job.store
        old = store.get("pods", namespace, name)
        if old["metadata"].get("finalizers"):
            store.patch("pods", namespace, name, {"metadata": {"finalizers": None}})
        if ("pods", namespace, name) in store.objects:
            store.delete("pods", namespace, name, grace=0)
        labels = {**old["metadata"]["labels"], UID_LABEL: "another"}
        meta = {"name": name, "labels": labels, "finalizers": list(self._finalizers), "annotations": {}}
        spec = {name: value for name, value in old["spec"].items() if name != "nodeName"}
        self.found = store.create("pods", namespace, {"metadata": meta, "spec": spec})

    def is_as_it_was(self) -> bool:
        """Nobody has touched it."""
        assert self.found is not None
        meta = self.found["metadata"]
        now = self._job.store.objects[("pods", "team", meta["name"])]["metadata"]
        names = ("uid", "labels", "annotations", "finalizers", "deletionTimestamp")
        return {name: now.get(name) for name in names} == {name: meta.get(name) for name in names}


def scaled_down(job: TurnedJob) -> None:
    job.patch(replicas=2)


def silent(job: TurnedJob) -> None:
    """Its kubelet is dead, so it is released by force when its grace is over."""
    lost = job.at(2)
    job.kubelets.cut[lost["spec"]["nodeName"]] = job.now
    job.nodes.unfit.add(lost["spec"]["nodeName"])
    job.store.delete("pods", "team", lost["metadata"]["name"])


@pytest.mark.parametrize("fault", [scaled_down, silent])
def test_a_pod_that_has_the_name_of_one_that_is_to_end_stays(fault: Callable[[TurnedJob], None]) -> None:
    job = TurnedJob(maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    other = MadeAgain(job, "delete")
    fault(job)
    job.until(lambda: other.found is not None, within=300)
    job.turns(5)
    assert other.is_as_it_was()
    replicas = 2 if fault is scaled_down else 3
    job.until(lambda: (job.status()["phase"], job.status()["replicas"]) == ("Training", replicas))
    job.turns(60)
    assert other.is_as_it_was()


def test_a_pod_that_has_the_name_of_one_of_kueues_keeps_its_finalizer() -> None:
    job = TurnedJob(4)
    job.until(lambda: job.trains(1))
    other = MadeAgain(job, "patch", finalizers=(KUEUE_FINALIZER,))
    lost = job.at(1)
    job.kubelets.cut[lost["spec"]["nodeName"]] = job.now
    job.nodes.unfit.add(lost["spec"]["nodeName"])
    job.store.delete("pods", "team", lost["metadata"]["name"])
    job.until(lambda: other.found is not None, within=300)
    assert other.is_as_it_was()


def test_a_pod_that_has_the_name_of_one_that_is_to_be_told_its_place_is_told_nothing() -> None:
    job = TurnedJob(topologyLabels=["example.com/rack"])
    other = MadeAgain(job, "patch")
    job.until(lambda: other.found is not None)
    job.turns(3)
    assert other.is_as_it_was() and other.found is not None
    assert not {NODE_RANK, TOPOLOGY} & other.found["metadata"]["annotations"].keys()
    assert "PodsPlaced" not in {each["type"] for each in job.status()["conditions"] if each["status"] == "False"}


async def test_a_conflict_says_to_try_again_and_a_name_that_is_taken_to_give_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(training_job(maxReplicaCount=3)))
    async with bed(tmp_path, {}) as cluster:
        (tmp_path / "kubeconfig").write_text(kubeconfig(cluster.address))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        await asyncio.to_thread(commands.submit, tmp_path / "job.json", "team")
        with pytest.raises(UsageError) as taken:
            await asyncio.to_thread(commands.submit, tmp_path / "job.json", "team")
        assert taken.value.hint == "give it another name, or kubectl delete the one that is there"
        crossed = Refused(409, "Conflict", "the object has been modified")
        cluster.store.refuse = lambda verb, plural, body: crossed if verb == "update" else None
        with pytest.raises(UsageError) as conflict:
            await asyncio.to_thread(commands.scale, "job", "team", 3)
        assert conflict.value.hint == "it was changed meanwhile: try again"
