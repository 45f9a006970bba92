"""Commands of docs/kubernetes.md, typed: a real kubectl against the bed's API server. Skipped without kubectl."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.cluster.bed import Bed, bed
from tests.cluster.fake_kubelet import kubeconfig

from regrow_clusters.operator.manifests import as_text, manifests

DOCUMENT = Path(__file__).parents[2] / "docs" / "kubernetes.md"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


class Terminal:
    """kubectl as a user has it, in a folder with the document's `job.yaml`."""

    def __init__(self, cluster: Bed, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder
        (folder / "kubeconfig").write_text(kubeconfig(cluster.address))
        (self.job,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
        (folder / "job.yaml").write_text(self.job)

    async def says(self, *words: str, given: str = "", code: int = 0) -> str:
        """All that it prints."""
        around = {**os.environ, "KUBECONFIG": str(self._folder / "kubeconfig"), "HOME": str(self._folder)}
        done = await asyncio.to_thread(
            subprocess.run,
            ["kubectl", *words],
            input=given,
            env=around,
            cwd=self._folder,
            timeout=60,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return str(done.stdout + done.stderr)


@pytest_asyncio.fixture
async def terminal(tmp_path: Path) -> AsyncIterator[Terminal]:
    async with bed(tmp_path, {"n1": 4, "n2": 4}) as cluster:
        yield Terminal(cluster, tmp_path)


async def test_the_documents_job_is_applied_shown_scaled_and_deleted(terminal: Terminal) -> None:
    cluster = terminal.cluster
    async with cluster.operator():
        assert "trainingjob.regrow.dev/gpt created" in await terminal.says("apply", "-f", "job.yaml")
        await cluster.until(lambda: cluster.status("gpt").get("replicas", 0) >= 2, "the gang runs")
        head, line = (await terminal.says("get", "tj", "-n", "team")).splitlines()
        assert head.split() == ["NAME", "PHASE", "REPLICAS", "WANTED", "PENDING", "STEP", "GOODPUT", "AGE"]
        name, phase, running, wanted, *_ = line.split()
        assert (name, phase, wanted) == ("gpt", "Training", "8") and int(running) >= 2
        assert "gpt scaled" in await terminal.says("scale", "tj", "gpt", "-n", "team", "--replicas", "2")
        smaller = {"replicas": 2, "desiredReplicas": 2}
        await cluster.until(lambda: smaller.items() <= cluster.status("gpt").items(), "it is made smaller")
        told = await terminal.says("describe", "tj", "gpt", "-n", "team")
        assert "2 of 2 replicas run" in told and re.search(r"Phase: +Training", told)
        assert "unchanged" in await terminal.says("apply", "-f", "job.yaml")
        lost = {each["metadata"]["uid"] for each in cluster.pods("Running")}
        assert "deleted" in await terminal.says("delete", "pod", "-n", "team", "-l", "regrow.dev/place=1")
        await cluster.until(
            lambda: len([each for each in cluster.pods("Running") if each["metadata"]["uid"] not in lost]) == 1,
            "another pod is made",
        )
        assert '"gpt" deleted' in await terminal.says("delete", "tj", "gpt", "-n", "team")
        await cluster.until(lambda: not cluster.pods(), "all is gone")


async def test_every_field_is_explained(terminal: Terminal) -> None:
    told = await terminal.says("explain", "tj.spec")
    fields = re.findall(r"^  (\w+)\t<", told, re.MULTILINE)
    assert {"replicaCount", "maxReplicaCount", "script", "template", "kueue"} <= set(fields)
    lines = told.split("FIELDS:")[1]
    for name in fields:
        said = re.search(rf"^  {name}\t.*\n((?:    .*\n|  enum: .*\n|  default: .*\n)+)", lines, re.MULTILINE)
        assert said is not None and len(said.group(1).strip()) > 10, f"{name} has no description"
    assert "queueName\t<string> -required-" in await terminal.says("explain", "tj.spec.kueue")


async def test_what_cannot_be_is_refused_by_its_field(terminal: Terminal) -> None:
    for old, new, says in (
        ("maxReplicaCount:", "maxReplicasCount:", 'unknown field "spec.maxReplicasCount"'),
        ("replicaCount: 2", "replicaCount: 0", "spec.replicaCount"),
        ("ranksPerPod: 8", "ranksPerPod: many", "spec.ranksPerPod"),
        ("replicaCount: 2", "replicaCount: 2\n  backend: slurm", "spec.backend"),
    ):
        assert says in await terminal.says("apply", "-f", "-", given=terminal.job.replace(old, new), code=1)
    assert terminal.cluster.store.all_of("trainingjobs") == []


async def test_the_operators_manifests_are_applied(terminal: Terminal) -> None:
    text = as_text(manifests(namespace="regrow-system", image="registry.example/regrow:1"))
    told = await terminal.says("apply", "-f", "-", given=text)
    assert told.count(" created") == 8 and "deployment.apps/regrow-operator created" in told
    assert await terminal.says("get", "deployment", "regrow-operator", "-n", "regrow-system")
