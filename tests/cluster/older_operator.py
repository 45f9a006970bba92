"""`regrow operator` as a release before times were RFC 3339: seconds and other names in a status, a CRD of its own.

It deletes whatever has a pod's name. `REGROW_TEST_OLDER` names a checkout of a real one instead.
"""

import copy
import sys
from typing import Any

from regrow.cli import main
from regrow_clusters.operator.api import ApiKind, Manifest
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.lightkube_api import LightkubeApi
from regrow_clusters.operator.observed.pod_seen import instant

NEWER = {"lastChangeTime": "changedAt", "lastFailureTime": "failedAt", "badNodes": "avoidedNodes"}


def older_crd() -> Manifest:
    """The CRD that came with it: what is newer is pruned from a status by the API server."""
    made = copy.deepcopy(crd())
    status = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    for name in NEWER:
        del status[name]
    return made


def older_status(status: dict[str, Any]) -> dict[str, Any]:
    """The same in its words."""
    said = {name: value for name, value in status.items() if name not in NEWER}
    for newer, older in NEWER.items():
        if isinstance(value := status.get(newer), str):
            said[older] = instant(value)
    nodes = [{**each, "until": instant(each["untilTime"])} for each in status.get("badNodes", [])]
    said["avoidedNodes"] = [{name: value for name, value in each.items() if name != "untilTime"} for each in nodes]
    return said


class OlderApi(LightkubeApi):
    """It writes a status in these words, and deletes by name."""

    async def replace_status(self, kind: ApiKind, body: Manifest) -> Manifest:
        if kind is ApiKind.JOBS:
            body = {**body, "status": older_status(body["status"])}
        return await super().replace_status(kind, body)

    async def delete(self, kind: ApiKind, namespace: str, name: str, *, uid: str = "", force: bool = False) -> None:
        await super().delete(kind, namespace, name, force=force)


if __name__ == "__main__":
    from regrow_clusters.operator import service

    service.LightkubeApi = OlderApi  # type: ignore[attr-defined]
    sys.exit(main())
