"""Rules of an API server on which the operator relies, each case with its source in Kubernetes' documentation.

Against the fake one, or a real one: `REGROW_TEST_KUBECONFIG=~/.kube/config`, with the CRD installed, and a namespace
`team` or the one that `REGROW_TEST_NAMESPACE` says; `tests/cluster/real` makes both.

* CONVENTIONS: github.com/kubernetes/community, contributors/devel/sig-architecture/api-conventions.md
* CONCEPTS: kubernetes.io/docs/reference/using-api/api-concepts
* CRDS: kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions
* PODS: kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle
* META: kubernetes.io/docs/reference/kubernetes-api/common-definitions/object-meta
* DELETION: kubernetes.io/docs/reference/kubernetes-api/common-definitions/delete-options
* COLLECTION: kubernetes.io/docs/concepts/architecture/garbage-collection
"""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from lightkube import KubeConfig
from tests.cluster.fake_api import FakeApi, serve
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import FakeStore
from tests.cluster.jobs import training_job

from regrow_clusters.operator.api import ApiFailure, ApiKind, Manifest
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.lightkube_api import LightkubeApi

REAL = os.environ.get("REGROW_TEST_KUBECONFIG", "")
NAMESPACE = os.environ.get("REGROW_TEST_NAMESPACE", "team")
PATIENCE = 60.0


def a_job(name: str, **spec: Any) -> Manifest:
    return training_job(name, NAMESPACE, **spec)


class Server:
    """One API server and a client of it. `fake`: its inside, where it is ours."""

    def __init__(self, api: LightkubeApi, fake: FakeApi | None) -> None:
        self.api = api
        self.fake = fake


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    if REAL:
        async with LightkubeApi(KubeConfig.from_file(REAL).get()) as api:
            yield Server(api, None)
        return
    store = FakeStore(time.time)
    store.install(crd())
    fake = FakeApi(store)
    async with serve(fake) as address, LightkubeApi(KubeConfig.from_dict(json.loads(kubeconfig(address))).get()) as api:
        collecting = asyncio.create_task(_collect(store))
        yield Server(api, fake)
        collecting.cancel()


async def _collect(store: FakeStore) -> None:
    while True:
        store.collect()
        await asyncio.sleep(0.02)


def pod(name: str, **labels: str) -> Manifest:
    labels = {"app.kubernetes.io/managed-by": "regrow", **labels}
    spec = {"containers": [{"name": "main", "image": "registry.k8s.io/pause:3.9"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {**spec, "schedulingGates": [{"name": "regrow.dev/never"}]},
    }


async def refused(asked: Any) -> ApiFailure:
    with pytest.raises(ApiFailure) as caught:
        await asked
    return caught.value


async def test_a_new_object_has_an_identity_a_version_a_generation_and_a_time(server: Server) -> None:
    """CONVENTIONS, Metadata."""
    made = (await server.api.create(ApiKind.JOBS, a_job("born")))["metadata"]
    assert (
        made["uid"] and made["resourceVersion"] and made["generation"] == 1 and made["creationTimestamp"].endswith("Z")
    )
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "born")


async def test_a_name_is_taken_until_its_object_is_gone(server: Server) -> None:
    """CONVENTIONS, HTTP Status codes: 409 StatusConflict, reason AlreadyExists; 404 StatusNotFound."""
    await server.api.create(ApiKind.PODS, pod("once"))
    again = await refused(server.api.create(ApiKind.PODS, pod("once")))
    assert (again.conflict, again.reason) == (True, "AlreadyExists")
    await server.api.delete(ApiKind.PODS, NAMESPACE, "once")
    assert (await refused(server.api.get(ApiKind.PODS, NAMESPACE, "once"))).missing


async def test_who_writes_what_another_has_written_since_is_refused(server: Server) -> None:
    """CONVENTIONS, Concurrency Control and Consistency: 409 for a stale resourceVersion."""
    first = await server.api.create(ApiKind.JOBS, a_job("stale"))
    await server.api.replace_status(ApiKind.JOBS, {**first, "status": {"phase": "Pending"}})
    failure = await refused(server.api.replace_status(ApiKind.JOBS, {**first, "status": {"phase": "Training"}}))
    assert (failure.conflict, failure.reason) == (True, "Conflict")
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "stale")


async def test_status_and_spec_are_written_apart_and_generation_counts_the_spec_alone(server: Server) -> None:
    """CRDS, Status subresource."""
    made = await server.api.create(ApiKind.JOBS, {**a_job("parts"), "status": {"phase": "ignored"}})
    assert "phase" not in (made.get("status") or {})
    spec = {**made["spec"], "replicas": 1}
    told = await server.api.replace_status(ApiKind.JOBS, {**made, "spec": spec, "status": {"phase": "Pending"}})
    assert told["spec"] == made["spec"] and told["metadata"]["generation"] == 1
    asked = await server.api.replace(ApiKind.JOBS, {**told, "spec": spec, "status": {"phase": "Other"}})
    assert asked["status"]["phase"] == "Pending" and asked["metadata"]["generation"] == 2
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "parts")


async def test_defaults_are_filled_in_unknown_fields_pruned_and_impossible_values_refused_by_their_field(
    server: Server,
) -> None:
    """CRDS, Validation, Defaulting, Field pruning."""
    made = await server.api.create(ApiKind.JOBS, a_job("fits", colour="red"))
    assert "colour" not in made["spec"]
    assert made["spec"]["replicaIncrementStep"] == 1 and made["spec"]["template"]["spec"]["containers"]
    failure = await refused(server.api.create(ApiKind.JOBS, a_job("unfit", replicaCount=0)))
    assert failure.refused and "spec.replicaCount" in str(failure)
    failure = await refused(server.api.create(ApiKind.JOBS, a_job("unfit", backend="other")))
    assert failure.refused and "spec.backend" in str(failure)
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "fits")


async def test_a_watch_from_a_list_tells_every_change_after_it_once_and_in_order(server: Server) -> None:
    """CONCEPTS, Efficient detection of changes."""
    _, version = await server.api.list(ApiKind.PODS)
    heard: list[tuple[str, str]] = []

    async def listen() -> None:
        async for what, found in server.api.watch(ApiKind.PODS, version):
            if found["metadata"]["name"].startswith("told"):
                heard.append((what, found["metadata"]["name"]))
                if what == "DELETED":
                    return

    listening = asyncio.create_task(listen())
    await server.api.create(ApiKind.PODS, pod("told-1"))
    await server.api.create(ApiKind.PODS, pod("told-2"))
    await server.api.delete(ApiKind.PODS, NAMESPACE, "told-1")
    await asyncio.wait_for(listening, PATIENCE)
    assert [each for each in heard if each[0] != "MODIFIED"] == [
        ("ADDED", "told-1"),
        ("ADDED", "told-2"),
        ("DELETED", "told-1"),
    ]
    await server.api.delete(ApiKind.PODS, NAMESPACE, "told-2")


async def test_what_comes_into_a_selector_is_added_and_what_leaves_it_is_deleted(server: Server) -> None:
    """CONCEPTS, Watch with selectors: an object that no longer matches is sent as DELETED."""
    made = await server.api.create(ApiKind.PODS, pod("moves"))
    items, version = await server.api.list(ApiKind.PODS)
    assert "moves" in [each["metadata"]["name"] for each in items]

    async def first() -> str:
        async for what, found in server.api.watch(ApiKind.PODS, version):
            if found["metadata"]["name"] == "moves" and what != "MODIFIED":
                return what
        return ""

    listening = asyncio.create_task(first())
    made = await server.api.get(ApiKind.PODS, NAMESPACE, "moves")
    other = {**made["metadata"], "labels": {"app.kubernetes.io/managed-by": "another"}}
    await server.api.replace(ApiKind.PODS, {**made, "metadata": other})
    assert await asyncio.wait_for(listening, PATIENCE) == "DELETED"
    await server.api.delete(ApiKind.PODS, NAMESPACE, "moves")


async def test_a_pod_without_a_node_is_gone_at_once_when_it_is_deleted(server: Server) -> None:
    """PODS, Termination of Pods: only where a kubelet runs it there is a grace."""
    await server.api.create(ApiKind.PODS, pod("waits"))
    await server.api.delete(ApiKind.PODS, NAMESPACE, "waits")
    assert (await refused(server.api.get(ApiKind.PODS, NAMESPACE, "waits"))).missing


@pytest.mark.skipif(bool(REAL), reason="asks the fake server to forget its history and to bind a pod")
async def test_too_old_a_version_cannot_be_watched_and_a_bound_pod_gets_its_grace(server: Server) -> None:
    """CONCEPTS, 410 Gone responses; PODS, Termination of Pods."""
    assert server.fake is not None
    store = server.fake.store
    _, version = await server.api.list(ApiKind.PODS)
    await server.api.create(ApiKind.PODS, pod("bound"))
    store.compact()

    async def watch() -> None:
        async for _ in server.api.watch(ApiKind.PODS, str(int(version) or 1)):
            pass

    await server.api.create(ApiKind.PODS, pod("later"))
    store.compact()
    assert (await refused(watch())).expired
    made = store.get("pods", NAMESPACE, "bound")
    store.replace("pods", NAMESPACE, "bound", {**made, "spec": {**made["spec"], "nodeName": "n1"}})
    await server.api.delete(ApiKind.PODS, NAMESPACE, "bound")
    leaving = await server.api.get(ApiKind.PODS, NAMESPACE, "bound")
    assert leaving["metadata"]["deletionGracePeriodSeconds"] == 30
    await server.api.delete(ApiKind.PODS, NAMESPACE, "bound", force=True)
    assert (await refused(server.api.get(ApiKind.PODS, NAMESPACE, "bound"))).missing


async def test_a_pod_without_a_node_has_said_nothing(server: Server) -> None:
    """kubernetes/kubernetes, pkg/registry/core/pod/strategy.go, LogLocation: no node, an empty answer."""
    await server.api.create(ApiKind.PODS, pod("silent"))
    assert [line async for line in server.api.log(NAMESPACE, "silent", "main", follow=False, tail=None)] == []
    await server.api.delete(ApiKind.PODS, NAMESPACE, "silent")


async def test_a_log_is_one_containers_and_none_is_chosen_where_there_are_several(server: Server) -> None:
    """API reference, GET .../pods/NAME/log: `container` defaults to the only one, if there is one in the pod."""
    body = pod("several")
    body["spec"]["containers"] = [{"name": name, "image": "x"} for name in ("x", "y")]
    await server.api.create(ApiKind.PODS, body)
    for container, says in (("", "must be specified for pod several, choose one of: [x y]"), ("z", "z is not valid")):
        with pytest.raises(ApiFailure, match=re.escape(says)) as caught:
            _ = [line async for line in server.api.log(NAMESPACE, "several", container, follow=False, tail=None)]
        assert caught.value.code == 400
    assert [line async for line in server.api.log(NAMESPACE, "several", "y", follow=False, tail=None)] == []
    await server.api.delete(ApiKind.PODS, NAMESPACE, "several")


async def test_what_a_job_owns_goes_with_it_and_what_another_of_its_name_owned_does_not_come_back(
    server: Server,
) -> None:
    """COLLECTION, Owner references: by uid, not by name; in the background."""
    made = (await server.api.create(ApiKind.JOBS, a_job("owner")))["metadata"]
    owner = {"apiVersion": "regrow.dev/v1alpha1", "kind": "TrainingJob", "name": "owner", "uid": made["uid"]}
    body = pod("owned")
    body["metadata"]["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    await server.api.create(ApiKind.PODS, body)
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "owner")
    again = (await server.api.create(ApiKind.JOBS, a_job("owner")))["metadata"]
    assert again["uid"] != made["uid"]
    async with asyncio.timeout(PATIENCE):
        while not await _missing(server, ApiKind.PODS, "owned"):
            await asyncio.sleep(0.05)
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "owner")


async def _missing(server: Server, kind: ApiKind, name: str) -> bool:
    try:
        await server.api.get(kind, NAMESPACE, name)
    except ApiFailure as failure:
        return failure.missing
    return False


async def test_versions_rise_and_the_end_of_an_object_has_a_later_one_than_its_last_change(server: Server) -> None:
    """META, resourceVersion; CONCEPTS, Resource versions: of one kind they can be compared (Kubernetes 1.35)."""
    made = await server.api.create(ApiKind.PODS, pod("ages"))
    version = made["metadata"]["resourceVersion"]

    async def end() -> int:
        async for what, found in server.api.watch(ApiKind.PODS, version):
            if what == "DELETED" and found["metadata"]["name"] == "ages":
                return int(found["metadata"]["resourceVersion"])
        return 0

    listening = asyncio.create_task(end())
    labels = {**made["metadata"]["labels"], "more": "yes"}
    changed = await server.api.replace(ApiKind.PODS, {**made, "metadata": {**made["metadata"], "labels": labels}})
    await server.api.delete(ApiKind.PODS, NAMESPACE, "ages")
    assert int(version) < int(changed["metadata"]["resourceVersion"]) < await asyncio.wait_for(listening, PATIENCE)


async def test_a_list_in_pages_has_everything_and_one_version(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONCEPTS, Retrieving large results sets in chunks."""
    monkeypatch.setattr("regrow_clusters.operator.lightkube_api._PAGE", 2)
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        await server.api.create(ApiKind.PODS, pod(name))
    items, version = await server.api.list(ApiKind.PODS)
    found = [each["metadata"]["name"] for each in items]
    assert sorted(set(names) & set(found)) == names and len(found) == len(set(found))
    assert int(version) >= max(int(each["metadata"]["resourceVersion"]) for each in items)
    for name in names:
        await server.api.delete(ApiKind.PODS, NAMESPACE, name)


async def test_a_null_in_a_status_is_dropped_and_refused_where_the_field_must_be(server: Server) -> None:
    """CRDS, Defaulting and Nullable: nulls for fields that are not `nullable` are pruned before defaulting."""
    made = await server.api.create(ApiKind.JOBS, a_job("null"))
    try:
        told = await server.api.replace_status(ApiKind.JOBS, {**made, "status": {"step": None, "phase": "Training"}})
        assert told["status"]["phase"] == "Training" and "step" not in told["status"]
        condition = {"type": None, "status": "True", "reason": "x"}
        failure = await refused(
            server.api.replace_status(ApiKind.JOBS, {**told, "status": {"conditions": [condition]}})
        )
        assert failure.refused and "status.conditions[0].type" in str(failure)
    finally:
        await server.api.delete(ApiKind.JOBS, NAMESPACE, "null")


async def test_a_finalizer_keeps_a_deleted_object_until_it_is_taken_away(server: Server) -> None:
    """kubernetes.io/docs/concepts/overview/working-with-objects/finalizers; PODS, Termination of Pods, Forced."""
    body = pod("kept")
    body["metadata"]["finalizers"] = ["example.com/x", "example.com/y"]
    await server.api.create(ApiKind.PODS, body)
    await server.api.delete(ApiKind.PODS, NAMESPACE, "kept", force=True)
    for name in ("example.com/x", "example.com/none", "example.com/y"):
        meta = (await server.api.get(ApiKind.PODS, NAMESPACE, "kept"))["metadata"]
        assert meta["deletionTimestamp"] and meta["deletionGracePeriodSeconds"] == 0
        await server.api.drop_finalizer(ApiKind.PODS, NAMESPACE, "kept", name, uid="another")
        assert (await server.api.get(ApiKind.PODS, NAMESPACE, "kept"))["metadata"] == meta
        await server.api.drop_finalizer(ApiKind.PODS, NAMESPACE, "kept", name, uid=meta["uid"])
    assert await _missing(server, ApiKind.PODS, "kept")


@pytest.mark.parametrize("force", [False, True])
async def test_a_deletion_that_names_a_uid_leaves_another_object_of_the_name_as_it_is(
    server: Server, force: bool
) -> None:
    """DELETION, preconditions: "If not possible, a 409 Conflict status will be returned"."""
    first = (await server.api.create(ApiKind.PODS, pod("again")))["metadata"]["uid"]
    await server.api.delete(ApiKind.PODS, NAMESPACE, "again", uid=first)
    second = (await server.api.create(ApiKind.PODS, pod("again")))["metadata"]
    failure = await refused(server.api.delete(ApiKind.PODS, NAMESPACE, "again", uid=first, force=force))
    assert (failure.conflict, failure.reason) == (True, "Conflict")
    assert (await server.api.get(ApiKind.PODS, NAMESPACE, "again"))["metadata"] == second
    await server.api.delete(ApiKind.PODS, NAMESPACE, "again", uid=second["uid"], force=force)
    assert (await refused(server.api.delete(ApiKind.PODS, NAMESPACE, "again", uid=second["uid"]))).missing


async def test_a_patch_that_names_another_uid_is_not_valid(server: Server) -> None:
    """META, uid: "Populated by the system. Read-only"; as kubernetes' own controllers rely on it: 422 for a pod that is
    made again (pkg/controller/controller_ref_manager.go, ReleasePod)."""
    made = (await server.api.create(ApiKind.PODS, pod("noted")))["metadata"]
    failure = await refused(server.api.annotate(ApiKind.PODS, NAMESPACE, "noted", {"a": "b"}, uid="another"))
    assert (failure.code, failure.missing) == (422, True)
    noted = await server.api.annotate(ApiKind.PODS, NAMESPACE, "noted", {"a": "b"}, uid=made["uid"])
    assert noted["metadata"]["annotations"] == {"a": "b"}
    await server.api.delete(ApiKind.PODS, NAMESPACE, "noted")


async def test_jobs_leases_and_budgets_are_not_written_without_the_version_that_was_read(server: Server) -> None:
    """CONVENTIONS, Concurrency Control and Consistency; AllowUnconditionalUpdate of their strategies is false."""
    made = await server.api.create(ApiKind.JOBS, a_job("blind"))
    del made["metadata"]["resourceVersion"]
    failure = await refused(server.api.replace(ApiKind.JOBS, made))
    assert failure.code == 422 and "resourceVersion" in str(failure)
    await server.api.delete(ApiKind.JOBS, NAMESPACE, "blind")


async def test_a_term_about_a_nodes_name_has_one_value(server: Server) -> None:
    """kubernetes/kubernetes, pkg/apis/core/validation/validation.go, ValidateNodeFieldSelectorRequirement."""
    term = {"key": "metadata.name", "operator": "NotIn", "values": ["n1", "n2"]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [term]}]}}
    body = pod("kept-away")
    body["spec"]["affinity"] = {"nodeAffinity": required}
    failure = await refused(server.api.create(ApiKind.PODS, body))
    assert failure.code == 422 and "matchFields[0].values" in str(failure)


@pytest.mark.parametrize("name", ["7b", "v1.5"])
async def test_names_of_services_are_stricter_than_those_of_jobs(server: Server, name: str) -> None:
    """kubernetes.io/docs/concepts/services-networking/service: a valid RFC 1035 label name."""
    port = {"name": "coordinator", "port": 29400}
    meta = {"name": name, "namespace": NAMESPACE}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"clusterIP": "None", "ports": [port]}}
    try:
        await server.api.create(ApiKind.SERVICES, body)
    except ApiFailure as failure:
        assert failure.code == 422 and "metadata.name" in str(failure)
    else:
        await server.api.delete(ApiKind.SERVICES, NAMESPACE, name)
        if REAL and name == "7b":
            pytest.skip("names may begin with a digit on this server (RelaxedServiceNameValidation, from 1.36)")
        raise AssertionError("it was taken")


async def test_a_labels_value_has_63_characters_at_most(server: Server) -> None:
    """kubernetes.io/docs/concepts/overview/working-with-objects/labels: Syntax and character set."""
    failure = await refused(server.api.create(ApiKind.PODS, pod("long", told="x" * 64)))
    assert failure.code == 422 and "no more than 63" in str(failure)
