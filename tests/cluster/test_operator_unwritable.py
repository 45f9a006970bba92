"""The operator as its Deployment runs it: nobody's user, no home, a root in which nothing can be written, no /tmp."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import KEY, bed
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.jobs import training_job
from tests.sources import PYTHONPATH
from tests.surroundings.places import can_unshare, needs_root

from regrow.core.exit_codes import OK
from regrow_clusters.operator.manifests import manifests

HIDDEN = "for place in /tmp /var/tmp /usr/tmp /dev/shm; do test ! -d $place || mount -t tmpfs -o ro t $place; done"


def its_pod() -> Any:
    """Specification of the Deployment's pods."""
    (found,) = [each for each in manifests(namespace="team", image="regrow:1") if each["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]


def in_its_place(folder: Path, pod: Any) -> list[str]:
    """Words before a command that runs as its container does. What is in `folder` is in /mnt there."""
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"], "else there is nothing to show"
    assert {each["readOnly"] for each in container["volumeMounts"]} == {True}, "nor has it a folder of its own"
    user, group = pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]
    lines = [
        *("set -e", "mount --make-rprivate /", f"mount --bind {folder} /mnt", "mount -o remount,ro,bind /mnt"),
        *(HIDDEN, "mount -o remount,ro,bind /", "cd /"),
        f'exec unshare --user --map-user={user} --map-group={group} -- "$@"',
    ]
    return ["unshare", "-m", "bash", "-c", "\n".join(lines), "bash"]


@needs_root
@pytest.mark.skipif(
    sys.prefix.startswith(("/tmp/", "/var/tmp/", "/mnt")), reason="this Python lies where the operator would see none"
)
@pytest.mark.skipif(not can_unshare("-m") or not can_unshare("--user"), reason="no namespaces can be made here")
async def test_the_operator_works_as_nobody_where_nothing_can_be_written(tmp_path: Path) -> None:
    pod, said = its_pod(), tmp_path / "operator.log"
    async with bed(tmp_path, {"n1": 4}) as cluster:
        (tmp_path / "key").write_bytes(KEY)
        (tmp_path / "kubeconfig").write_text(kubeconfig(cluster.address))
        # As in deploy/Dockerfile; a container has no other variables.
        given = {"PYTHONDONTWRITEBYTECODE": "1", "REGROW_HOME": "/tmp/regrow", "PATH": os.environ["PATH"]}
        env = given | {"PYTHONPATH": PYTHONPATH, "KUBECONFIG": "/mnt/kubeconfig"}
        words = [sys.executable, "-m", "regrow", "operator", "run", "--key-file=/mnt/key", "--namespace=team"]
        tries = "import tempfile; tempfile.TemporaryFile()"
        refused = [*in_its_place(tmp_path, pod), sys.executable, "-c", tries]
        assert subprocess.run(refused, env=env, capture_output=True, check=False).returncode == 1, "it can be written"
        with said.open("wb") as log:
            operator = subprocess.Popen([*in_its_place(tmp_path, pod), *words], env=env, stdout=log, stderr=log)
        try:
            cluster.store.create("trainingjobs", "team", training_job(maxReplicaCount=3))

            def trains() -> bool:
                assert operator.poll() is None, said.read_text()
                return (cluster.status().get("phase"), cluster.status().get("replicas")) == ("Training", 3)

            await cluster.until(trains, "it has made the pods")
            operator.send_signal(signal.SIGTERM)
            await cluster.until(lambda: operator.poll() is not None, "it ends")
            assert operator.returncode == OK and "Traceback" not in said.read_text(), said.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                operator.kill()
            await asyncio.to_thread(operator.wait)
