"""Operators as a Deployment runs them: processes of their own, of which one leads."""

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.cluster.bed import KEY, Bed
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import Refused

from regrow_clusters.operator.resource import LEASE_NAME


class Operators:
    """`regrow operator run`, as often as it is started, for one cluster."""

    def __init__(self, cluster: Bed, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "key").write_bytes(KEY)
        (folder / "kubeconfig").write_text(kubeconfig(cluster.address))

    def start(self) -> None:
        """One more."""
        env = os.environ | {"KUBECONFIG": str(self._folder / "kubeconfig")}
        words = ["operator", "run", f"--key-file={self._folder / 'key'}", "--namespace=team"]
        with (self._folder / f"operator{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen([sys.executable, "-m", "regrow", *words], env=env, stdout=log, stderr=log)
            )

    async def leader(self) -> "subprocess.Popen[bytes]":
        """The one that has the lease, as soon as there is one."""
        await self._cluster.until(lambda: self.holder() is not None, "an operator leads")
        found = self.holder()
        assert found is not None
        return found

    def holder(self) -> "subprocess.Popen[bytes] | None":
        """Operator that is said to have the lease, dead or alive."""
        try:
            holder = self._cluster.store.get("leases", "team", LEASE_NAME)["spec"].get("holderIdentity", "")
        except Refused:
            return None
        return next((each for each in self.processes if f"_{each.pid}_" in holder), None)


@contextlib.asynccontextmanager
async def operators(cluster: Bed, folder: Path, count: int) -> AsyncIterator[Operators]:
    """Start `count` operators, and end them afterwards."""
    made = Operators(cluster, folder)
    try:
        for _ in range(count):
            made.start()
        yield made
    finally:
        for each in made.processes:
            each.kill()
            each.wait()
