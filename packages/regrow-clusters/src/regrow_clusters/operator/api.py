"""Interface to an API server: all requests that regrow makes, and the error for a refusal."""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

from regrow.core.errors import RegrowError

Manifest = dict[str, Any]
WATCH_SILENT = "WatchSilent"
"""Failure reason of a watch that was silent for long. It may be intact, but everything is listed again."""


class ApiKind(StrEnum):
    """The resources that the controller touches, by their plural names."""

    JOBS = "trainingjobs"
    PODS = "pods"
    SERVICES = "services"
    SECRETS = "secrets"
    LEASES = "leases"
    EVENTS = "events"
    NODES = "nodes"
    BUDGETS = "poddisruptionbudgets"
    LOCAL_QUEUES = "localqueues"
    POD_GROUPS = "podgroups"
    QUEUES = "queues"
    GANGS = "podgroups.scheduling.k8s.io"


class ApiFailure(RegrowError):
    """The API server refused or did not answer. `code`: HTTP status; 0: there was no answer."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"the API server answered {code}")
        self.code = code
        self.reason = reason

    @property
    def missing(self) -> bool:
        """There is no such object, or another object has its name now."""
        return self.code == 404 or (self.code == 422 and "metadata.uid: " in str(self))

    @property
    def unserved(self) -> bool:
        """The API server does not serve this kind of resource: its answer is a plain 404 without a `Status`."""
        return self.code == 404 and self.reason != "NotFound"

    @property
    def conflict(self) -> bool:
        """The object was written by another client since it was read, or an object of that name exists."""
        return self.code == 409

    @property
    def expired(self) -> bool:
        """The version from which to watch is too old: everything must be listed again."""
        return self.code == 410

    @property
    def refused(self) -> bool:
        """The same request would be refused again: no permission, over quota, not valid."""
        return self.code in (400, 403, 422)


class ClusterApi(Protocol):
    """An API server. All calls raise `ApiFailure`; objects are as in JSON."""

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        """All objects of a kind that regrow manages, in all namespaces, and the version of the list."""
        ...

    def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        """Changes after that version: `ADDED`, `MODIFIED` or `DELETED`, and the object; ends by `ApiFailure` alone."""
        ...

    async def pods_of(self, namespace: str, job: str) -> Sequence[Manifest]:
        """The pods labelled with a job's name, as they are now."""
        ...

    async def get(self, kind: ApiKind, namespace: str, name: str) -> Manifest:
        """One object."""
        ...

    async def create(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Create an object; returns the server's version of it."""
        ...

    async def replace(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Write an object, unless it has changed since it was read."""
        ...

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Write only an object's status, unless the object has changed since it was read."""
        ...

    async def annotate(self, kind: ApiKind, namespace: str, name: str, notes: dict[str, str], *, uid: str) -> Manifest:
        """Add annotations to the object of this uid, whatever else has changed since it was read."""
        ...

    async def drop_finalizer(self, kind: ApiKind, namespace: str, name: str, finalizer: str, *, uid: str) -> None:
        """Remove a finalizer, unless the object is written meanwhile; does nothing if it has another uid."""
        ...

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, uid: str, force: bool = False) -> None:
        """Delete an object within its grace period; a conflict if another object (`uid`) has its name now.

        `force`: delete it at once, without grace, because none of its processes runs any more.
        """
        ...
