"""Manifests of a JobSet, or of Kubeflow Trainer's ClusterTrainingRuntime, in which a lost pod rejoins the job. Pure.

Fields and rules: github.com/kubernetes-sigs/jobset `api/jobset/v1alpha2/jobset_types.go` (0.12) and
github.com/kubeflow/trainer `pkg/apis/trainer/v1alpha1` (2.3); kubernetes.io/docs/concepts/workloads/controllers/job.
"""

import json
import re
from typing import Any, Final

import msgspec

from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN, SCRIPT_ERROR, UNPROVEN

PORT: Final = 29400
STEP: Final = "node"
"""Name of the replicated job and of its container, by which Kubeflow Trainer finds both."""
JOBSET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
"""Label of all pods of a JobSet."""
ANCESTOR: Final = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK: Final = "trainer.kubeflow.org/framework"
TOKEN_SECRET: Final = "regrow-token"
_GRACE_MARGIN: Final = 15
"""Seconds that a pod gets in addition to its node's grace, for the process itself to end."""
_ENDS: Final = (SCRIPT_ERROR, UNPROVEN)
"""Codes that end the whole job. A pod that returns while the job ends is refused with 2, which is not one of them."""
_UNREACHABLE_SECONDS: Final = 30
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


class GuestJob(msgspec.Struct, frozen=True):
    """Settings from which the manifests are made.

    `ranks`: workers in each pod, a number, `cpu`, `gpu` or `auto`; `lost_pods`: pods that may be lost by faults before
    the whole set restarts; `restarts`: most such restarts; `words`: flags of `regrow run`, the script, its arguments.
    """

    name: str
    image: str
    nodes: int = 2
    ranks: str = "1"
    replica_ranks: int = 1
    spares: int = 0
    gpus: int = 0
    grace: int = 30
    checkpoint_dir: str = ""
    lost_pods: int = 100
    restarts: int = 3
    words: tuple[str, ...] = ()


def jobset(job: GuestJob) -> dict[str, Any]:
    """Manifest of a JobSet. Raises `UsageError` if a name is not valid, or no image is given."""
    _check(job)
    own = {
        "nodes": str(job.nodes),
        "node-rank": "$(JOB_COMPLETION_INDEX)",
        "ranks": job.ranks,
        "rdzv-endpoint": f"{job.name}-{STEP}-0-0.{job.name}:{PORT}",
    }
    sizes = {"completions": job.nodes, "parallelism": job.nodes}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": _set(job, own, sizes, {}),
    }


def training_runtime(job: GuestJob) -> dict[str, Any]:
    """Manifest of a ClusterTrainingRuntime; a TrainJob adds the number of nodes, and the script by its `args`.

    Trainer's torch policy sets the sizes and the endpoint in the variables that torchrun reads.
    """
    _check(job)
    own = {
        "nodes": "$(PET_NNODES)",
        "node-rank": "$(PET_NODE_RANK)",
        "ranks": "$(PET_NPROC_PER_NODE)",
        "rdzv-endpoint": "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": job.name, "labels": {FRAMEWORK: "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": _set(job, own, {}, {ANCESTOR: "trainer"})},
        },
    }


def as_text(found: dict[str, Any]) -> str:
    """Text for `kubectl apply -f -`: JSON, which is YAML too."""
    return f"{json.dumps(found, indent=2)}\n"


def _check(job: GuestJob) -> None:
    if _NAME.fullmatch(job.name) is None:
        raise UsageError(
            f"{job.name!r} cannot name pods", hint="at most 40 small letters, digits and -, a letter first"
        )
    if not job.image:
        raise UsageError("no image is named", hint="give --image: it needs regrow, regrow-guests, torch and the script")


def _set(job: GuestJob, own: dict[str, str], sizes: dict[str, int], labels: dict[str, str]) -> dict[str, Any]:
    template: dict[str, Any] = {"spec": _job(job, own, sizes)}
    if labels:
        template["metadata"] = {"labels": labels}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [STEP]},
        "failurePolicy": {
            "maxRestarts": job.restarts,
            "rules": [
                {
                    "name": "notByStartingAgain",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [f"exit code {UNPROVEN}\\b"],
                }
            ],
        },
        "replicatedJobs": [{"name": STEP, "replicas": 1, "template": template}],
    }


def _job(job: GuestJob, own: dict[str, str], sizes: dict[str, int]) -> dict[str, Any]:
    """Job whose pods are replaced one by one; the training has succeeded when pod 0 ends with 0."""
    ends = {"containerName": STEP, "operator": "In", "values": list(_ENDS)}
    # Not bounded: a Job does not count ignored failures, and all other pods end so at each loss of pod 0.
    again = {"containerName": STEP, "operator": "In", "values": [RUN_AGAIN]}
    return {
        "completionMode": "Indexed",
        **sizes,
        "backoffLimit": job.lost_pods,
        "podReplacementPolicy": "Failed",  # never two pods for one node of the job
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": again},
                {"action": "FailJob", "onExitCodes": ends},
            ]
        },
        "template": {"spec": _pod(job, own)},
    }


def _pod(job: GuestJob, own: dict[str, str]) -> dict[str, Any]:
    flags = {"job": "$(JOBSET_NAME)", **own, "address": "$(POD_IP)", "grace": f"{job.grace}s"}
    if job.replica_ranks != 1:
        flags["replica-ranks"] = str(job.replica_ranks)
    if job.spares:
        flags["spares"] = str(job.spares)
    if job.checkpoint_dir:
        flags["checkpoint-dir"] = f"{job.checkpoint_dir.rstrip('/')}/$(JOBSET_NAME)"
    container = {
        "name": STEP,
        "image": job.image,
        "command": ["regrow", "guest", "pod", *(f"--{key}={text}" for key, text in flags.items()), "--"],
        **({"args": list(job.words)} if job.words else {}),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "JOBSET_NAME", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET_NAME}']"}}},
            {"name": "REGROW_TOKEN", "valueFrom": {"secretKeyRef": {"name": TOKEN_SECRET, "key": "token"}}},
            # Code of a pod that is released while the job goes on: with 0 it would count as finished.
            {"name": "REGROW_GIVEN_BACK_CODE", "value": str(RUN_AGAIN)},
        ],
        **({"resources": {"limits": {"nvidia.com/gpu": job.gpus}}} if job.gpus else {}),
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace + _GRACE_MARGIN,
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{key}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": _UNREACHABLE_SECONDS,
            }
            for key in ("not-ready", "unreachable")
        ],
        "containers": [container],
    }
