"""Operators as a Deployment runs them: processes of their own, of which one leads."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.cluster.bed import KEY, Bed
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import Manifest, Refused
from tests.cluster.older_operator import older_crd

from regrow_clusters.operator.resource import LEASE_NAME

_ROOT = Path(__file__).parents[2]


class Operators:
    """`regrow operator run`, as often as it is started, for one cluster."""

    def __init__(self, cluster: Bed, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._older = os.environ.get("REGROW_TEST_OLDER", "")
        (folder / "key").write_bytes(KEY)
        (folder / "kubeconfig").write_text(kubeconfig(cluster.address))

    def start(self) -> None:
        """One more."""
        self._start("regrow", {})

    def start_older(self) -> None:
        """One as an older release has it: of the sources in `REGROW_TEST_OLDER`, else `older_operator`."""
        if self._older:
            self._start("regrow", {"PYTHONPATH": older_path(self._older)})
        else:
            self._start("tests.cluster.older_operator", {})

    def older_crd(self) -> Manifest:
        """The CRD that came with it."""
        if not self._older:
            return older_crd()
        env = os.environ | {"PYTHONPATH": older_path(self._older)}
        words = "import json; from regrow_clusters.operator.crd import crd; print(json.dumps(crd()))"
        said = subprocess.run([sys.executable, "-c", words], env=env, stdout=subprocess.PIPE, check=True).stdout
        return dict(json.loads(said))

    def _start(self, module: str, more: dict[str, str]) -> None:
        env = os.environ | {"KUBECONFIG": str(self._folder / "kubeconfig")} | more
        words = ["operator", "run", f"--key-file={self._folder / 'key'}", "--namespace=team"]
        with (self._folder / f"operator{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen([sys.executable, "-m", module, *words], env=env, stdout=log, stderr=log, cwd=_ROOT)
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


def older_path(tree: str) -> str:
    """Of a checkout of the repository, where its packages are imported from."""
    return os.pathsep.join(str(each) for each in sorted(Path(tree).glob("packages/*/src")))


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
