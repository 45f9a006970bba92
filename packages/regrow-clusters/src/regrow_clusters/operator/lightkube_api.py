"""`ClusterApi` over lightkube; objects stay the dictionaries that they are in JSON."""

import asyncio
import difflib
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Final, get_args, get_origin, get_type_hints

import httpx2
import msgspec
from lightkube import ALL_NS, AsyncClient, KubeConfig, SingleConfig
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import GenericGlobalResource, GenericNamespacedResource, create_api_info
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.types import PatchType

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow_clusters.operator.api import WATCH_SILENT, ApiFailure, ApiKind, Manifest
from regrow_clusters.operator.objects import JOB_LABEL, MANAGED
from regrow_clusters.operator.observed.server_clock import ServerClock
from regrow_clusters.operator.resource import GROUP, VERSION
from regrow_clusters.operator.resource import KIND as JOB_KIND

_FIELD_MANAGER: Final = "regrow"
"""Field manager of people's commands; the operator has another, so that `managedFields` tells them apart."""
_SERVER_TIMEOUT: Final[Seconds] = 240
_SILENT_FOR: Final[Seconds] = 90.0
"""Silence after which a watch is restarted with a list: its connection may be cut unnoticed."""
_PAGE: Final = 500
_NEARLY: Final = 0.85
"""Least similarity of a misspelt field to a known one: a slip of a letter, and not another word."""


def _of(group: str, version: str, kind: str, plural: str, *, inside: bool = True) -> tuple[Any, Any]:
    """Dictionary classes for a resource and for its status; lightkube's own models would check every field."""
    info = create_api_info(group, version, kind, plural)
    status = ApiInfo(
        ResourceDef(group, version, kind), plural, ["get", "patch", "put"], parent=info.resource, action="status"
    )
    base = GenericNamespacedResource if inside else GenericGlobalResource
    return type(kind, (base,), {"_api_info": info}), type(f"{kind}Status", (base,), {"_api_info": status})


_KINDS: Final = {
    ApiKind.JOBS: _of(GROUP, VERSION, JOB_KIND, "trainingjobs"),
    ApiKind.PODS: _of("", "v1", "Pod", "pods"),
    ApiKind.SERVICES: _of("", "v1", "Service", "services"),
    ApiKind.SECRETS: _of("", "v1", "Secret", "secrets"),
    ApiKind.LEASES: _of("coordination.k8s.io", "v1", "Lease", "leases"),
    ApiKind.NODES: _of("", "v1", "Node", "nodes", inside=False),
    ApiKind.EVENTS: _of("", "v1", "Event", "events"),
    ApiKind.BUDGETS: _of("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ApiKind.LOCAL_QUEUES: _of("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues"),
    ApiKind.POD_GROUPS: _of("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups"),
    ApiKind.GANGS: _of("scheduling.k8s.io", "v1beta1", "PodGroup", "podgroups"),
    ApiKind.QUEUES: _of("scheduling.volcano.sh", "v1beta1", "Queue", "queues", inside=False),
}


class LightkubeApi:
    """`ClusterApi` over lightkube, a context manager.

    Args:
        config: address and credentials of the server; None: as kubectl finds them.
        manager: the field manager of its writes.
        silent_for: silence after which a watch is ended.
    """

    def __init__(
        self, config: SingleConfig | None = None, *, manager: str = _FIELD_MANAGER, silent_for: Seconds = _SILENT_FOR
    ) -> None:
        self._silent_for = silent_for
        try:
            found = config or KubeConfig.from_env().get()
        except ConfigError as error:
            raise UsageError(f"no Kubernetes cluster is configured: {error}", hint="set KUBECONFIG") from error
        if found is None:
            raise UsageError("no Kubernetes cluster is configured", hint="set KUBECONFIG, or run inside a pod")
        # `Any`, because its overloads accept only lightkube's own models.
        self._client: Any = AsyncClient(config=found, field_manager=manager)
        self.namespace = str(self._client.namespace)
        self.clock = ServerClock()
        hooks: Any = {"request": [self._note_time], "response": [self._set_clock]}
        self._client._client._client.event_hooks = hooks  # noqa: SLF001 - httpx2's client, below lightkube's own

    async def __aenter__(self) -> "LightkubeApi":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        """As `ClusterApi.list`."""
        found = self._client.list(
            _KINDS[kind][0], namespace=None if kind is ApiKind.NODES else ALL_NS, labels=_labels(kind), chunk_size=_PAGE
        )
        try:
            items = [dict(each) async for each in found]
            return items, str(found.resourceVersion)
        except httpx2.HTTPError as error:
            raise _failure(error) from error

    async def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        """As `ClusterApi.watch`."""
        events = self._client.watch(
            _KINDS[kind][0],
            namespace=ALL_NS,
            labels=_labels(kind),
            resource_version=version,
            server_timeout=_SERVER_TIMEOUT,
        )
        try:
            while True:
                # Between two events lightkube reconnects by itself without reporting it.
                async with asyncio.timeout(self._silent_for):
                    what, found = await anext(events)
                yield what, dict(found)
        except TimeoutError:
            text = f"the watch of {kind} has sent nothing for {self._silent_for:g} s"
            raise ApiFailure(0, WATCH_SILENT, text) from None
        except StopAsyncIteration:
            raise ApiFailure(0, "", f"the watch of {kind} has ended") from None
        except httpx2.HTTPError as error:
            raise _failure(error) from error
        finally:
            await events.aclose()

    async def get(self, kind: ApiKind, namespace: str, name: str) -> Manifest:
        """As `ClusterApi.get`."""
        return await self._ask(self._client.get(_KINDS[kind][0], name, namespace=namespace or None))

    async def create(self, kind: ApiKind, body: Manifest) -> Manifest:
        """As `ClusterApi.create`."""
        return await self._ask(self._client.create(_KINDS[kind][0](body), namespace=body["metadata"]["namespace"]))

    async def replace(self, kind: ApiKind, body: Manifest) -> Manifest:
        """As `ClusterApi.replace`."""
        meta = body["metadata"]
        where = meta.get("namespace") or None
        return await self._ask(self._client.replace(_KINDS[kind][0](body), meta["name"], namespace=where))

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        """As `ClusterApi.replace_status`."""
        meta = body["metadata"]
        where = meta.get("namespace") or None
        return await self._ask(self._client.replace(_KINDS[kind][1](body), meta["name"], namespace=where))

    async def annotate(self, kind: ApiKind, namespace: str, name: str, notes: dict[str, str], *, uid: str) -> Manifest:
        """As `ClusterApi.annotate`."""
        change = {"metadata": {"annotations": notes, "uid": uid}}
        asked = self._client.patch(_KINDS[kind][0], name, change, namespace=namespace, patch_type=PatchType.MERGE)
        return await self._ask(asked)

    async def drop_finalizer(self, kind: ApiKind, namespace: str, name: str, finalizer: str, *, uid: str) -> None:
        """As `ClusterApi.drop_finalizer`."""
        meta = (await self.get(kind, namespace, name))["metadata"]
        if meta["uid"] != uid or finalizer not in (given := meta.get("finalizers") or []):
            return
        rest = [each for each in given if each != finalizer]
        change = {"metadata": {"finalizers": rest or None, "resourceVersion": meta["resourceVersion"]}}
        asked = self._client.patch(_KINDS[kind][0], name, change, namespace=namespace, patch_type=PatchType.MERGE)
        await self._ask(asked)

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, uid: str = "", force: bool = False) -> None:
        """As `ClusterApi.delete`; without a `uid`, whatever has the name."""
        # lightkube's own call sends no body, but the preconditions must be in one.
        client = self._client._client  # noqa: SLF001
        asked = client.prepare_request("delete", _KINDS[kind][0], name=name, namespace=namespace)
        asked.data = {"apiVersion": "v1", "kind": "DeleteOptions"}
        asked.data |= {"preconditions": {"uid": uid}} if uid else {}
        asked.data |= {"gracePeriodSeconds": 0} if force else {}
        try:
            client.handle_response("delete", await client.send(client.build_adapter_request(asked)), asked)
        except httpx2.HTTPError as error:
            raise _failure(error) from error

    async def pods_of(self, namespace: str, job: str) -> Sequence[Manifest]:
        """As `ClusterApi.pods_of`; also for users with rights in this namespace alone."""
        labels = {**MANAGED, JOB_LABEL: job}
        try:
            found = self._client.list(_KINDS[ApiKind.PODS][0], namespace=namespace, labels=labels, chunk_size=_PAGE)
            return [dict(each) async for each in found]
        except httpx2.HTTPError as error:
            raise _failure(error) from error

    async def log(
        self, namespace: str, pod: str, container: str, *, follow: bool, tail: int | None
    ) -> AsyncIterator[str]:
        """Log lines, with their line ends, of a pod's container (empty: its only one). `follow`: until it has ended."""
        asked = self._client.log(pod, namespace=namespace, container=container or None, follow=follow, tail_lines=tail)
        try:
            if follow:  # lightkube 1.0.1 cannot read the refusal of a stream
                async for _ in self._client.log(pod, namespace=namespace, container=container or None, tail_lines=1):
                    pass
            async for line in asked:
                yield line
        except httpx2.HTTPError as error:
            raise _failure(error) from error

    async def _note_time(self, request: httpx2.Request) -> None:
        request.extensions["asked_at"] = self.clock.wall()

    async def _set_clock(self, response: httpx2.Response) -> None:
        self.clock.set(response.headers.get("Date", ""), response.request.extensions["asked_at"])

    async def _ask(self, asked: Any) -> Manifest:
        try:
            return dict(await asked)
        except httpx2.HTTPError as error:
            raise _failure(error) from error


def misspelt_field(template: Any) -> tuple[str, str] | None:
    """First misspelt field of a pod's template: its path, and the field that may be meant; None: there is none.

    The API server drops such a field silently. An unknown field unlike all others may be newer than lightkube.
    """
    return _misspelt(template, PodTemplateSpec, "spec.template")


def _misspelt(value: Any, kind: Any, path: str) -> tuple[str, str] | None:
    model = get_args(kind)[0] if type(None) in get_args(kind) else kind
    if isinstance(value, list):
        each_in = ((each, f"{path}[{number}]") for number, each in enumerate(value))
        element = get_args(model)[0] if get_origin(model) is list else Any
        return next((found for each, where in each_in if (found := _misspelt(each, element, where))), None)
    if not isinstance(value, dict) or not isinstance(model, type) or not issubclass(model, msgspec.Struct):
        return None
    known = dict(zip(model.__struct_encode_fields__, model.__struct_fields__, strict=True))
    hints = get_type_hints(model)
    for name, each in value.items():
        if name not in known:
            if near := difflib.get_close_matches(str(name), known, 1, _NEARLY):
                return f"{path}.{name}", near[0]
        elif found := _misspelt(each, hints[known[name]], f"{path}.{name}"):
            return found
    return None


def _labels(kind: ApiKind) -> dict[str, Any] | None:
    return dict(MANAGED) if kind is ApiKind.PODS else None


def _failure(error: httpx2.HTTPError) -> ApiFailure:
    if isinstance(error, ApiError):
        return ApiFailure(int(error.status.code or 0), error.status.reason or "", error.status.message or "")
    if isinstance(error, httpx2.HTTPStatusError):
        # An answer of a proxy, or to a watch: lightkube does not parse these.
        return ApiFailure(error.response.status_code, "", f"the API server answered {error.response.status_code}")
    return ApiFailure(0, "", f"the API server cannot be reached: {type(error).__name__} {error}")
