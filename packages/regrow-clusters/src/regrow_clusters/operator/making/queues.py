"""Findings on a job's queue: if it does not exist or is closed, pods wait for ever, and only regrow reports why."""

from typing import Final

from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi
from regrow_clusters.operator.observed.observing import JobReading
from regrow_clusters.operator.resource import TrainingJob
from regrow_clusters.operator.status import JobFinding

_FOUND: Final = JobFinding("QueueFound", True, "Found")
_LISTED: Final = "kubectl get queues.scheduling.volcano.sh"


async def queue_findings(api: ClusterApi, job: TrainingJob, reading: JobReading) -> list[JobFinding]:
    """Findings on the queue of a job whose gang waits for it; none if the queue's state is unknown."""
    if reading.over or job.spec.suspend:
        return []
    short = reading.waiting and reading.running < job.spec.replica_count
    if (reading.started and not short) or job.spec.backend not in ("kueue", "volcano"):
        return _mended(job)
    if job.spec.backend == "kueue" and job.spec.kueue is not None and reading.waiting:
        return await _local_queue(api, job, job.spec.kueue.queue_name)
    if job.spec.backend == "volcano":
        return await _volcano_queue(api, "" if job.spec.volcano is None else job.spec.volcano.queue_name)
    return []


def _mended(job: TrainingJob) -> list[JobFinding]:
    """Resolve a finding on a queue that is not checked any more: the gang runs, or its backend has no queue."""
    found = next((each for each in job.status.conditions if each.type == "QueueFound"), None)
    if found is None or found.status == "True":
        return []
    waited = job.spec.backend in ("kueue", "volcano")
    return [_FOUND if waited else JobFinding("QueueFound", True, "NoQueue", f"backend {job.spec.backend} has no queue")]


async def _local_queue(api: ClusterApi, job: TrainingJob, name: str) -> list[JobFinding]:
    try:
        await api.get(ApiKind.LOCAL_QUEUES, job.namespace, name)
    except ApiFailure as failure:
        if failure.reason != "NotFound":
            return []  # no right to read it, or a Kueue that does not serve this version: unknown
        text = f"spec.kueue.queueName is {name!r}: namespace {job.namespace} has no such LocalQueue; make it"
        return [JobFinding("QueueFound", False, "NoSuchQueue", f"{text}, or name one of kubectl get localqueues")]
    return [_FOUND]


async def _volcano_queue(api: ClusterApi, name: str) -> list[JobFinding]:
    """Check Volcano's queue. Volcano must be installed even if no queue is named: it then chooses one by namespace."""
    try:
        found = await api.get(ApiKind.QUEUES, "", name or "default")
    except ApiFailure as failure:
        if failure.unserved:
            text = "spec.backend is volcano, and the cluster has no Queues of scheduling.volcano.sh/v1beta1"
            return [JobFinding("QueueFound", False, "NoVolcano", f"{text}; install Volcano, or set another backend")]
        if failure.reason != "NotFound" or not name:
            return []
        text = f"spec.volcano.queueName is {name!r}: the cluster has no such Queue; make it"
        return [JobFinding("QueueFound", False, "NoSuchQueue", f"{text}, or name one of {_LISTED}")]
    state = (found.get("status") or {}).get("state", "Open")
    if name and state in ("Closed", "Closing"):
        text = f"spec.volcano.queueName is {name!r}, which is {state}: open it, or name another one of {_LISTED}"
        return [JobFinding("QueueFound", False, "QueueClosed", text)]
    return [_FOUND]
