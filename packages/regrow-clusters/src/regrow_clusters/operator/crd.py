"""The CRD of `TrainingJob`, made from the typed specification. Pure."""

from typing import Any, Final

import msgspec

from regrow_clusters.operator.resource import (
    BACKENDS,
    GROUP,
    KIND,
    MOST_NAME,
    NAME_PATTERN,
    PLURAL,
    VERSION,
    TrainingJobSpec,
    TrainingJobStatus,
)

_DROPPED: Final = frozenset({"title", "$ref"})
_COLUMNS: Final = (
    (
        "Phase",
        "string",
        ".status.phase",
        "Pending, Training, Waiting (short), Restarting, Suspended, Succeeded or Failed.",
    ),
    ("Replicas", "integer", ".status.replicas", "Replicas that run."),
    ("Wanted", "integer", ".status.desiredReplicas", "Requested replicas."),
    ("Pending", "integer", ".status.pendingReplicas", "Replicas that wait for capacity."),
    ("Step", "integer", ".status.step", "The step that the training is at."),
    ("Goodput", "number", ".status.goodput", "The productive part of all rank-seconds, from 0 to 1."),
    ("Age", "date", ".metadata.creationTimestamp", "Time at which the job was created."),
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition, complete."""
    spec = _schema(TrainingJobSpec)
    spec["properties"]["backend"]["enum"] = list(BACKENDS)
    spec["properties"]["template"]["x-kubernetes-preserve-unknown-fields"] = True
    spec["x-kubernetes-validations"] = [
        {
            "rule": "!has(self.maxReplicaCount) || self.maxReplicaCount >= self.replicaCount",
            "message": "maxReplicaCount is below replicaCount: give replicaCount or more",
        },
        {
            "rule": "self.backend != 'kueue' || has(self.kueue)",
            "message": "the backend kueue needs a queue: give kueue.queueName",
        },
    ]
    status = _schema(TrainingJobStatus)
    status["properties"]["terms"]["x-kubernetes-preserve-unknown-fields"] = True
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    schema = {
        "type": "object",
        "description": "A PyTorch training that goes straight on when workers are lost, and grows and shrinks.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MOST_NAME}",
                "message": f"pods are named after the job: give it a name of at most {MOST_NAME} characters",
            },
            {
                "rule": f"self.metadata.name.matches('^{NAME_PATTERN}$')",
                "message": "a service is named after the job: use small letters, digits and '-', a letter first",
            },
        ],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text} for name, kind, path, text in _COLUMNS
        ],
    }
    names = {"kind": KIND, "plural": PLURAL, "singular": KIND.lower(), "shortNames": ["tj"], "categories": ["all"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Structural schema of a type: without references, titles, and unions with null."""
    (top,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    found: dict[str, Any] = _plain(top, components)
    return found


def _plain(node: Any, components: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_plain(each, components) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain({**components[node["$ref"]], **{k: v for k, v in node.items() if k != "$ref"}}, components)
    if "anyOf" in node:
        chosen = [each for each in node["anyOf"] if each.get("type") != "null"]
        rest = {key: value for key, value in node.items() if key != "anyOf" and value is not None}
        return _plain({**chosen[0], **rest}, components)
    plain = {key: value for key, value in node.items() if key not in _DROPPED}
    if plain.get("default", 0) is None:
        del plain["default"]
    if plain.get("required") == []:
        del plain["required"]  # the API server drops it, and each `kubectl apply` would write it again
    if "properties" in plain:
        plain["properties"] = {name: _plain(each, components) for name, each in plain["properties"].items()}
    if "items" in plain:
        plain["items"] = _plain(plain["items"], components)
    return plain
