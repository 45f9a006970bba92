"""Manifests that install the operator in a cluster: the resource, least rights, and one Deployment. Pure."""

import json
from typing import Any, Final

from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.resource import GROUP, LEASE_NAME, PLURAL

NAME: Final = "regrow-operator"
KEY_SECRET: Final = "regrow-operator-key"
_KEY_FOLDER: Final = "/etc/regrow"
_NOBODY: Final = 65532


def manifests(*, namespace: str, image: str, mark_nodes: bool = False) -> list[dict[str, Any]]:
    """All objects, in the order in which they are applied. `mark_nodes`: with the right to taint nodes."""
    labels = {"app.kubernetes.io/name": NAME}

    def meta(name: str, *, inside: bool = True) -> dict[str, Any]:
        return {"name": name, "labels": labels, **({"namespace": namespace} if inside else {})}

    account = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": meta(namespace, inside=False)},
        crd(),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta(NAME)},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": meta(NAME, inside=False),
            "rules": rules(mark_nodes=mark_nodes),
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": meta(NAME, inside=False),
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": NAME},
            "subjects": [account],
        },
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta(NAME), "rules": lease_rules()},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta(NAME),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": NAME},
            "subjects": [account],
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta(NAME),
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": _pod(namespace, image, mark_nodes=mark_nodes)},
            },
        },
    ]


def rules(*, mark_nodes: bool = False) -> list[dict[str, Any]]:
    """Rights in all namespaces: read jobs, write their status, create and delete their pods. No secret can be read."""
    marking = [{"apiGroups": [""], "resources": ["nodes", "nodes/status"], "verbs": ["update"]}]
    return [
        {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [GROUP], "resources": [f"{PLURAL}/status"], "verbs": ["update"]},
        # An owner reference with blockOwnerDeletion needs this if its admission plug-in is on.
        {"apiGroups": [GROUP], "resources": [f"{PLURAL}/finalizers"], "verbs": ["update"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "create", "patch", "delete"]},
        {"apiGroups": [""], "resources": ["services", "secrets"], "verbs": ["create"]},
        {"apiGroups": ["policy"], "resources": ["poddisruptionbudgets"], "verbs": ["get", "create", "update"]},
        {"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get"]},
        {
            "apiGroups": ["scheduling.volcano.sh", "scheduling.k8s.io"],
            "resources": ["podgroups"],
            "verbs": ["get", "create", "delete"],
        },
        {"apiGroups": ["scheduling.volcano.sh"], "resources": ["queues"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        *(marking if mark_nodes else []),
    ]


def lease_rules() -> list[dict[str, Any]]:
    """Rights in the operator's own namespace: the Lease of the leader election."""
    group = "coordination.k8s.io"
    return [
        {"apiGroups": [group], "resources": ["leases"], "verbs": ["create"]},
        {"apiGroups": [group], "resources": ["leases"], "resourceNames": [LEASE_NAME], "verbs": ["get", "update"]},
    ]


def _pod(namespace: str, image: str, *, mark_nodes: bool) -> dict[str, Any]:
    bare = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    user = {"runAsNonRoot": True, "runAsUser": _NOBODY, "runAsGroup": _NOBODY, "fsGroup": _NOBODY}
    container = {
        "name": "operator",
        "image": image,
        "command": [
            *("regrow", "operator", "run", f"--key-file={_KEY_FOLDER}/key", f"--namespace={namespace}"),
            *(["--mark-nodes"] if mark_nodes else []),
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {**bare, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "key", "mountPath": _KEY_FOLDER, "readOnly": True}],
    }
    return {
        "serviceAccountName": NAME,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "key", "secret": {"secretName": KEY_SECRET, "defaultMode": 0o440}}],
    }


def as_text(objects: list[dict[str, Any]]) -> str:
    """Text of the objects for `kubectl apply -f -`: JSON documents, which are YAML too."""
    return "".join(f"---\n{json.dumps(each, indent=2)}\n" for each in objects)
