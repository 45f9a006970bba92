"""A whole cluster on this machine: API server over HTTP, scheduler, kubelet with processes, garbage collector."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from lightkube import KubeConfig
from tests.cluster.fake_api import FakeApi, serve
from tests.cluster.fake_kubelet import FakeKubelet, kubeconfig
from tests.cluster.fake_kueue import FakeKueue
from tests.cluster.fake_nodes import FakeScheduler, SaidToRun
from tests.cluster.fake_store import FakeStore, Manifest

from regrow_clusters.cluster.node_health import read_table
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.lightkube_api import LightkubeApi
from regrow_clusters.operator.observed.node_watch import NodeWatch

PATIENCE = 240.0
KEY = b"0123456789abcdef0123456789abcdef"
_TICK = 0.02
_LOOK_EVERY = 0.02


class BedClock:
    """The cluster's time, for the API server and the operators of this process. It can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return time.time() + self.ahead


class Bed:
    """Cluster of a test. `kubelet`: with processes, or one whose pods are only said to run."""

    def __init__(
        self, fake: FakeApi, address: str, nodes: dict[str, int], folder: Path, clock: "BedClock", *, real: bool
    ) -> None:
        self.fake = fake
        self.store = fake.store
        self.address = address
        self.clock = clock
        self.kueue: FakeKueue | None = None
        self.scheduler = FakeScheduler(self.store, nodes)
        self.kubelet = FakeKubelet(self.store, folder)
        self.said = SaidToRun(self.store, lease=15.0)
        self._real = real
        fake.logs = self.kubelet.output

    async def live(self) -> None:
        """Until it is cancelled."""
        while True:
            if self.kueue is not None:
                self.kueue.turn()
            self.scheduler.turn()
            (self.kubelet if self._real else self.said).turn()
            self.store.collect()
            await asyncio.sleep(_TICK)

    def use_kueue(self, quota: dict[str, int], classes: dict[str, int]) -> FakeKueue:
        """From now on pods of a queue wait for it. `quota`: pods of each LocalQueue."""
        made = self.kueue = FakeKueue(self.store, quota, classes)

        def admit(verb: str, plural: str, body: Manifest) -> None:
            if (verb, plural) == ("create", "pods"):
                made.admit_pod(body)

        self.store.refuse = admit
        return made

    def client(self, **how: Any) -> LightkubeApi:
        """A client of its API server."""
        return LightkubeApi(KubeConfig.from_dict(json.loads(kubeconfig(self.address))).get(), **how)

    @contextlib.asynccontextmanager
    async def operator(self, *, marks: bool = False, resync_every: float = 1.0) -> AsyncIterator[Controller]:
        """A controller that runs. `marks`: with the right to taint nodes."""
        async with self.client() as api:
            nodes = NodeWatch(api, read_table(), mark=marks)
            controller = Controller(api, KEY, resync_every=resync_every, ask_every=0.2, nodes=nodes, wall=self.clock)
            running = asyncio.create_task(controller.run())
            try:
                yield controller
            finally:
                running.cancel()
                await asyncio.wait({running})

    def job(self, name: str = "job") -> Manifest:
        """As it is now."""
        return self.store.get("trainingjobs", "team", name)

    def status(self, name: str = "job") -> dict[str, Any]:
        """Status that the operator has written."""
        return dict(self.job(name).get("status") or {})

    def condition(self, type: str, name: str = "job") -> dict[str, Any]:
        """One of its conditions; empty where it has not been said."""
        found = [each for each in self.status(name).get("conditions", []) if each["type"] == type]
        return dict(found[0]) if found else {}

    def pods(self, phase: str = "") -> list[Manifest]:
        """All, or those in a phase that nobody has deleted."""
        found = self.store.all_of("pods")
        return [
            each
            for each in found
            if not phase or (each["status"]["phase"] == phase and "deletionTimestamp" not in each["metadata"])
        ]

    async def until(self, holds: Callable[[], object], what: str) -> float:
        """Wait for it; how long that took."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > PATIENCE:
                said = {each["metadata"]["name"]: self.kubelet.output(each["metadata"]["name"]) for each in self.pods()}
                raise AssertionError(f"not seen: {what}\n{self.store.all_of('trainingjobs')}\n{self.pods()}\n{said}")
            await asyncio.sleep(_LOOK_EVERY)
        return time.monotonic() - began


@contextlib.asynccontextmanager
async def bed(folder: Path, nodes: dict[str, int], *, real: bool = False) -> AsyncIterator[Bed]:
    """A cluster of nodes with room for the given number of pods each."""
    clock = BedClock()
    store = FakeStore(clock)
    store.install(crd())
    fake = FakeApi(store)
    async with serve(fake) as address:
        made = Bed(fake, address, nodes, folder, clock, real=real)
        if real:
            made.kubelet.be_ready()
        living = asyncio.create_task(made.live())
        try:
            yield made
        finally:
            living.cancel()
            await asyncio.wait({living})
            made.kubelet.close()
