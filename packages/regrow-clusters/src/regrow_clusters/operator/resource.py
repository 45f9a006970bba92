"""The resource `TrainingJob`: one typed specification, from which the schema of the CRD is made. Pure."""

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from regrow.core.ids import Instant
from regrow_clusters.cluster.sizes import MOST_REPLICAS, ElasticSpec, SizeProblem, problems

GROUP: Final = "regrow.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "TrainingJob"
PLURAL: Final = "trainingjobs"
LEASE_NAME: Final = "regrow-operator"
MOST_NAME: Final = 40
"""Most characters of a job's name: pods are named after it, and a pod's host name has 63 characters at most."""
NAME_PATTERN: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"
"""Pattern of the names of services (RFC 1035), which are stricter than those of other objects."""
_LABEL: Final = r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"
DEFAULT_PORT: Final = 29400
BACKENDS: Final = ("none", "kueue", "volcano", "gang")

Count = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
Time = Annotated[float, Meta(ge=0)]


class KueueSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Admission by Kueue: the gang as one workload, each further replica as its own of a lower class."""

    queue_name: Annotated[str, Meta(min_length=1, description="The LocalQueue in the job's namespace.")]
    priority_class: Annotated[str, Meta(description="WorkloadPriorityClass of the gang.")] = ""
    elastic_priority_class: Annotated[
        str, Meta(description="WorkloadPriorityClass of the replicas beyond the gang; a lower one.")
    ] = ""
    required_topology: Annotated[str, Meta(description="Node label within one value of which a replica must be.")] = ""
    preferred_topology: Annotated[str, Meta(description="As requiredTopology, where that is possible.")] = ""


class VolcanoSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Scheduling by Volcano: the gang as one PodGroup, the replicas beyond it in another one, each pod by itself."""

    queue_name: Annotated[str, Meta(description="The Queue, of the cluster. Default: Volcano's own default.")] = ""


class TrainingJobSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Specification of a job."""

    replica_count: Annotated[
        Count,
        Meta(description="The gang: replicas with which the job starts at once; it never chooses to have fewer."),
    ]
    script: Annotated[
        list[str],
        Meta(min_length=1, description="The training script in the image and its arguments, as for regrow run."),
    ]
    template: Annotated[
        dict[str, Any],
        Meta(description="The pods' metadata and spec; regrow sets the command of the first container, which trains."),
    ]
    max_replica_count: Annotated[
        Count | None,
        Meta(description="Number of replicas to which the job grows when there is room. Default: replicaCount."),
    ] = None
    replicas: Annotated[
        Count,
        Meta(description="Requested replicas, set by kubectl scale; more than maxReplicaCount counts as that many."),
    ] = MOST_REPLICAS
    replica_increment_step: Annotated[Count, Meta(description="Sizes are replicaCount and whole steps above it.")] = 1
    replica_discrete_values: Annotated[
        list[Count], Meta(description="Instead of replicaIncrementStep: the only numbers of replicas there may be.")
    ] = []
    max_pending_replicas: Annotated[
        Count, Meta(description="Number of replicas beyond the gang that may wait for capacity at a time.")
    ] = 1
    graceful_shutdown_timeout_in_seconds: Annotated[
        Time, Meta(description="Time for a replica to leave: it finishes its step and hands its state over.")
    ] = 60.0
    scaling_timeout_in_seconds: Annotated[
        Time, Meta(description="A scheduled replica that does not run by then is given up, and its node avoided.")
    ] = 300.0
    scale_up_snooze_time_in_seconds: Annotated[
        Time, Meta(description="Least time from any change to the next growth.")
    ] = 30.0
    fence_timeout_in_seconds: Annotated[
        Time,
        Meta(description="After its grace, a pod whose node cannot be reached is deleted by force when this is over."),
    ] = 60.0
    bad_node_time_in_seconds: Annotated[
        Time, Meta(description="Time for which a node that lost a replica is avoided.")
    ] = 3600.0
    pods_per_replica: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], Meta(description="Pods that together hold one replica of the model.")
    ] = 1
    ranks_per_pod: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], Meta(description="Workers in each pod, as --nproc-per-node.")
    ] = 1
    replica_ranks: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(
            description="Workers that hold one copy of the model, as --replica-ranks: 1 for DistributedDataParallel, "
            "where each worker has all of it. Default (0): all of a replica's."
        ),
    ] = 0
    domain_label: Annotated[
        str,
        Meta(
            description="Label of the pods whose value names their failure domain, for --buddy-every; where Kubernetes "
            "does so, pods have topology.kubernetes.io/zone of their node. Default: each node alone."
        ),
    ] = ""
    topology_labels: Annotated[
        list[str],
        Meta(
            max_length=8,
            description="Labels of nodes with their place in the network, from the widest to the narrowest (a "
            "zone, a block, a rack): near ranks of the gang become neighbours, and copies of state are kept in another "
            "place, unless domainLabel names failure domains. Default: ranks follow the replicas' places.",
        ),
    ] = []
    run_flags: Annotated[list[str], Meta(description="Further flags of regrow run, for example --buddy-every=20.")] = []
    checkpoint_dir: Annotated[
        str, Meta(description="As --checkpoint-dir; a gang that must start anew resumes from there.")
    ] = ""
    port: Annotated[
        Annotated[int, Meta(ge=1024, le=65535)], Meta(description="Where the coordinator in pod 0 listens.")
    ] = DEFAULT_PORT
    max_restarts: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="How often the gang is started anew before the job has failed.")
    ] = 10
    suspend: Annotated[
        bool, Meta(description="True: the job gives all its pods back, and starts again when false.")
    ] = False
    backend: Annotated[
        str,
        Meta(
            description="What admits pods: none (the scheduler, each by itself), gang (the scheduler, a gang whole; "
            "Kubernetes 1.37 with the feature gate GenericWorkload), kueue, or volcano, which schedules them."
        ),
    ] = "none"
    kueue: Annotated[KueueSpec | None, Meta(description="For the backend kueue.")] = None
    volcano: Annotated[VolcanoSpec | None, Meta(description="For the backend volcano, which needs none.")] = None
    priority_class_name: Annotated[str, Meta(description="PriorityClass of the gang's pods.")] = ""
    elastic_priority_class_name: Annotated[
        str, Meta(description="PriorityClass of the replicas beyond the gang; one with preemptionPolicy: Never.")
    ] = ""

    def elastic(self) -> ElasticSpec:
        """The sizes, for the planner. A requested size outside the limits becomes the nearest one within them."""
        most = self.replica_count if self.max_replica_count is None else self.max_replica_count
        return ElasticSpec(
            replica_count=self.replica_count,
            max_replica_count=most,
            replicas=max(min(self.replicas, most), self.replica_count),
            replica_increment_step=self.replica_increment_step,
            replica_discrete_values=tuple(self.replica_discrete_values),
            max_pending_replicas=self.max_pending_replicas,
            graceful_shutdown_timeout_in_seconds=self.graceful_shutdown_timeout_in_seconds,
            scaling_timeout_in_seconds=self.scaling_timeout_in_seconds,
            scale_up_snooze_time_in_seconds=self.scale_up_snooze_time_in_seconds,
        )


class AvoidedNodeStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A node that new pods are kept away from."""

    name: str
    until_time: datetime
    reason: str = ""
    quarantined: bool = False
    """It failed the job's own examinations twice: it may be marked in the cluster."""

    @property
    def until(self) -> Instant:
        """`until_time` in seconds since the epoch."""
        return self.until_time.timestamp()


class _OlderNode(msgspec.Struct, frozen=True, rename="camel"):
    """`AvoidedNodeStatus` as older operators have written it."""

    name: str
    until: float
    reason: str = ""
    quarantined: bool = False


class JobCondition(msgspec.Struct, frozen=True, rename="camel"):
    """One condition of the job, true, false or unknown, in the form of Kubernetes' own resources."""

    type: str
    status: str
    reason: str
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class TrainingJobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """Status of a job, and the little that the controller must remember of it."""

    phase: str = ""
    replicas: int = 0
    pending_replicas: int = 0
    desired_replicas: int = 0
    selector: str = ""
    step: int | None = None
    """Committed steps, as pod 0 last reported."""
    incidents: int | None = None
    """Incidents since the gang started."""
    goodput: float | None = None
    """The productive part of all rank-seconds since the gang started, an estimate from 0 to 1."""
    attempt: int = 1
    """Number of the gang's present start: 1, and one more with each restart."""
    started_attempt: int = 0
    """The last attempt in which the whole gang ran."""
    granted: int = 0
    last_change_time: datetime | None = None
    """Time when the number of running replicas last changed."""
    failures: int = 0
    last_failure_time: datetime | None = None
    node_ranks: list[int] = msgspec.field(default_factory=list, name="seats")
    """Node rank in the job of each pod of the gang, by its place; only if spec.topologyLabels are given."""
    serial: int = 0
    """Number of replicas started so far; each gets its own serial, so that no name is used twice."""
    terms: dict[str, Any] = {}
    """The part of the specification that the gang was started with; empty: it has not been started."""
    over: str = ""
    """`Succeeded` or `Failed`, for good; `Mended`: it failed before it had begun, and its spec was changed since."""
    bad_nodes: list[AvoidedNodeStatus] = []
    """Nodes that the affinity of new pods excludes."""
    conditions: list[JobCondition] = []
    observed_generation: int = 0
    older_change: float | None = msgspec.field(default=None, name="changedAt")
    """Older operators wrote this and the next two fields, with times in seconds; they are only read."""
    older_failure: float | None = msgspec.field(default=None, name="failedAt")
    older_nodes: list[_OlderNode] | None = msgspec.field(default=None, name="avoidedNodes")

    @property
    def changed_at(self) -> Instant | None:
        """`last_change_time` in seconds."""
        return None if self.last_change_time is None else self.last_change_time.timestamp()

    @property
    def failed_at(self) -> Instant:
        """`last_failure_time` in seconds; 0: never."""
        return 0.0 if self.last_failure_time is None else self.last_failure_time.timestamp()


class TrainingJob(msgspec.Struct, frozen=True):
    """One `TrainingJob`, parsed."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()
    deleting: bool = False
    started: ElasticSpec | None = None
    """The sizes that its gang was started with; None: those of `spec`."""
    edited: tuple[str, ...] = ()
    """Edited fields that take effect only when the gang is restarted; `spec` has the values of its start."""

    @property
    def asked_sizes(self) -> ElasticSpec:
        """The sizes in the commands of its gang."""
        return self.started or self.spec.elastic()

    def node_rank(self, place: int, index: int) -> int:
        """Node rank in the job of a pod of the gang. `index`: number of the pod in its replica."""
        at = place * self.spec.pods_per_replica + index
        return self.status.node_ranks[at] if at < len(self.status.node_ranks) else at


class SpecRefused(Exception):
    """The specification is not valid; the object stays as it is, and its condition names the change to make."""

    def __init__(self, found: list[SizeProblem]) -> None:
        super().__init__("; ".join(f"{_path(each.field)} {each.message}" for each in found))
        self.found = found


def _path(field: str) -> str:
    return field if field.startswith("metadata.") else f"spec.{field}".removesuffix(".")


def read_job(found: dict[str, Any]) -> TrainingJob:
    """Parse an object of the API server. Raises `SpecRefused`, which names each wrong field and its cure."""
    meta = found["metadata"]
    try:
        spec = msgspec.convert(found.get("spec") or {}, TrainingJobSpec, strict=False)
    except msgspec.ValidationError as error:
        raise SpecRefused([SizeProblem("", f"cannot be read: {error}")]) from error
    if wrong := spec_problems(meta["name"], spec):
        raise SpecRefused(wrong)
    return TrainingJob(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=int(meta.get("generation", 1)),
        spec=spec,
        status=read_status(found),
        deleting="deletionTimestamp" in meta,
    )


def read_status(found: dict[str, Any]) -> TrainingJobStatus:
    """Status that the controller has written; an unreadable status counts as empty."""
    try:
        status = msgspec.convert(found.get("status") or {}, TrainingJobStatus, strict=False)
        return msgspec.structs.replace(
            status,
            last_change_time=status.last_change_time or utc(status.older_change),
            last_failure_time=status.last_failure_time or utc(status.older_failure),
            bad_nodes=[*status.bad_nodes, *(_renewed(each) for each in status.older_nodes or [])],
            **dict.fromkeys(("older_change", "older_failure", "older_nodes")),
        )
    except (msgspec.ValidationError, OverflowError, ValueError, OSError):
        return TrainingJobStatus()


def utc(at: Instant | None) -> datetime | None:
    """Seconds since the epoch as a UTC time; None for None and 0, which mean never."""
    return datetime.fromtimestamp(at, UTC) if at else None


def _renewed(node: _OlderNode) -> AvoidedNodeStatus:
    until = datetime.fromtimestamp(node.until, UTC)
    return AvoidedNodeStatus(node.name, until, node.reason, node.quarantined)


def spec_problems(name: str, spec: TrainingJobSpec) -> list[SizeProblem]:
    """Problems that the schema cannot find: contradicting sizes, long names, backends without their part."""
    found = problems(spec.elastic())
    if len(name) > MOST_NAME:
        text = f"has {len(name)} characters: give the job a name of at most {MOST_NAME}, for pods are named after it"
        found.append(SizeProblem("metadata.name", text))
    if not re.fullmatch(NAME_PATTERN, name):
        text = (
            f"is {name!r}: use small letters, digits and '-', and begin with a letter, for a service is named after it"
        )
        found.append(SizeProblem("metadata.name", text))
    if spec.backend not in BACKENDS:
        found.append(SizeProblem("backend", f"is {spec.backend!r}: give one of {', '.join(BACKENDS)}"))
    if spec.backend == "kueue" and spec.kueue is None:
        found.append(SizeProblem("kueue", "is missing: give kueue.queueName, for the backend is kueue"))
    ranks = spec.pods_per_replica * spec.ranks_per_pod
    if spec.replica_ranks and ranks % spec.replica_ranks:
        text = f"is {spec.replica_ranks}, and a replica has {ranks} ranks: give a number that divides them"
        found.append(SizeProblem("replicaRanks", text))
    if spec.domain_label and not re.fullmatch(_LABEL, spec.domain_label, re.ASCII):
        text = (
            f"is {spec.domain_label!r}, which is no key of a label: give one that kubectl get pods --show-labels lists"
        )
        found.append(SizeProblem("domainLabel", text))
    found.extend(SizeProblem("topologyLabels", text) for text in _label_problems(spec.topology_labels))
    containers = (spec.template.get("spec") or {}).get("containers")
    if not isinstance(containers, list) or not containers or not isinstance(containers[0], dict):
        found.append(
            SizeProblem("template.spec.containers", "is empty: give one container, with the image that trains")
        )
    elif not containers[0].get("image"):
        found.append(SizeProblem("template.spec.containers[0].image", "is missing: give an image that has regrow"))
    return found


def _label_problems(labels: list[str]) -> list[str]:
    wrong = [each for each in labels if re.fullmatch(_LABEL, each, re.ASCII) is None]
    found = [f"has {each!r}, which is no key of a label: kubectl get nodes --show-labels has them" for each in wrong]
    return found + (["has a label twice: name each level once"] if len(set(labels)) < len(labels) else [])
