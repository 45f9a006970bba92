"""All that is asked of an API server, and how it refuses."""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

from regrow.core.errors import RegrowError

Manifest = dict[str, Any]
WATCH_SILENT = "WatchSilent"
"""The reason of a watch that has said nothing for long: it may be well, and everything is listed again."""


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
    """The API server refused or did not answer. `code`: of HTTP; 0: there was no answer."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"the API server answered {code}")
        self.code = code
        self.reason = reason

    @property
    def missing(self) -> bool:
        """There is no such object, or another one has its name since."""
        return self.code == 404 or (self.code == 422 and "metadata.uid: " in str(self))

    @property
    def unserved(self) -> bool:
        """The API server knows no such resource: its answer is the path's, and no `Status`."""
        return self.code == 404 and self.reason != "NotFound"

    @property
    def conflict(self) -> bool:
        """Somebody else has written the object since it was read, or one of that name is there."""
        return self.code == 409

    @property
    def expired(self) -> bool:
        """The version from which to watch is too old: everything must be listed again."""
        return self.code == 410

    @property
    def refused(self) -> bool:
        """The same again would be refused again: no permission, over quota, not valid."""
        return self.code in (400, 403, 422)


class ClusterApi(Protocol):
    """An API server. All calls raise `ApiFailure`; objects are as in JSON."""

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        """All that regrow has of a kind, in all namespaces, and the version of the list."""
        ...

    def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        """Changes after that version: `ADDED`, `MODIFIED` or `DELETED`, and the object; ends by `ApiFailure` alone."""
        ...

    async def pods_of(self, namespace: str, job: str) -> Sequence[Manifest]:
        """The pods under a job's name, as they are now."""
        ...

    async def get(self, kind: ApiKind, namespace: str, name: str) -> Manifest:
        """One object."""
        ...

    async def create(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Make it; returns it as it is now."""
        ...

    async def replace(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Write it, unless it has changed since it was read."""
        ...

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        """Write its status alone, unless it has changed since it was read."""
        ...

    async def annotate(self, kind: ApiKind, namespace: str, name: str, notes: dict[str, str], *, uid: str) -> Manifest:
        """Add annotations to the object of this uid, whatever else has changed since it was read."""
        ...

    async def drop_finalizer(self, kind: ApiKind, namespace: str, name: str, finalizer: str, *, uid: str) -> None:
        """Take a finalizer away, if nobody has written the object meanwhile; nothing if the object has another uid."""
        ...

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, uid: str, force: bool = False) -> None:
        """End it in its own grace, or a conflict where its name is another one's now (`uid`).

        `force`: forget it at once, for nothing of it runs any more.
        """
        ...
