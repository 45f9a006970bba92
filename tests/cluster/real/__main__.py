"""`REGROW_TEST_KUBECONFIG=FILE python -m tests.cluster.real`: conformance suite and scenarios on a real cluster.

It makes a namespace of its own, and the CRD where it is not there; both are taken away in the end. No operator of
regrow may work on that cluster meanwhile. `REGROW_TEST_IMAGE`: an image with Python 3 (python:3.11-slim).
`REGROW_TEST_QUEUE`: a ClusterQueue of Kueue's with room for 4 pods, which gets a LocalQueue in that namespace.
"""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_global_resource, create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Namespace
from tests.cluster.real.scenarios import CONFIG_MAP, STAND_IN

from regrow_clusters.operator.crd import crd

_FILES = ("tests/cluster/test_api_conformance.py", "tests/cluster/real/test_scenarios.py")
_CRD: Any = create_global_resource(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions"
)
_QUEUE: Any = create_namespaced_resource("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues")
_GONE_S = 300.0


def main() -> int:
    """The exit code of the tests; 0 where no cluster is named."""
    config = os.environ.get("REGROW_TEST_KUBECONFIG", "")
    if not config:
        sys.stdout.write("REGROW_TEST_KUBECONFIG names no cluster: nothing is tested\n")
        return 0
    client: Any = Client(config=KubeConfig.from_file(config).get(), field_manager="regrow-tests")
    namespace = f"regrow-test-{secrets.token_hex(3)}"
    installed = _install(client)
    try:
        client.create(Namespace(metadata=ObjectMeta(name=namespace)))
        meta = ObjectMeta(name=CONFIG_MAP, namespace=namespace)
        client.create(ConfigMap(metadata=meta, data={"regrow": STAND_IN}))
        env = {**os.environ, "REGROW_TEST_NAMESPACE": namespace}
        if queue := os.environ.get("REGROW_TEST_QUEUE", ""):
            body = {"metadata": {"name": "queue", "namespace": namespace}, "spec": {"clusterQueue": queue}}
            client.create(_QUEUE(body), namespace=namespace)
            env["REGROW_TEST_QUEUE"] = "queue"
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:randomly", *_FILES]
        return subprocess.run(words, env=env, cwd=Path(__file__).parents[3], check=False).returncode
    finally:
        _remove(client, namespace)
        if installed:
            client.delete(_CRD, crd()["metadata"]["name"])


def _install(client: Any) -> bool:
    """Install the CRD; True if it was not there."""
    try:
        client.create(_CRD(crd()))
    except ApiError as error:
        if error.status.code != 409:
            raise
        return False
    return True


def _remove(client: Any, namespace: str) -> None:
    client.delete(Namespace, namespace)
    until = time.monotonic() + _GONE_S
    while time.monotonic() < until:
        try:
            client.get(Namespace, namespace)
        except ApiError as error:
            if error.status.code == 404:
                return
            raise
        time.sleep(1.0)
    sys.stderr.write(f"{namespace} is still there after {_GONE_S:g} s: kubectl get all -n {namespace}\n")


if __name__ == "__main__":
    sys.exit(main())
