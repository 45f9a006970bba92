"""The objects of a job in the cluster: pods, the service that finds pod 0, the secret. Pure.

Labels hold all that the controller must know of a pod, so a newly started controller can read it from a list.
"""

import copy
import hashlib
import hmac
from typing import Any, Final

import msgspec

from regrow_clusters.cluster.sizes import allowed_sizes
from regrow_clusters.operator.resource import GROUP, KIND, VERSION, TrainingJob

JOB_LABEL: Final = f"{GROUP}/job"
REPLICA_LABEL: Final = f"{GROUP}/replica"
PLACE_LABEL: Final = f"{GROUP}/place"
ATTEMPT_LABEL: Final = f"{GROUP}/attempt"
UID_LABEL: Final = f"{GROUP}/job-uid"
LEADER_LABEL: Final = f"{GROUP}/leader"
AVOIDS: Final = f"{GROUP}/avoids"
"""Annotation: the nodes that the pod's affinity excluded when it was created."""
TOPOLOGY: Final = f"{GROUP}/topology"
"""Annotation: place of the pod's node in the network, `/zone/rack`, once it has a node; `/`: unknown."""
NODE_RANK: Final = f"{GROUP}/node-rank"
"""Annotation: node rank of a pod of the gang in the job; empty: not all pods of the gang have their nodes yet."""
TRAINS: Final = f"{GROUP}/container"
"""Annotation: the container that trains. Admission may put another one before it, as service meshes do."""
PLACED_FOLDER: Final = "/etc/regrow/placed"
"""Folder in which a pod reads its topology and its node rank as files."""
MANAGED: Final = {"app.kubernetes.io/managed-by": "regrow"}
TOKEN_KEY: Final = "token"
VOLCANO: Final = "scheduling.volcano.sh/v1beta1"
SCHEDULING: Final = "scheduling.k8s.io/v1beta1"
_OURS: Final = (AVOIDS, TOPOLOGY, NODE_RANK, TRAINS)
_SHOWN_BY_KUBECTL: Final = "kubectl.kubernetes.io/default-container"
_UNREACHABLE_SECONDS: Final = 30
_DOMAIN: Final = "REGROW_DOMAIN"
_VOLUME: Final = "regrow-placed"
_PLACED_MARGIN: Final = 60
"""Seconds that the gang's pods wait for their placement, in addition to the time in which the gang must get nodes."""
_WAIT_FOR_JOB: Final = 60
"""Seconds: a replica may start before pod 0's coordinator listens, or before its predecessor has left."""
_GRACE_MARGIN: Final = 15
"""Seconds that a pod gets in addition to its replica's grace, for the process itself to end."""


class ReplicaPlace(msgspec.Struct, frozen=True):
    """A replica to be started. `begins`: it belongs to the gang that begins the job; else it joins a running job."""

    place: int
    serial: int
    begins: bool
    index: int | None = None
    """The only one of its pods to be created, as the replacement of a lost pod; None: all pods."""
    part_of: str = ""
    """Name of the replica to which this single pod belongs."""

    def name(self, job: TrainingJob) -> str:
        """Name of the replica. A job never uses a name twice, so an object of this name is this replica."""
        return f"{job.name}-{job.status.attempt}-{self.place}-{self.serial}"


def token_of(key: bytes, uid: str) -> str:
    """The job's token, derived from the operator's key, so that the controller need not read any secret."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


def address(job: TrainingJob) -> str:
    """Address at which pods find the coordinator, whatever pod 0's address is."""
    return f"{service_name(job)}.{job.namespace}.svc:{job.spec.port}"


def service_name(job: TrainingJob) -> str:
    """Name of the headless service of pod 0."""
    return f"{job.name}-{job.uid[:8]}"


def secret_name(job: TrainingJob) -> str:
    """Name of the job's secret; different from that of an earlier job with the same name."""
    return f"{job.name}-{job.uid[:8]}-token"


def group_name(job: TrainingJob, serial: int) -> str:
    """Name of a group of pods that are admitted together. It is never reused: a finished group admits no pod."""
    return f"{job.name}-{job.uid[:8]}-{serial}"


def secret(job: TrainingJob, key: bytes) -> dict[str, Any]:
    """Secret with the token by which the job's pods authenticate to each other."""
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": _meta(job, secret_name(job))}
    return {**body, "stringData": {TOKEN_KEY: token_of(key, job.uid)}}


def service(job: TrainingJob) -> dict[str, Any]:
    """Headless service of pod 0. It resolves before the pod is ready, because the other pods wait for it."""
    spec: dict[str, Any] = {"clusterIP": "None", "publishNotReadyAddresses": True}
    spec |= {"selector": {UID_LABEL: job.uid, LEADER_LABEL: "true"}}
    spec |= {"ports": [{"name": "coordinator", "port": job.spec.port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job, service_name(job)), "spec": spec}


def budget(job: TrainingJob) -> dict[str, Any]:
    """Budget: evictions leave the gang's number of pods less one, so a gang of one pod does not block a drain.

    Pods that are not ready may always be evicted: they do not train.
    """
    spec: dict[str, Any] = {"minAvailable": job.spec.replica_count * job.spec.pods_per_replica - 1}
    spec |= {"selector": {"matchLabels": {UID_LABEL: job.uid}}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    meta = _meta(job, service_name(job))
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec}


def pod_group_name(job: TrainingJob, *, gang: bool) -> str:
    """Name of the PodGroup of this attempt's gang, or of all pods beyond the gang."""
    return f"{job.name}-{job.uid[:8]}-{job.status.attempt}{'' if gang else '-more'}"


def volcano_groups(job: TrainingJob) -> list[dict[str, Any]]:
    """Volcano's PodGroups of this attempt: the gang is admitted whole or not at all, each pod beyond it by itself.

    They set no `minResources`: before it places the replacement of one lost pod, Volcano would require all of these
    again, in addition to the pods that run.
    """
    spec, found = job.spec, []
    grows = job.asked_sizes.max_replica_count > spec.replica_count
    for gang in (True, False) if grows else (True,):
        body: dict[str, Any] = {"minMember": spec.replica_count * spec.pods_per_replica if gang else 1}
        if spec.volcano is not None and spec.volcano.queue_name:
            body["queue"] = spec.volcano.queue_name
        if priority := _priority(job, gang=gang):
            body["priorityClassName"] = priority
        meta = _meta(job, pod_group_name(job, gang=gang))
        found.append({"apiVersion": VOLCANO, "kind": "PodGroup", "metadata": meta, "spec": body})
    return found


def _priority(job: TrainingJob, *, gang: bool) -> str:
    """PriorityClass of the gang's pods, or of those beyond the gang."""
    own = job.spec.priority_class_name if gang else job.spec.elastic_priority_class_name
    return own or (job.spec.template.get("spec") or {}).get("priorityClassName", "")


def scheduler_group(job: TrainingJob) -> dict[str, Any]:
    """The PodGroup of this attempt's gang for Kubernetes' own scheduler. Its priority overrides that of its pods."""
    count = job.spec.replica_count * job.spec.pods_per_replica
    body: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": count}}}
    if priority := _priority(job, gang=True):
        body["priorityClassName"] = priority
    meta = _meta(job, pod_group_name(job, gang=True))
    return {"apiVersion": SCHEDULING, "kind": "PodGroup", "metadata": meta, "spec": body}


def pods(job: TrainingJob, replica: ReplicaPlace, avoid: tuple[str, ...]) -> list[dict[str, Any]]:
    """Manifests of a replica's pods, or of the one in `replica.index`, before the backend's additions."""
    wanted = range(job.spec.pods_per_replica) if replica.index is None else [replica.index]
    return [_pod(job, replica, index, avoid) for index in wanted]


def is_leader(pod: dict[str, Any]) -> bool:
    """True if the pod runs the coordinator."""
    return (pod["metadata"].get("labels") or {}).get(LEADER_LABEL) == "true"


def _meta(job: TrainingJob, name: str) -> dict[str, Any]:
    owner: dict[str, Any] = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": job.name, "uid": job.uid}
    owner |= {"controller": True, "blockOwnerDeletion": True}
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {**MANAGED, JOB_LABEL: job.name, UID_LABEL: job.uid},
        "ownerReferences": [owner],
    }


def _pod(job: TrainingJob, replica: ReplicaPlace, index: int, avoid: tuple[str, ...]) -> dict[str, Any]:
    template = copy.deepcopy(job.spec.template)
    given = template.get("metadata") or {}
    name = replica.name(job)
    meta = _meta(job, name if job.spec.pods_per_replica == 1 else f"{name}-{index}")
    leader = replica.place == 0 and index == 0
    gang = replica.place < job.spec.replica_count
    meta["labels"] = {
        **(given.get("labels") or {}),
        **meta["labels"],
        REPLICA_LABEL: replica.part_of or name,
        PLACE_LABEL: str(replica.place),
        ATTEMPT_LABEL: str(job.status.attempt),
        **({LEADER_LABEL: "true"} if leader else {}),
    }
    meta["annotations"] = {key: text for key, text in (given.get("annotations") or {}).items() if key not in _OURS}
    spec = template.get("spec") or {}
    if trains := spec["containers"][0].get("name"):
        meta["annotations"][TRAINS] = trains
        meta["annotations"].setdefault(_SHOWN_BY_KUBECTL, trains)
    if gang:
        meta["annotations"].setdefault("cluster-autoscaler.kubernetes.io/safe-to-evict", "false")
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = int(job.spec.graceful_shutdown_timeout_in_seconds) + _GRACE_MARGIN
    priority = job.spec.priority_class_name if gang else job.spec.elastic_priority_class_name
    if priority:
        spec["priorityClassName"] = priority
    spec["tolerations"] = [*(spec.get("tolerations") or []), *_tolerations()]
    if avoid:
        meta["annotations"][AVOIDS] = ",".join(avoid)
        _keep_away(spec, avoid)
    arguments = _command(job, replica, index, meta["name"])
    if _is_placed(job, replica):
        arguments = ["regrow", "k8s", "placed", PLACED_FOLDER, *_placed_flags(job, replica), "--", *arguments[1:]]
        _mount_place(spec)
        if replica.begins:
            meta["annotations"][NODE_RANK] = ""
    _set_command(job, spec["containers"][0], arguments)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _tolerations() -> list[dict[str, Any]]:
    """Tolerations by which an unreachable node loses its pods after half a minute, not after five."""
    how = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_SECONDS}
    return [{"key": f"node.kubernetes.io/{key}", **how} for key in ("not-ready", "unreachable")]


def _keep_away(spec: dict[str, Any], nodes: tuple[str, ...]) -> None:
    """Exclude these nodes, in addition to the affinity that the template has."""
    # The API allows only one value in each requirement on a field.
    terms = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for each in required.setdefault("nodeSelectorTerms", [{}]):
        each["matchFields"] = [*each.get("matchFields", []), *terms]


def _is_placed(job: TrainingJob, replica: ReplicaPlace) -> bool:
    """True if its pods wait for their placement before they begin."""
    return bool(job.spec.topology_labels) and (replica.begins or not job.spec.domain_label)


def _placed_flags(job: TrainingJob, replica: ReplicaPlace) -> list[str]:
    within = f"--within={job.spec.scaling_timeout_in_seconds + _PLACED_MARGIN:g}s"
    return [*(["--ranked"] if replica.begins else []), *([] if job.spec.domain_label else ["--domain"]), within]


def _mount_place(spec: dict[str, Any]) -> None:
    """Mount the placement annotations as files: a pod can read its own annotations (updated), but no node labels."""
    items = [
        {"path": key.partition("/")[2], "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        for key in (TOPOLOGY, NODE_RANK)
    ]
    spec["volumes"] = [*(spec.get("volumes") or []), {"name": _VOLUME, "downwardAPI": {"items": items}}]
    first = spec["containers"][0]
    mount = {"name": _VOLUME, "mountPath": PLACED_FOLDER, "readOnly": True}
    first["volumeMounts"] = [*(first.get("volumeMounts") or []), mount]


def _set_command(job: TrainingJob, container: dict[str, Any], arguments: list[str]) -> None:
    container["command"] = arguments
    for name in ("args", "restartPolicy", "restartPolicyRules"):  # the container is never restarted
        container.pop(name, None)
    given = container.get("env") or []
    field = f"metadata.labels['{job.spec.domain_label}']"
    domain = [{"name": _DOMAIN, "valueFrom": {"fieldRef": {"fieldPath": field}}}] if job.spec.domain_label else []
    container["env"] = [
        *given,
        *domain,
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "REGROW_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": TOKEN_KEY}}},
    ]


def _command(job: TrainingJob, replica: ReplicaPlace, index: int, name: str) -> list[str]:
    """Command of a pod: the gang's pods begin the job as its nodes; a later pod joins it as one more node."""
    spec = job.spec
    grace = f"{spec.graceful_shutdown_timeout_in_seconds:g}s"
    here = ["--bind=$(POD_IP)", "--local-addr=$(POD_IP)"]
    if spec.domain_label:
        here.append(f"--domain=$({_DOMAIN})")
    if not replica.begins:
        back = job.asked_sizes.max_replica_count == spec.replica_count
        node = f"node{job.node_rank(replica.place, index)}" if back else name
        wait = f"--wait={_WAIT_FOR_JOB + spec.graceful_shutdown_timeout_in_seconds:g}s"
        there = [f"--join={address(job)}", wait]
        return ["regrow", "agent", *there, *here, f"--name={node}", f"--grace={grace}"]
    sizes = allowed_sizes(job.asked_sizes)
    least, most, each = sizes[0], sizes[-1], spec.pods_per_replica
    unit = spec.replica_ranks or each * spec.ranks_per_pod
    copies = each * spec.ranks_per_pod // unit  # copies of the model in one replica of the cluster
    arguments = [
        "regrow",
        "run",
        f"--job={job.name}",
        f"--nnodes={least * each}:{most * each}",
        *([] if _is_placed(job, replica) else [f"--node-rank={replica.place * each + index}"]),
        f"--nproc-per-node={spec.ranks_per_pod}",
        f"--replicas={least * copies}:{most * copies}",
        f"--replica-ranks={unit}",
        f"--rdzv-endpoint={address(job)}",
        f"--drain-grace={grace}",
        "--no-elect",  # the operator restarts the gang
        *here,
    ]
    if copies > 1 or sizes != list(range(least, most + 1)):
        arguments.append(f"--replica-sizes={','.join(str(size * copies) for size in sizes)}")
    if spec.checkpoint_dir:
        arguments.append(f"--checkpoint-dir={spec.checkpoint_dir}")
        if job.status.attempt > 1:
            arguments.append("--resume=auto")
    return [*arguments, *spec.run_flags, *spec.script]
