"""Events on a job, as kubectl describe shows them. Pure."""

import hashlib
from typing import Any

from regrow.core.ids import Instant
from regrow_clusters.operator.resource import GROUP, KIND, VERSION, TrainingJob
from regrow_clusters.operator.status import stamp


def warning(job: TrainingJob, reason: str, message: str, now: Instant) -> dict[str, Any]:
    """One event; the same words at the same second are the same event."""
    at = stamp(now)
    mark = hashlib.sha256(f"{job.uid} {reason} {message} {at}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{mark}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": "Warning",
        "reason": reason,
        "message": message[:1024],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": "regrow-operator"},
        "reportingComponent": "regrow-operator",
        "reportingInstance": "",
    }
