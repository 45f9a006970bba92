"""A kubelet that runs pods' commands as processes of this machine, all of them at one address.

A node can be lost, by its power or by its network. Its kubelet says nothing any more then: pods stay as the API server
knew them, are deleted when their tolerations are over, and are there until somebody deletes them by force.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
from tests.cluster.fake_store import FakeStore, Manifest
from tests.process.launching import warm
from tests.process.warm_client import WarmProcess

_HERE = "127.0.0.1"
_ENDED = ("Succeeded", "Failed")


class FakeKubelet:
    """`folder`: where pods run; each has its own output file and state folder in it."""

    def __init__(self, store: FakeStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self.processes: dict[str, WarmProcess] = {}
        """By the pod's name. Forked from a process that has imported what pods import."""
        self._node: dict[str, str] = {}
        self._told: set[str] = set()
        self._lost: dict[str, float] = {}
        """Since when, by the node."""
        self._stopped: dict[str, list[int]] = {}
        """Processes of nodes that are cut off, by the node."""
        self.other_images: set[str] = set()
        """Those in which is another regrow: it does not know a flag of the commands that this operator gives."""

    def be_ready(self) -> None:
        """Pods start at once from now on, and nothing else of this process waits for it."""
        with open(os.devnull, "r+") as nothing:
            streams = (nothing.fileno(),) * 3
            warm().start("regrow", ["--version"], cwd=str(self._folder), env=os.environ, streams=streams).wait(180)

    def power_off(self, node: str) -> None:
        """All that runs there ends at once, and nobody is told."""
        for pid in self._stop(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, name: str) -> None:
        """All that runs in a pod ends at once, as when its memory is over; the kubelet sees that."""
        mark = os.fsencode(f"REGROW_HOME={self._folder / name}.home")
        for pid in self._frozen({mark}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def fall_silent(self, node: str) -> None:
        """The kubelet there is dead, and what it has started goes on."""
        self._lost[node] = self._store.wall()

    def cut(self, node: str) -> None:
        """Nothing there says or hears anything until `join`; as its processes are stopped, their time stands still."""
        self._stopped[node] = self._stop(node)

    def join(self, node: str) -> None:
        """Let a node's processes go on; its kubelet stays silent, so it is not the kubelet that ends them."""
        for pid in self._stopped.pop(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def running(self) -> list[int]:
        """All processes of pods there are, of whatever node."""
        marks = os.fsencode(f"REGROW_HOME={self._folder}/")
        return [pid for pid in psutil.pids() if any(each.startswith(marks) for each in _environ(pid))]

    def turn(self) -> None:
        """Start what is bound, ask to end what is deleted, say what has ended."""
        for pod in self._store.all_of("pods"):
            meta, phase = pod["metadata"], pod["status"]["phase"]
            name, deleted = meta["name"], meta.get("deletionTimestamp")
            process = self.processes.get(name)
            if process is not None and self._node[name] not in self._lost:
                self._mounted(pod)
            since = self._lost.get(pod["spec"].get("nodeName", ""))
            if since is not None:
                if not deleted and self._store.wall() - since >= _tolerated(pod):
                    self._store.delete("pods", meta["namespace"], name)
                continue
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
            code = process.poll()
            if code is not None and (deleted or phase not in _ENDED):
                self._ended(pod, code, deleted=bool(deleted))
        known = {each["metadata"]["name"] for each in self._store.all_of("pods")}
        for name in [each for each in self.processes if each not in known and self._node.get(each) not in self._lost]:
            self.processes.pop(name).kill()

    def output(self, name: str) -> str:
        """Output of a pod until now."""
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Nothing of the pods stays."""
        for node in list(self._stopped):
            self.join(node)
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _stop(self, node: str) -> list[int]:
        """None of them sees another one's end; a process that is just being made is found in the next round."""
        self._lost[node] = self._store.wall()
        marks = {
            os.fsencode(f"REGROW_HOME={self._folder / name}.home") for name, at in self._node.items() if at == node
        }
        return self._frozen(marks)

    def _frozen(self, marks: set[bytes]) -> list[int]:
        stopped: list[int] = []
        while more := [pid for pid in psutil.pids() if pid not in stopped and marks.intersection(_environ(pid))]:
            for pid in more:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped += more
        return stopped

    def _start(self, pod: Manifest) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]
        env = {**os.environ, "REGROW_HOME": str(self._folder / f"{meta['name']}.home"), "POD_IP": _HERE}
        for each in container.get("env", []):
            if "value" in each:
                env[each["name"]] = each["value"]
            if label := re.fullmatch(r"metadata\.labels\['(.+)'\]", _field_path(each)):
                env[each["name"]] = meta["labels"].get(label.group(1), "")
            source = each.get("valueFrom", {}).get("secretKeyRef")
            if source is not None:
                secret = self._store.get("secrets", meta["namespace"], source["name"])
                env[each["name"]] = secret["stringData"][source["key"]]
        names = {f"{each['metadata']['name']}.{meta['namespace']}.svc" for each in self._store.all_of("services")}
        names |= {f"{at['hostname']}.{at['subdomain']}" for at in self._specs() if at.get("subdomain")}
        given = [*container["command"], *container.get("args", [])]
        given += ["--of-another-version"] if container.get("image") in self.other_images else []
        words = [self._resolved(word, names, env) for word in given]
        for there, here in self._mounted(pod).items():
            words = [word.replace(there, str(here)) for word in words]
        with (self._folder / f"{meta['name']}.log").open("wb") as log, open(os.devnull) as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            module, *rest = words
            self.processes[meta["name"]] = warm().start(module, rest, cwd=str(self._folder), env=env, streams=streams)
        self._node[meta["name"]] = pod["spec"]["nodeName"]
        state = {"name": container["name"], "state": {"running": {"startedAt": self._store.stamp()}}}
        status = {"phase": "Running", "podIP": _HERE, "containerStatuses": [state]}
        self._store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")

    def _mounted(self, pod: Manifest) -> dict[str, Path]:
        """Volumes of the downward API, with the pod's annotations as they are now: where they are for it, and here."""
        mounts = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0].get("volumeMounts", [])}
        found = {}
        for volume in (each for each in pod["spec"].get("volumes", []) if "downwardAPI" in each):
            folder = found[mounts[volume["name"]]] = self._folder / f"{pod['metadata']['name']}.{volume['name']}"
            folder.mkdir(exist_ok=True)
            for item in volume["downwardAPI"]["items"]:
                key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", item["fieldRef"]["fieldPath"])
                assert key is not None
                said = (pod["metadata"].get("annotations") or {}).get(key.group(1), "")
                (folder / f".{item['path']}").write_text(said)
                (folder / f".{item['path']}").replace(folder / item["path"])
        return found

    def _specs(self) -> list[Manifest]:
        return [each["spec"] for each in self._store.all_of("pods")]

    def _resolved(self, word: str, names: set[str], env: dict[str, str]) -> str:
        """With variables, and with addresses in the place of names that the cluster's DNS knows."""
        word = re.sub(r"\$\((\w+)\)", lambda name: env.get(name.group(1), name.group(0)), word)
        for each in names:
            word = word.replace(each, _HERE)
        return word

    def _ended(self, pod: Manifest, code: int, *, deleted: bool) -> None:
        meta = pod["metadata"]
        number = 128 - code if code < 0 else code
        ended = {"exitCode": number, "reason": "Error" if number else "Completed", "finishedAt": self._store.stamp()}
        status = {
            "phase": "Failed" if number else "Succeeded",
            "containerStatuses": [{"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": ended}}],
        }
        if pod["status"]["phase"] not in _ENDED:
            self._store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")
        if deleted:
            self.processes.pop(meta["name"])
            self._store.delete("pods", meta["namespace"], meta["name"], grace=0)


def _tolerated(pod: Manifest) -> float:
    """Time for which it stays bound to an unreachable node: 300 s by default (DefaultTolerationSeconds)."""
    given = [
        each["tolerationSeconds"]
        for each in pod["spec"].get("tolerations", [])
        if each.get("key") == "node.kubernetes.io/unreachable" and "tolerationSeconds" in each
    ]
    return float(min(given, default=300))


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


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
