"""All that regrow writes into a cluster is valid by Kubernetes' own published schemas, without a field too many."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.fake_store import FakeStore
from tests.cluster.jobs import training_job
from tests.cluster.scheduled_operator import StoreApi

from regrow_clusters.operator.backends import backend_of
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.events import JobNews, event
from regrow_clusters.operator.leadership import Leadership
from regrow_clusters.operator.manifests import as_text, manifests
from regrow_clusters.operator.nodes import AvoidedNodeMark, marking, with_condition
from regrow_clusters.operator.objects import ReplicaPlace, budget, pods, secret, service
from regrow_clusters.operator.resource import LEASE_NAME, TrainingJob, read_job

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -r requirements-dev.txt")
OLDEST, NEWEST = "1.28", "1.37"
KUEUE = {"queueName": "q", "priorityClass": "high", "requiredTopology": "rack"}


def job(**spec: Any) -> TrainingJob:
    found = training_job(**spec)
    found["metadata"]["uid"] = "0123456789abcdef"
    return read_job(found)


def written() -> dict[str, dict[str, Any]]:
    """One of each kind, by a name for people."""
    made = job(priorityClassName="training", elasticPriorityClassName="elastic", backend="kueue", kueue=KUEUE)
    of_job = pods(made, ReplicaPlace(0, 1, begins=True), ("n1", "n2"))
    backend_of(made).dress(made, of_job, group="g", total=2, gang=True)
    placed = job(backend="volcano")
    of_volcano = pods(placed, ReplicaPlace(0, 1, begins=True), ())
    backend_of(placed).dress(placed, of_volcano, group="g", total=2, gang=True)
    bare = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "spec": {}, "status": {}}
    (node,), _ = marking([bare], {"n1": AvoidedNodeMark("gpu0: xid 79", 5.0)}, 0.0)
    found = {
        "pod": of_job[0],
        "pod of Volcano's": of_volcano[0],
        "service": service(made),
        "secret": secret(made, b"key"),
        "budget": budget(made),
        "event": event(made, JobNews("NodeAvoided", "n1", warns=True), 0.0),
        "node": with_condition(node, AvoidedNodeMark("gpu0: xid 79", 5.0), 0.0),
    }
    for number, each in enumerate(manifests(namespace="regrow-system", image="regrow:1", mark_nodes=True)):
        found[f"{number} {each['kind']}"] = each
    return found


def given() -> list[dict[str, Any]]:
    """Objects of Kubernetes' own kinds in the files of deploy/."""
    files = sorted((Path(__file__).parents[3] / "deploy" / "quota").glob("*.yaml"))
    found = [each for file in files for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))]
    return [each for each in found if each["apiVersion"] in ("v1", "apps/v1", "scheduling.k8s.io/v1")]


@pytest.mark.parametrize("body", given(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_what_is_given_as_an_example_is_valid(body: dict[str, Any]) -> None:
    kubernetes_validate.validate(body, NEWEST, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", written())
def test_what_is_written_is_valid(name: str, version: str) -> None:
    kubernetes_validate.validate(written()[name], version, strict=True)


def test_volcanos_groups_have_fields_of_its_crd_alone() -> None:
    """Fields of config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml in volcano-sh/volcano (August 2026)."""
    made = job(
        backend="volcano",
        volcano={"queueName": "q"},
        maxReplicaCount=3,
        priorityClassName="training",
        elasticPriorityClassName="elastic",
    )
    gang, more = (body for _, body in backend_of(made).groups(made))
    for each, least in ((gang, 2), (more, 1)):
        assert (each["apiVersion"], each["kind"]) == ("scheduling.volcano.sh/v1beta1", "PodGroup")
        assert set(each["spec"]) == {"minMember", "queue", "priorityClassName"} and each["spec"]["minMember"] == least
        assert [owner["kind"] for owner in each["metadata"]["ownerReferences"]] == ["TrainingJob"]
    ((_, alone),) = backend_of(job(backend="volcano")).groups(job(backend="volcano"))
    assert alone["spec"] == {"minMember": 2}


def test_a_gang_of_kubernetes_own_is_valid_and_so_are_its_pods() -> None:
    made = job(backend="gang", priorityClassName="training")
    ((_, group),) = backend_of(made).groups(made)
    kubernetes_validate.validate(group, NEWEST, strict=True)
    of_gang = pods(made, ReplicaPlace(0, 1, begins=True), ())
    backend_of(made).dress(made, of_gang, group="g", total=2, gang=True)
    kubernetes_validate.validate(of_gang[0], NEWEST, strict=True)
    assert of_gang[0]["spec"]["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}


async def test_the_lease_is_valid_when_it_is_taken_and_when_it_is_given_back() -> None:
    store = FakeStore(time.time)
    leadership = Leadership(StoreApi(store), namespace="team", identity="a")
    for act in (leadership.acquire, leadership.release):
        await act()
        lease = store.get("leases", "team", LEASE_NAME)
        kubernetes_validate.validate(lease, NEWEST, strict=True)
    assert "holderIdentity" not in lease["spec"]


def test_what_is_not_valid_would_be_seen() -> None:
    spoiled = copy.deepcopy(written()["pod"])
    spoiled["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(spoiled, NEWEST, strict=True)
    wrong = crd()
    wrong["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["typ"] = "object"
    with pytest.raises(kubernetes_validate.ValidationError, match="typ"):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_what_is_printed_is_what_is_valid() -> None:
    documents = [json.loads(each) for each in as_text(manifests(namespace="a", image="b")).split("---\n")[1:]]
    assert documents == manifests(namespace="a", image="b")


def test_the_crd_has_nothing_that_the_server_drops_so_an_apply_again_changes_nothing() -> None:
    def empty(node: Any, path: str = "") -> list[str]:
        if isinstance(node, list):
            return [found for number, each in enumerate(node) for found in empty(each, f"{path}[{number}]")]
        if not isinstance(node, dict):
            return []
        found = [f"{path}.{key}" for key, value in node.items() if key in ("required", "enum") and value == []]
        return found + [each for key, value in node.items() for each in empty(value, f"{path}.{key}")]

    assert empty(crd()) == []
