"""Life of jobs on any cluster, by its API alone: the same scenarios on the fake one and on real ones.

Nothing here trains: pods run a few lines of Python in regrow's name, which end as regrow does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from tests.cluster.jobs import training_job

from regrow_clusters.operator.api import ApiFailure, ApiKind, Manifest
from regrow_clusters.operator.lightkube_api import LightkubeApi
from regrow_clusters.operator.objects import JOB_LABEL, PLACE_LABEL

PATIENCE: Final = 240.0
CONFIG_MAP: Final = "regrow-stand-in"
FAILS, SUCCEEDS = "fail.py", "succeed.py"
STAND_IN: Final = f"""#!/usr/bin/env python3
import os, signal, sys, time
code = int(os.environ.get("REGROW_GIVEN_BACK_CODE", "0"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
if sys.argv[1] == "run" and sys.argv[-1] in ("{FAILS}", "{SUCCEEDS}"):
    time.sleep(5)
    sys.exit(sys.argv[-1] == "{FAILS}")
while True:
    time.sleep(1)
"""
_KEEPER: Final = "example.com/keeper"
_PATHS: Final = "/opt/regrow:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Trial:
    """One job in a namespace. `queue`: of Kueue's; empty: the scheduler alone admits its pods."""

    def __init__(self, api: LightkubeApi, namespace: str, name: str, *, image: str, queue: str = "") -> None:
        self.api, self.namespace, self.name = api, namespace, name
        self._image, self._queue = image, queue

    def container(self, name: str, **more: Any) -> Manifest:
        """One that finds regrow's stand-in."""
        mount = {"name": "regrow", "mountPath": "/opt/regrow"}
        env = [{"name": "PATH", "value": _PATHS}]
        return {"name": name, "image": self._image, "env": env, "volumeMounts": [mount], **more}

    async def submit(self, *others: Manifest, **spec: Any) -> None:
        """Make the job. `others`: containers beside the one that trains."""
        volume = {"name": "regrow", "configMap": {"name": CONFIG_MAP, "defaultMode": 0o555}}
        template = {"spec": {"containers": [self.container("train"), *others], "volumes": [volume]}}
        queued: dict[str, Any] = {"backend": "kueue", "kueue": {"queueName": self._queue}} if self._queue else {}
        usual = {"gracefulShutdownTimeoutInSeconds": 5, "scaleUpSnoozeTimeInSeconds": 0, "template": template}
        body = training_job(self.name, self.namespace, **(usual | queued | spec))
        await self.api.create(ApiKind.JOBS, body)

    async def edit(self, kind: ApiKind, name: str, change: Callable[[Manifest], None]) -> None:
        """Write an object as it is to be, again where somebody else has written meanwhile."""
        while True:
            body = await self.api.get(kind, self.namespace, name)
            change(body)
            try:
                await self.api.replace(kind, body)
            except ApiFailure as failure:
                if not failure.conflict:
                    raise
            else:
                return

    async def set(self, **spec: Any) -> None:
        """Edit the job."""
        await self.edit(ApiKind.JOBS, self.name, lambda body: body["spec"].update(spec))

    async def status(self) -> Manifest:
        """The job's, or nothing."""
        return dict((await self.api.get(ApiKind.JOBS, self.namespace, self.name)).get("status") or {})

    async def condition(self, type: str) -> str:
        """Status of a condition; empty: it has not been said."""
        found = (await self.status()).get("conditions", [])
        return next((str(each["status"]) for each in found if each["type"] == type), "")

    async def pods(self) -> list[Manifest]:
        """All objects of the job's pods."""
        return list(await self.api.pods_of(self.namespace, self.name))

    async def running(self) -> dict[str, Manifest]:
        """By their places, those that run and that nobody has deleted."""
        return {
            each["metadata"]["labels"][PLACE_LABEL]: each
            for each in await self.pods()
            if each["status"]["phase"] == "Running" and "deletionTimestamp" not in each["metadata"]
        }

    async def until(self, holds: Callable[[], Awaitable[object]], what: str) -> None:
        """Wait for it."""
        began = time.monotonic()
        while not await holds():
            assert time.monotonic() - began < PATIENCE, f"{self.name}: not seen: {what}: {await self.status()}"
            await asyncio.sleep(0.1)

    async def runs(self, replicas: int, *, attempt: int = 1) -> None:
        """Wait until this number of replicas run, and the operator says so."""

        async def holds() -> bool:
            status = await self.status()
            told = (status.get("phase"), status.get("replicas"), status.get("attempt"))
            return told == ("Training", replicas, attempt) and len(await self.running()) == replicas

        await self.until(holds, f"{replicas} replicas run, at attempt {attempt}")

    async def phase(self, wanted: str) -> None:
        """Wait for it."""

        async def holds() -> bool:
            return (await self.status()).get("phase") == wanted

        await self.until(holds, wanted)

    async def gone(self, pod: Manifest) -> None:
        """Wait until an object of this pod is no more."""

        async def holds() -> bool:
            return pod["metadata"]["uid"] not in {each["metadata"]["uid"] for each in await self.pods()}

        await self.until(holds, f"{pod['metadata']['name']} is gone")

    async def delete(self, pod: Manifest, *, force: bool = False) -> None:
        """As kubectl does."""
        await self.api.delete(ApiKind.PODS, self.namespace, pod["metadata"]["name"], force=force)

    async def end(self) -> None:
        """Delete the job; nothing of it is left."""
        try:
            await self.api.delete(ApiKind.JOBS, self.namespace, self.name)
        except ApiFailure as failure:
            if not failure.missing:
                raise

        async def holds() -> bool:
            owned = [each for kind in (ApiKind.SERVICES, ApiKind.BUDGETS) for each in (await self.api.list(kind))[0]]
            mine = [each for each in owned if (each["metadata"].get("labels") or {}).get(JOB_LABEL) == self.name]
            return not await self.pods() and not [
                each for each in mine if each["metadata"]["namespace"] == self.namespace
            ]

        await self.until(holds, "nothing of it is left")


async def grows_and_shrinks(trial: Trial) -> None:
    """The gang, a replica more, and as many as are asked for."""
    await trial.submit(replicaCount=2, maxReplicaCount=3)
    await trial.runs(3)
    await trial.set(replicas=2)
    await trial.runs(2)


async def a_pod_is_deleted(trial: Trial) -> None:
    """Of the gang, and of a replica beyond it."""
    await trial.submit(replicaCount=2, maxReplicaCount=3)
    await trial.runs(3)
    for place in ("1", "2"):
        lost = (await trial.running())[place]
        await trial.delete(lost)
        await trial.gone(lost)
        await trial.runs(3)


async def a_pod_is_deleted_by_force(trial: Trial) -> None:
    """It is replaced, and nobody else."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    before = await trial.running()
    await trial.delete(before["1"], force=True)
    await trial.gone(before["1"])
    await trial.runs(2)
    assert (await trial.running())["0"]["metadata"]["uid"] == before["0"]["metadata"]["uid"]


async def pod_0_is_lost(trial: Trial) -> None:
    """The gang starts anew."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    lost = (await trial.running())["0"]
    await trial.delete(lost)
    await trial.gone(lost)
    await trial.runs(2, attempt=2)


async def it_is_suspended_and_resumed(trial: Trial) -> None:
    """All is given back meanwhile."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    before = await trial.running()
    await trial.set(suspend=True)
    await trial.phase("Suspended")
    for pod in before.values():
        await trial.gone(pod)
    await trial.set(suspend=False)
    await trial.runs(2, attempt=2)


async def an_edit_waits_for_the_next_start(trial: Trial) -> None:
    """And a condition says so."""
    await trial.submit(replicaCount=1, maxReplicaCount=2)
    await trial.runs(2)
    await trial.set(maxReplicaCount=3)

    async def told() -> bool:
        return await trial.condition("SpecApplied") == "False"

    await trial.until(told, "it is said")
    before = await trial.running()
    await trial.set(suspend=True)
    for pod in before.values():
        await trial.gone(pod)
    await trial.set(suspend=False)
    await trial.runs(3, attempt=2)
    assert await trial.condition("SpecApplied") == "True"


async def a_finalizer_keeps_a_pod(trial: Trial) -> None:
    """Its place is filled at once, and nobody is blamed."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    lost = (await trial.running())["1"]
    name = lost["metadata"]["name"]

    def keep(body: Manifest) -> None:
        body["metadata"]["finalizers"] = [*(body["metadata"].get("finalizers") or []), _KEEPER]

    await trial.edit(ApiKind.PODS, name, keep)
    try:
        await trial.delete(lost)

        async def replaced() -> bool:
            now = (await trial.running()).get("1")
            return now is not None and now["metadata"]["uid"] != lost["metadata"]["uid"]

        await trial.until(replaced, "another one runs")
        assert name in [each["metadata"]["name"] for each in await trial.pods()]
        assert (await trial.status())["badNodes"] == []
    finally:
        await trial.api.drop_finalizer(ApiKind.PODS, trial.namespace, name, _KEEPER, uid=lost["metadata"]["uid"])
    await trial.gone(lost)


async def its_service_is_deleted(trial: Trial) -> None:
    """It is there again before anybody joins."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    services, _ = await trial.api.list(ApiKind.SERVICES)
    (mine,) = [each for each in services if (each["metadata"].get("labels") or {}).get(JOB_LABEL) == trial.name]
    await trial.api.delete(ApiKind.SERVICES, trial.namespace, mine["metadata"]["name"])
    lost = (await trial.running())["1"]
    await trial.delete(lost)
    await trial.gone(lost)
    await trial.runs(2)
    assert await trial.api.get(ApiKind.SERVICES, trial.namespace, mine["metadata"]["name"])


async def its_script_fails_beside_a_container_that_does_not(trial: Trial) -> None:
    """The kubelet sorts containers by name; the one that trains speaks for the job."""
    beside = trial.container("a-log", command=["python3", "-c", "import time; time.sleep(8)"])
    await trial.submit(beside, replicaCount=2, script=[FAILS])
    await trial.phase("Failed")
    assert await trial.condition("Complete") == "False"


async def its_script_succeeds(trial: Trial) -> None:
    """Its pods stay for their logs."""
    await trial.submit(replicaCount=2, script=[SUCCEEDS])
    await trial.phase("Succeeded")
    assert await trial.pods()


async def it_is_made_again_under_its_name(trial: Trial) -> None:
    """At once: the old pods leave beside it."""
    await trial.submit(replicaCount=2)
    await trial.runs(2)
    await trial.api.delete(ApiKind.JOBS, trial.namespace, trial.name)
    await trial.submit(replicaCount=2)
    await trial.runs(2)


async def it_is_deleted_before_it_runs(trial: Trial) -> None:
    """Nothing is left of a gang that no node has taken."""
    nowhere = {"regrow.example.com/nowhere": "yes"}
    await trial.submit(replicaCount=2)
    await trial.set(template={"spec": {"nodeSelector": nowhere, "containers": [trial.container("train")]}})

    async def asked() -> bool:
        return len(await trial.pods()) >= 1

    await trial.until(asked, "its pods are asked for")


SCENARIOS: Final = (
    grows_and_shrinks,
    a_pod_is_deleted,
    a_pod_is_deleted_by_force,
    pod_0_is_lost,
    it_is_suspended_and_resumed,
    an_edit_waits_for_the_next_start,
    a_finalizer_keeps_a_pod,
    its_service_is_deleted,
    its_script_fails_beside_a_container_that_does_not,
    its_script_succeeds,
    it_is_made_again_under_its_name,
    it_is_deleted_before_it_runs,
)
