"""Converts each field of HyperPod's PyTorch jobs to TrainingJobs. *Pure*.

Only their documented fields are known here, with their counterparts. An unknown field is left for a person to decide:
a conversion must not silently change a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from regrow.core.errors import UsageError
from regrow_clusters.operator.resource import GROUP, KIND, VERSION, SpecRefused, read_job
from regrow_guests.hyperpod.launched import NOTHING, launched

_GROUP: Final = "sagemaker.amazonaws.com/"
_KIND: Final = "hyperpodpytorchjob"
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_CLASS: Final = "kueue.x-k8s.io/priority-class"
_TOPOLOGY: Final = {
    "kueue.x-k8s.io/podset-required-topology": "requiredTopology",
    "kueue.x-k8s.io/podset-preferred-topology": "preferredTopology",
}
_DROPPED_LABELS: Final = ("app.kubernetes.io/managed-by", "app.kubernetes.io/name", "kubectl.kubernetes.io/")
_AGENT_PORT: Final = 8080
_GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")

NO_COUNTERPART: Final[dict[str, str]] = {
    "runPolicy.cleanPodPolicy": "pods of a job that is over stay for their logs, and hold nothing; kubectl delete tj "
    "takes them along",
    "runPolicy.jobMaxRetryCount": "restarts of processes are not counted: a fault is mended in process",
    "runPolicy.restartPolicy.numRestartBeforeFullJobRestart": "processes come back as often as they die; only the loss "
    "of pod 0 starts the gang anew",
    "runPolicy.restartPolicy.evalPeriodSeconds": "maxRestarts counts over the whole job",
    "runPolicy.logMonitoringConfiguration": "progress is the steps', not lines of a log: a hang is seen by what ranks "
    "wait for, and --hang-timeout in runFlags bounds a step; --check-for-nan there runs a step with a loss that is no "
    "number again, and --log-rules FILE looks for patterns, from a file in the image",
    "runPolicy.ttlSecondsAfterFinished": "a job that is over stays until it is deleted",
    "runPolicy.activeDeadlineSeconds": "a job has no deadline of its own here",
    "elasticPolicy.faultyScaleDownTimeoutInSeconds": "there is no wait for a lost node: the others train on at once",
    "replicaSpecs[].spares": "on Kubernetes no pod waits idle: the others train on, and another pod is asked for at "
    "once; pods that should be there already are replicas beyond the gang (maxReplicaCount)",
    "replicaSpecs[].name": "all pods of a job are alike, and named after it",
}
"""HyperPod's fields that have no counterpart, and the reasons."""


@dataclass
class ConvertedJob:
    """A TrainingJob, and a report on the converted fields.

    Attributes:
        manifest: for `kubectl apply -f`.
        notes: sentences for people: differences, and fields without a counterpart, with reasons.
        unknown: HyperPod fields that are not known here.
    """

    manifest: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def convert_job(
    theirs: Mapping[str, Any], *, script: list[str] | None = None, pods_per_replica: int = 1
) -> ConvertedJob:
    """Convert a HyperPod job to a TrainingJob.

    Args:
        theirs: the HyperPod object as read from its file.
        script: the script and its arguments, if the container's command does not show them.
        pods_per_replica: number of pods that hold one copy of the model; HyperPod's sizes are divided by it.

    Raises:
        UsageError: it is no HyperPod job, or cannot become a TrainingJob; names the field and its cure.
    """
    return _Conversion(theirs, script, pods_per_replica).done()


class _Conversion:
    """One conversion, field by field."""

    def __init__(self, theirs: Mapping[str, Any], script: list[str] | None, pods_per_replica: int) -> None:
        kind, version = str(theirs.get("kind", "")), str(theirs.get("apiVersion", ""))
        if kind.lower() != _KIND or not version.startswith(_GROUP):
            raise UsageError(
                f"it is a {kind or 'file without kind'} of {version or 'no apiVersion'}",
                hint=f"give a HyperPodPyTorchJob of {_GROUP}v1",
            )
        self._meta = _mapping(theirs.get("metadata"), "metadata")
        self._spec = _mapping(theirs.get("spec"), "spec")
        self._script = script
        self._each = pods_per_replica
        self._made = ConvertedJob({})
        self._ours: dict[str, Any] = {}
        self._ranks_said = ""

    def done(self) -> ConvertedJob:
        """Convert all fields."""
        replica = self._replica()
        template = _copied(_mapping(replica.get("template"), "spec.replicaSpecs[0].template"))
        container = _first_container(template)
        self._sizes(replica)
        self._times()
        self._policy()
        self._command(container)
        self._ranks(container)
        self._pods(template, container)
        meta = self._metadata(template)
        self._ours["template"] = template
        self._unknown()
        api = f"{GROUP}/{VERSION}"
        self._made.manifest = {"apiVersion": api, "kind": KIND, "metadata": meta, "spec": self._ours}
        try:
            read_job({**self._made.manifest, "metadata": {"uid": "", "namespace": "", **meta}})
        except SpecRefused as refusal:
            raise UsageError(f"as a {KIND} it cannot be: {refusal}") from refusal
        self._note("the image needs regrow beside torch and the script; what their own image starts is not run")
        if not self._ours.get("checkpointDir"):
            self._note("checkpointDir is to be filled in, where the gang should go on from when pod 0 is lost")
        return self._made

    def _note(self, text: str) -> None:
        self._made.notes.append(text)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def _replica(self) -> dict[str, Any]:
        found = self._spec.get("replicaSpecs")
        if not isinstance(found, list) or not found:
            raise UsageError("spec.replicaSpecs is empty", hint="give one, with replicas and a template")
        if len(found) > 1:
            names = ", ".join(str(each.get("name", "")) for each in found if isinstance(each, dict))
            raise UsageError(
                f"spec.replicaSpecs has {len(found)} entries ({names}), and all pods of a {KIND} are alike",
                hint="write one TrainingJob for the pods that train; what else there is becomes objects of its own",
            )
        replica = _mapping(found[0], "spec.replicaSpecs[0]")
        for name in ("name", "spares"):
            if replica.get(name):
                self._without(f"replicaSpecs[].{name}", f"spec.replicaSpecs[0].{name}")
        known = {"name", "spares", "replicas", "maxReplicas", "template"}
        self._made.unknown.extend(f"spec.replicaSpecs[0].{name}" for name in replica if name not in known)
        return replica

    def _sizes(self, replica: Mapping[str, Any]) -> None:
        policy = _mapping(self._spec.get("elasticPolicy") or {}, "spec.elasticPolicy")
        begins = _count(replica.get("replicas"), "spec.replicaSpecs[0].replicas", default=1)
        least = _count(policy.get("minReplicas"), "spec.elasticPolicy.minReplicas", default=begins)
        most = _count(
            policy.get("maxReplicas", replica.get("maxReplicas")), "spec.elasticPolicy.maxReplicas", default=begins
        )
        if most < least:
            raise UsageError(
                f"spec.elasticPolicy.maxReplicas is {most}, below minReplicas ({least})", hint=f"give {least} or more"
            )
        values = policy.get("replicaDiscreteValues") or []
        if not isinstance(values, list):
            raise UsageError("spec.elasticPolicy.replicaDiscreteValues is no list", hint="write it as [2, 4, 8]")
        values = sorted({_count(each, "spec.elasticPolicy.replicaDiscreteValues", default=0) for each in values})
        fitting = [each for each in values if least <= each <= most]
        if values and not fitting:
            raise UsageError(
                f"spec.elasticPolicy.replicaDiscreteValues has none from minReplicas ({least}) to maxReplicas ({most})",
                hint="give some between them",
            )
        if fitting:
            if fitting != values:
                self._note(f"replicaDiscreteValues: those outside {least} to {most} are left out")
            if (least, most) != (fitting[0], fitting[-1]):
                self._note(f"sizes are {fitting}: replicaCount and maxReplicaCount are the first and the last of them")
            least, most = fitting[0], fitting[-1]
        if policy and begins != least:
            self._note(f"replicas: the job starts with {least}, the least, and grows at once where there is room")
        self._ours["replicaCount"] = self._divided(least, "minReplicas" if policy else "replicas")
        self._ours["maxReplicaCount"] = self._divided(most, "maxReplicas")
        step = _count(policy.get("replicaIncrementStep"), "spec.elasticPolicy.replicaIncrementStep", default=self._each)
        if fitting:
            self._ours["replicaDiscreteValues"] = [self._divided(each, "replicaDiscreteValues") for each in fitting]
            if "replicaIncrementStep" in policy:
                self._note("replicaIncrementStep: left out, for replicaDiscreteValues is given")
        elif step != self._each:
            self._ours["replicaIncrementStep"] = self._divided(step, "replicaIncrementStep")
        if self._each > 1:
            self._ours["podsPerReplica"] = self._each
        else:
            self._note(
                "a replica is a whole copy of the model here, a pod there: where the model is sharded over K pods, "
                "convert with --pods-per-replica K"
            )

    def _divided(self, pods: int, name: str) -> int:
        if pods % self._each:
            raise UsageError(
                f"{name} is {pods} pods, no whole number of replicas of {self._each}",
                hint="give a --pods-per-replica that divides it",
            )
        return pods // self._each

    # --- times and policies --------------------------------------------------------------------------------------

    def _times(self) -> None:
        policy = self._spec.get("elasticPolicy") or {}
        grace = policy.get("gracefulShutdownTimeoutInSeconds")
        if grace is not None:
            self._ours["gracefulShutdownTimeoutInSeconds"] = _seconds(grace, "gracefulShutdownTimeoutInSeconds")
            self._note("gracefulShutdownTimeoutInSeconds is taken; nothing is saved on leaving here, so 60 is enough")
        waits = [policy[name] for name in ("scaleUpSnoozeTimeInSeconds", "scalingTimeoutInSeconds") if name in policy]
        if waits:
            longest = max(_seconds(each, "scalingTimeoutInSeconds") for each in waits)
            self._ours["scaleUpSnoozeTimeInSeconds"] = longest
        if "scalingTimeoutInSeconds" in policy:
            self._note(
                "scalingTimeoutInSeconds is their pause before growth: scaleUpSnoozeTimeInSeconds here, where "
                "scalingTimeoutInSeconds bounds how long a scheduled replica may take to run"
            )
        sizes = ("minReplicas", "maxReplicas", "replicaIncrementStep", "replicaDiscreteValues")
        times = ("gracefulShutdownTimeoutInSeconds", "scalingTimeoutInSeconds", "scaleUpSnoozeTimeInSeconds")
        self._sort("elasticPolicy", policy, {*sizes, *times})

    def _policy(self) -> None:
        policy = _mapping(self._spec.get("runPolicy") or {}, "spec.runPolicy")
        restarts = _mapping(policy.get("restartPolicy") or {}, "spec.runPolicy.restartPolicy")
        if "maxFullJobRestarts" in restarts:
            self._ours["maxRestarts"] = _count(
                restarts["maxFullJobRestarts"], "spec.runPolicy.restartPolicy.maxFullJobRestarts", default=0, least=0
            )
        if policy.get("suspend") is not None:
            self._ours["suspend"] = bool(policy["suspend"])
        self._sort("runPolicy", policy, {"restartPolicy", "suspend"})
        self._sort("runPolicy.restartPolicy", restarts, {"maxFullJobRestarts"})

    def _sort(self, section: str, found: Mapping[str, Any], known: set[str]) -> None:
        for name in found:
            if f"{section}.{name}" in NO_COUNTERPART:
                self._without(f"{section}.{name}", f"spec.{section}.{name}")
            elif name not in known:
                self._made.unknown.append(f"spec.{section}.{name}")

    def _without(self, known: str, shown: str) -> None:
        self._note(f"{shown}: no counterpart, for {NO_COUNTERPART[known]}")

    # --- pods ----------------------------------------------------------------------------------------------------

    def _command(self, container: dict[str, Any]) -> None:
        arguments = [
            str(each) for each in [*(container.pop("command", None) or []), *(container.pop("args", None) or [])]
        ]
        found = NOTHING if self._script else launched(arguments)
        if found is None:
            shown = " ".join(arguments) or "the image's own command"
            raise UsageError(
                f"the container runs {shown[:120]!r}, in which no hyperpodrun or torchrun shows the script",
                hint="say it: --script 'train.py --lr 1e-3'",
            )
        self._ours["script"] = self._script or found.script
        if found.flags:
            self._ours["runFlags"] = found.flags
        self._made.notes.extend(found.notes)
        self._made.unknown.extend(f"the launcher's flag {each}" for each in found.unknown)
        self._ranks_said = found.ranks

    def _ranks(self, container: Mapping[str, Any]) -> None:
        said = str(self._spec.get("nprocPerNode") or self._ranks_said or "auto")
        limits = (container.get("resources") or {}).get("limits") or {}
        gpus = next((int(limits[name]) for name in _GPUS if str(limits.get(name, "")).isdigit()), 0)
        if said.isdigit() and int(said):
            ranks = int(said)
        elif said in ("auto", "gpu") and gpus:
            ranks = gpus
            self._note(f"nprocPerNode is {said}: {gpus} ranks, as many as a pod's GPUs")
        else:
            raise UsageError(f"spec.nprocPerNode is {said!r} and is no number", hint="give the ranks of a pod")
        self._ours["ranksPerPod"] = ranks

    def _pods(self, template: dict[str, Any], container: dict[str, Any]) -> None:
        spec = template["spec"]
        ports = container.get("ports") or []
        kept = [each for each in ports if each.get("containerPort") != _AGENT_PORT]
        if len(kept) != len(ports):
            container.pop("ports")
            container |= {"ports": kept} if kept else {}
            self._note(f"the container's port {_AGENT_PORT} was their agent's; nothing listens there")
        if spec.pop("restartPolicy", None):
            self._note("template's restartPolicy: left out, the operator sets Never")
        if spec.pop("terminationGracePeriodSeconds", None) is not None:
            self._note("template's terminationGracePeriodSeconds: left out, gracefulShutdownTimeoutInSeconds sets it")
        env = [str(each.get("name", "")) for each in container.get("env") or []]
        foreign = [name for name in env if name.startswith("HPCT_") or name == "TORCH_SKIP_TCPSTORE"]
        if foreign:
            self._note(f"variables that mean nothing here: {', '.join(foreign)}")
        if spec.get("hostNetwork"):
            self._note("hostNetwork stays: two pods of one job on a node need their GPUs to keep them apart")
        if name := spec.pop("priorityClassName", None):
            self._ours["priorityClassName"] = name
            self._note("elasticPriorityClassName is to be filled in: a lower class, with preemptionPolicy: Never")

    def _metadata(self, template: dict[str, Any]) -> dict[str, Any]:
        if not self._meta.get("name"):
            raise UsageError("metadata.name is missing", hint="give one; a name that the cluster makes is not taken")
        inner = _mapping(template.pop("metadata", None) or {}, "template.metadata")
        kueue: dict[str, str] = {}
        shown: dict[str, Any] = {"name": self._meta["name"]}
        if self._meta.get("namespace"):
            shown["namespace"] = self._meta["namespace"]
        kept: dict[str, dict[str, str]] = {}
        for part in ("labels", "annotations"):
            for where, found in ((shown, self._meta.get(part)), (kept, inner.get(part))):
                rest = {name: text for name, text in (found or {}).items() if not self._queued(name, text, kueue)}
                if rest:
                    where[part] = rest
        if kept:
            template["metadata"] = kept
        if "queueName" in kueue:
            self._ours |= {"backend": "kueue", "kueue": kueue}
            if "priorityClass" in kueue:
                self._note("kueue.elasticPriorityClass is to be filled in: a lower class, for replicas beyond the gang")
        elif kueue:
            self._note(f"{', '.join(sorted(kueue))}: left out, for there is no label {_QUEUE}")
        return shown

    def _queued(self, name: str, text: str, kueue: dict[str, str]) -> bool:
        """True if a label or annotation is converted or dropped; False if it is kept."""
        if name in (_QUEUE, _CLASS):
            kueue["queueName" if name == _QUEUE else "priorityClass"] = text
        elif name in _TOPOLOGY:
            kueue[_TOPOLOGY[name]] = text
        elif name.startswith(_GROUP):
            self._note(f"{name}: no counterpart, for nothing of their service reads a {KIND}")
        elif not name.startswith(_DROPPED_LABELS):
            return False
        return True

    def _unknown(self) -> None:
        known = {"nprocPerNode", "elasticPolicy", "runPolicy", "replicaSpecs"}
        self._made.unknown.extend(f"spec.{name}" for name in self._spec if name not in known)


def _mapping(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{where} is {'missing' if found is None else 'no mapping'}", hint="is it indented well?")
    return found


def _first_container(template: Mapping[str, Any]) -> dict[str, Any]:
    found = _mapping(template.get("spec"), "spec.replicaSpecs[0].template.spec").get("containers")
    if not isinstance(found, list) or not found:
        raise UsageError("spec.replicaSpecs[0].template.spec.containers is empty", hint="give the one that trains")
    return _mapping(found[0], "spec.replicaSpecs[0].template.spec.containers[0]")


def _count(found: Any, where: str, *, default: int, least: int = 1) -> int:
    if found is None:
        return default
    if isinstance(found, bool) or not str(found).isdigit() or int(found) < least:
        raise UsageError(f"{where} is {found!r}", hint=f"give a whole number, {least} or more")
    return int(found)


def _seconds(found: Any, name: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or found < 0:
        raise UsageError(f"spec.elasticPolicy.{name} is {found!r}", hint="give seconds, 0 or more")
    return found


def _copied(found: Any) -> Any:
    """Deep copy without shared parts: an alias in YAML is one object in several places."""
    if isinstance(found, dict):
        return {name: _copied(each) for name, each in found.items()}
    return [_copied(each) for each in found] if isinstance(found, list) else found
