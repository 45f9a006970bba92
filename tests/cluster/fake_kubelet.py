"""A kubelet that runs pods' commands as processes of this machine, all of them at one address."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.fake_store import FakeStore, Manifest

_HERE = "127.0.0.1"
_ENDED = ("Succeeded", "Failed")


class FakeKubelet:
    """`folder`: where pods run; each has its own output file and state folder in it."""

    def __init__(self, store: FakeStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By the pod's name."""
        self._told: set[str] = set()

    def turn(self) -> None:
        """Start what is bound, ask to end what is deleted, say what has ended."""
        for pod in self._store.all_of("pods"):
            meta, phase = pod["metadata"], pod["status"]["phase"]
            name, deleted = meta["name"], meta.get("deletionTimestamp")
            process = self.processes.get(name)
            if process is None:
                if deleted:
                    self._store.delete("pods", meta["namespace"], name, grace=0)
                elif pod["spec"].get("nodeName") and phase == "Pending":
                    self._start(pod)
                continue
            if deleted and name not in self._told:
                self._told.add(name)
                process.send_signal(signal.SIGTERM)
            if deleted and self._store.stamp() > deleted:
                process.kill()
            if process.poll() is not None and (deleted or phase not in _ENDED):
                self._ended(pod, process.returncode, deleted=bool(deleted))
        known = {each["metadata"]["name"] for each in self._store.all_of("pods")}
        for name in [each for each in self.processes if each not in known]:
            self.processes.pop(name).kill()

    def output(self, name: str) -> str:
        """What a pod has said so far."""
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Nothing of the pods stays."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, pod: Manifest) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        env = {**os.environ, "REGROW_HOME": str(self._folder / f"{meta['name']}.home"), "POD_IP": _HERE}
        for each in container.get("env", []):
            if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", _field_path(each)):
                env[each["name"]] = meta["labels"].get(label.group(1), "")
            source = each.get("valueFrom", {}).get("secretKeyRef")
            if source is not None:
                secret = self._store.get("secrets", meta["namespace"], source["name"])
                env[each["name"]] = secret["stringData"][source["key"]]
        services = {f"{each['metadata']['name']}.{meta['namespace']}.svc" for each in self._store.all_of("services")}
        words = [self._resolved(word, services, env) for word in container["command"]]
        with (self._folder / f"{meta['name']}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=self._folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes[meta["name"]] = process
        state = {"state": {"running": {"startedAt": self._store.stamp()}}}
        status = {"phase": "Running", "podIP": _HERE, "containerStatuses": [state]}
        self._store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")

    def _resolved(self, word: str, services: set[str], env: dict[str, str]) -> str:
        for service in services:
            word = word.replace(service, _HERE)
        return re.sub(r"\$\((\w+)\)", lambda name: env.get(name.group(1), name.group(0)), word)

    def _ended(self, pod: Manifest, code: int, *, deleted: bool) -> None:
        meta = pod["metadata"]
        if deleted:
            self.processes.pop(meta["name"])
            self._store.delete("pods", meta["namespace"], meta["name"], grace=0)
            return
        number = 128 - code if code < 0 else code
        ended = {"exitCode": number, "reason": "Error" if number else "Completed", "finishedAt": self._store.stamp()}
        status = {
            "phase": "Failed" if number else "Succeeded",
            "containerStatuses": [{"state": {"terminated": ended}}],
        }
        self._store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")


def _field_path(variable: Manifest) -> str:
    return str(variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", ""))


def kubeconfig(address: str, namespace: str = "team") -> str:
    """The text of a file for KUBECONFIG."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": address}}],
            "users": [{"name": "fake", "user": {"token": "none"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
        }
    )
