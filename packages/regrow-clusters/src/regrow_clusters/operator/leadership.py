"""Election of the active operator: the one that holds the Lease, as with Kubernetes' own controllers."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from regrow.core.ids import Instant, Seconds
from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi
from regrow_clusters.operator.resource import LEASE_NAME

HELD_FOR: Final[Seconds] = 15.0
_RENEW_EVERY: Final[Seconds] = 3.0


class Leadership:
    """One candidate. It times the lease from its own sight of the last change, never by other machines' clocks."""

    def __init__(
        self,
        api: ClusterApi,
        *,
        namespace: str,
        identity: str,
        held_for: Seconds = HELD_FOR,
        renew_every: Seconds = _RENEW_EVERY,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self._api, self._namespace, self._identity = api, namespace, identity
        self._held_for, self._renew_every, self._clock = held_for, renew_every, clock
        self._seen: tuple[str, Instant] = ("", 0.0)
        self._seen_holder = ""

    async def acquire(self) -> None:
        """Wait until this operator is the leader."""
        while not await self._try():
            await asyncio.sleep(self._renew_every)

    async def hold(self) -> None:
        """Renew the lease; returns when it is lost, before another may take it."""
        renewed = self._clock()
        while self._clock() - renewed < self._held_for * 2 / 3:
            await asyncio.sleep(self._renew_every)
            started = self._clock()
            if await self._try():
                renewed = started
            elif self._seen_holder not in ("", self._identity):
                return

    async def release(self) -> None:
        """Release the lease, so that another operator can take over at once."""
        try:
            found = await self._api.get(ApiKind.LEASES, self._namespace, LEASE_NAME)
            if found["spec"].get("holderIdentity") == self._identity:
                # As client-go does: the holder is omitted, not empty.
                spec = {key: value for key, value in found["spec"].items() if key != "holderIdentity"}
                await self._api.replace(ApiKind.LEASES, {**found, "spec": spec})
        except ApiFailure:
            return  # the lease expires by itself

    async def _try(self) -> bool:
        """Take or renew the lease; True if this operator holds it now."""
        try:
            found = await self._api.get(ApiKind.LEASES, self._namespace, LEASE_NAME)
        except ApiFailure as failure:
            return failure.missing and await self._make()
        spec = found.get("spec") or {}
        self._seen_holder = spec.get("holderIdentity") or ""
        version = str(found["metadata"].get("resourceVersion"))
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        held = self._seen_holder not in ("", self._identity)
        if held and self._clock() - self._seen[1] < float(spec.get("leaseDurationSeconds") or self._held_for):
            return False
        try:
            taken = await self._api.replace(ApiKind.LEASES, {**found, "spec": self._spec(spec)})
        except ApiFailure:
            return False
        self._seen = (str(taken["metadata"].get("resourceVersion")), self._clock())
        self._seen_holder = self._identity
        return True

    async def _make(self) -> bool:
        meta = {"name": LEASE_NAME, "namespace": self._namespace}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": self._spec({})}
        try:
            await self._api.create(ApiKind.LEASES, body)
        except ApiFailure:
            return False
        return True

    def _spec(self, old: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = old.get("holderIdentity") == self._identity
        turns = int(old.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._held_for)),
            "acquireTime": old.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": turns if mine or not old else turns + 1,
        }
