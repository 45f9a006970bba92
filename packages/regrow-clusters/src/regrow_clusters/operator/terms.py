"""A gang's terms: the part of the specification that its commands contain, fixed until its restart. Pure.

A running coordinator cannot take other sizes, another port or another script. So an edit takes effect at once if the
running gang can follow it, and else at the gang's next start (decision 0085).
"""

from typing import Any, Final

import msgspec

from regrow_clusters.cluster.sizes import allowed_sizes
from regrow_clusters.operator.resource import TrainingJob, TrainingJobSpec

_SIZES: Final = ("replicaCount", "maxReplicaCount", "replicaIncrementStep", "replicaDiscreteValues")
_PASSED_ON: Final = (
    *("podsPerReplica", "ranksPerPod", "replicaRanks", "domainLabel", "topologyLabels"),
    *("script", "runFlags", "checkpointDir", "port", "backend", "kueue", "volcano"),
)


def terms_of(spec: TrainingJobSpec) -> dict[str, Any]:
    """Terms of a gang that is started with this specification; defaults are left out."""
    given = msgspec.to_builtins(spec)
    return {name: given[name] for name in (*_SIZES, *_PASSED_ON) if name in given}


def by_its_terms(job: TrainingJob) -> TrainingJob:
    """The job with the specification that its running gang can follow; `edited` names the fields that must wait."""
    if not job.status.terms:
        return job
    asked = msgspec.to_builtins(job.spec)
    started = _started(job)
    if started is None:
        return job
    had = msgspec.to_builtins(started)
    sizes, most = job.spec.elastic(), started.elastic()
    follows = sizes.replica_count == most.replica_count and set(allowed_sizes(sizes)) <= set(allowed_sizes(most))
    kept = _PASSED_ON if follows else (*_SIZES, *_PASSED_ON)
    edited = [name for name in kept if asked.get(name) != had.get(name)]
    if not edited:
        return msgspec.structs.replace(job, started=most)
    spec = {name: value for name, value in asked.items() if name not in kept}
    spec |= {name: had[name] for name in kept if name in had}
    if not follows:  # a smaller number of replicas is still possible
        spec["replicas"] = min(job.spec.replicas, max(sizes.max_replica_count, most.replica_count))
        if sizes.max_replica_count < most.max_replica_count and sizes.replica_count == most.replica_count:
            edited = [name for name in edited if name != "maxReplicaCount"] or edited
    followed = msgspec.convert(spec, TrainingJobSpec)
    return msgspec.structs.replace(job, spec=followed, started=most, edited=tuple(edited))


def edits_text(job: TrainingJob) -> str:
    """Text on edits that do not count yet: the values in force, and the cure. Empty: all edits count."""
    if not job.edited:
        return ""
    fields = ", ".join(f"spec.{name}" for name in job.edited)
    verb = "counts" if len(job.edited) == 1 else "count"
    had = "; ".join(f"{name}: {_short(job.status.terms.get(name))}" for name in job.edited)
    text = f"{fields} {verb} when the gang starts anew; until then it goes on with what it was started with ({had})"
    return f"{text}; set spec.suspend to true, and to false when all pods are gone, to have it now"


def _started(job: TrainingJob) -> TrainingJobSpec | None:
    try:
        return msgspec.convert({"template": {}, **job.status.terms}, TrainingJobSpec)
    except msgspec.ValidationError:
        return None  # damaged, or written by another version: the specification is used instead


def _short(value: Any) -> str:
    text = "its default" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
