"""`regrow k8s`: control of a cluster's jobs from a terminal, through the same objects that kubectl shows."""

import asyncio
import difflib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from regrow.core.errors import UsageError
from regrow_clusters.operator.api import ApiFailure, ApiKind, Manifest
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.lightkube_api import LightkubeApi, misspelt_field
from regrow_clusters.operator.objects import JOB_LABEL
from regrow_clusters.operator.observed.pod_seen import read_pod, training_container
from regrow_clusters.operator.resource import GROUP, KIND, VERSION, SpecRefused, TrainingJob, read_job, read_status

Say = Callable[[str], None]

_CURES = {
    401: "log in to the cluster again",
    403: "ask for the right to do this in the namespace",
    404: "is the name right, and the CRD installed (regrow operator manifests | kubectl apply -f -)?",
    409: "it was changed meanwhile: try again",
}
_TAKEN = "give it another name, or kubectl delete the one that is there"


def submit(path: Path, namespace: str) -> str:
    """Create the job that a file describes; returns a report. Raises `UsageError`, which names field and cure."""
    body = _read(path)
    body["metadata"].setdefault("namespace", namespace)
    check_manifest(body, str(path), namespace=body["metadata"]["namespace"] or "default")

    async def make(api: LightkubeApi) -> Manifest:
        body["metadata"]["namespace"] = body["metadata"]["namespace"] or api.namespace
        return await api.create(ApiKind.JOBS, body)

    made = _asked(make)["metadata"]
    return f"job {made['namespace']}/{made['name']} is there; kubectl get tj {made['name']} -n {made['namespace']}"


def check_manifest(body: Manifest, where: str, *, namespace: str) -> None:
    """Check a job's manifest. Raises `UsageError` for fields that the cluster would refuse or silently drop."""
    if (body.get("apiVersion"), body.get("kind")) != (f"{GROUP}/{VERSION}", KIND):
        raise UsageError(f"{where} is no {KIND}", hint=f"write apiVersion: {GROUP}/{VERSION} and kind: {KIND}")
    _check_fields(
        body.get("spec"), crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"], where
    )
    if found := misspelt_field((body.get("spec") or {}).get("template")):
        raise UsageError(f"{where}: {found[0]} is no field of a pod", hint=f"did you mean {found[1]}?")
    try:
        read_job({**body, "metadata": {"uid": "", "namespace": namespace, **body["metadata"]}})
    except SpecRefused as refusal:
        raise UsageError(f"{where}: {refusal}") from refusal


def _check_fields(given: Any, schema: Manifest, where: str, path: str = "spec") -> None:
    known = schema.get("properties")
    if not isinstance(given, dict) or known is None:
        return
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"kubectl explain tj.{path} lists the fields"
            raise UsageError(f"{where}: {path}.{name} is no field of a {KIND}", hint=hint)
        _check_fields(value, known[name], where, f"{path}.{name}")


def status_lines(name: str, namespace: str) -> list[str]:
    """Describe a job's state for people."""
    found = _asked(lambda api: api.get(ApiKind.JOBS, namespace or api.namespace, name))
    status = read_status(found)
    lines = [
        f"{found['metadata']['namespace']}/{name}: {status.phase or 'not looked at yet'}",
        f"replicas: {status.replicas}, wanted {status.desired_replicas}, waiting {status.pending_replicas}",
    ]
    if status.step is not None:
        goodput = "" if status.goodput is None else f", goodput {status.goodput:.0%}"
        lines.append(f"step {status.step}, incidents {status.incidents or 0}{goodput}, when it was last asked")
    lines.extend(f"{each.type}: {each.status} ({each.message or each.reason})" for each in status.conditions)
    lines.extend(f"avoided: {each.name} ({each.reason})" for each in status.bad_nodes)
    return lines


def scale(name: str, namespace: str, replicas: int) -> str:
    """Request another size of a job; returns the report for the user. Raises `UsageError` if it is not allowed."""

    async def change(api: LightkubeApi) -> Manifest:
        found = await api.get(ApiKind.JOBS, namespace or api.namespace, name)
        spec = read_job(found).spec.elastic()
        if not spec.replica_count <= replicas <= spec.max_replica_count:
            text = f"--replicas {replicas}: job {name} can have {spec.replica_count} to {spec.max_replica_count}"
            raise UsageError(text, hint="change spec.replicaCount or spec.maxReplicaCount first")
        return await api.replace(ApiKind.JOBS, {**found, "spec": {**found["spec"], "replicas": replicas}})

    made = _asked(change)["metadata"]
    return f"job {made['namespace']}/{name} is to have {replicas} replicas"


def logs(
    name: str, namespace: str, *, replica: int | None, node: int | None, follow: bool, tail: int | None, say: Say
) -> None:
    """Pass the log lines of a job's pod, by default pod 0, to `say`. Raises `UsageError` if there is no such pod."""

    async def read(api: LightkubeApi) -> Manifest:
        here = namespace or api.namespace
        found = await api.get(ApiKind.JOBS, here, name)
        try:
            job = read_job(found)
        except SpecRefused as refusal:
            raise UsageError(f"job {name} cannot run as it is: {refusal}") from refusal
        pods = await api.pods_of(here, name)
        pod = chosen_pod(pods, job, replica=replica, node=node)
        container = next(training_container(each).get("name", "") for each in pods if each["metadata"]["name"] == pod)
        silent = True
        async for line in api.log(here, pod, container, follow=follow, tail=tail):
            say(line)
            silent = False
        if silent:
            raise UsageError(f"pod {pod} has no output yet", hint=f"kubectl describe pod {pod} -n {here} says why")
        return {}

    _asked(read)


def chosen_pod(pods: Sequence[Manifest], job: TrainingJob, *, replica: int | None, node: int | None) -> str:
    """Name of the pod at a place; of several, the one created last. Raises `UsageError` if there is none."""
    each = job.spec.pods_per_replica
    if node is not None:
        node_ranks = job.status.node_ranks
        replica, index = divmod(node_ranks.index(node) if node in node_ranks else node, each)
        what = f"node {node}"
    else:
        replica, index = replica or 0, 0
        what = f"replica {replica}"
    most = job.spec.elastic().max_replica_count
    if replica >= most:
        has = f"replicas 0 to {most - 1}" if node is None else f"nodes 0 to {most * each - 1}"
        raise UsageError(f"job {job.name} has no {what}", hint=f"it can have {has}")
    seen = [pod for pod in map(read_pod, pods) if pod is not None and pod.owner == job.uid and pod.place == replica]
    names = {pod.name: pod for pod in seen if each == 1 or pod.name.endswith(f"-{index}")}
    if not names:
        raise UsageError(
            f"job {job.name} has no pod for {what} now", hint=f"kubectl get pods -l {JOB_LABEL}={job.name}"
        )
    return max(names, key=lambda found: (names[found].attempt, names[found].created, found))


def _read(path: Path) -> Manifest:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("metadata"), dict) or not found["metadata"].get("name"):
        raise UsageError(f"{path} names no object", hint="it needs metadata.name; docs/kubernetes.md has an example")
    return msgspec.convert(found, dict[str, Any])


def _asked(ask: Callable[[LightkubeApi], Coroutine[Any, Any, Manifest]]) -> Manifest:
    async def go() -> Manifest:
        async with LightkubeApi() as api:
            return await ask(api)

    try:
        return asyncio.run(go())
    except ApiFailure as failure:
        cure = _TAKEN if failure.reason == "AlreadyExists" else _CURES.get(failure.code, "")
        raise UsageError(f"the cluster reports: {failure}", hint=cure) from failure
