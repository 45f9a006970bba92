"""The cure of a refusal, derived from the API server's message. Pure.

All admission answers 403: quota, LimitRange, PriorityClasses, Pod Security, rights, namespaces.
"""

from typing import Final

from regrow_clusters.operator.api import ApiFailure

_TERMINATED: Final = "because it is being terminated"
_CURES: Final = (
    ("exceeded quota", "ask for quota, or give some back"),
    ("must specify", "write these resources into spec.template: a quota of the namespace asks for them"),
    (_TERMINATED, "the namespace is being deleted, and the job goes with it"),
    (" usage per ", "change the resources in spec.template, or the namespace's LimitRange"),
    ("no PriorityClass with name", "make that PriorityClass, or name another one"),
    ("violates PodSecurity", "mend the securityContext in spec.template, or ask for another level of the namespace"),
    ("cannot create resource", "apply the operator's manifests again, which have the right to make {what}s"),
)
"""Fragments of the messages of Kubernetes' own admission plug-ins and authorizer, each with its cure."""


def cure_of(what: str, failure: ApiFailure) -> str:
    """Cure for a refusal. `what`: the object that was refused."""
    if failure.code == 422:
        return "mend spec.template"
    if failure.unserved:
        return "the cluster has no such API: install Volcano, or turn GenericWorkload on, or set another spec.backend"
    if failure.code != 403:
        return "see the message"
    text = str(failure)
    found = next((cure for part, cure in _CURES if part in text), "")
    return found.format(what=what) or f"ask for quota, or for the operator's permission to make {what}s here"


def namespace_ends(failure: ApiFailure) -> bool:
    """True if nothing can be made because the namespace is being deleted."""
    return failure.code == 403 and _TERMINATED in str(failure)
