"""JobSet's controller, and the Job controller below it: one Indexed Job, whose pods are replaced one by one.

After kubernetes-sigs/jobset (0.12) and Kubernetes' documents about Jobs: podFailurePolicy (the first rule that fits),
podReplacementPolicy Failed, successPolicy by index, failurePolicy of the set (the first rule that fits, else all anew).
`from_train_job` is what Kubeflow Trainer (2.3) makes of a runtime and a TrainJob.
"""

import copy
import re
from typing import Any

from tests.cluster.fake_store import FakeStore, Manifest

_INDEX = "batch.kubernetes.io/job-completion-index"
_INT32 = 2**31 - 1


class FakeJobSet:
    """One JobSet of a cluster's namespace `team`, from when it is made."""

    def __init__(self, store: FakeStore, found: Manifest) -> None:
        self._store, self._spec = store, found["spec"]
        self._name = found["metadata"]["name"]
        (self._replicated,) = self._spec["replicatedJobs"]
        self._job = self._replicated["template"]["spec"]
        self.made: list[int] = []
        """Index of each pod that was ever made."""
        self.restarts = 0
        self.failures = 0
        self.condition = ""
        """Completed or Failed, once it has ended."""
        self.message = ""
        self._counted: set[str] = set()
        self._serial = 0
        self._ending = False
        subdomain = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {}, "ports": []}
        store.create("services", "team", {"metadata": {"name": self._name}, "spec": subdomain})

    def turn(self) -> None:
        """Look once."""
        pods = [each for each in self._store.all_of("pods", "team") if _INDEX in each["metadata"]["labels"]]
        if self._ending:
            for pod in pods:
                self._store.delete("pods", "team", pod["metadata"]["name"], grace=0)
            if pods:
                return
            self._ending, self.failures = False, 0
        if self.condition:
            return
        done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        if any(_all_of(rule["succeededIndexes"]) <= done for rule in self._job["successPolicy"]["rules"]):
            self.condition = "Completed"
            return
        for pod in pods:
            if pod["status"]["phase"] == "Failed" and pod["metadata"]["uid"] not in self._counted:
                self._counted.add(pod["metadata"]["uid"])
                if self._failed(pod):
                    return
        there = {_index(pod) for pod in pods if pod["status"]["phase"] != "Failed"}
        for index in sorted(set(range(self._job["completions"])) - there):
            self._make(index)

    def _failed(self, pod: Manifest) -> bool:
        """Judge a pod that has failed; True: the Job has failed by it."""
        (state,) = pod["status"]["containerStatuses"]
        code = state["state"]["terminated"]["exitCode"]
        for rule in self._job["podFailurePolicy"]["rules"]:
            if not _fits(rule, pod, state["name"], code):
                continue
            if rule["action"] == "FailJob":
                text = f"Container {state['name']} for pod team/{pod['metadata']['name']} failed with exit code {code}"
                self._job_failed("PodFailurePolicy", f"{text} matching FailJob rule at index 2")
                return True
            return False  # Ignore
        self.failures += 1
        if self.failures > self._job["backoffLimit"]:
            self._job_failed("BackoffLimitExceeded", "Job has reached the specified backoff limit")
            return True
        return False

    def _job_failed(self, reason: str, message: str) -> None:
        self.message = message
        policy = self._spec["failurePolicy"]
        for rule in policy["rules"]:
            known = reason in rule["onJobFailureReasons"]
            if known and any(re.search(each, message) for each in rule["onJobFailureMessagePatterns"]):
                assert rule["action"] == "FailJobSet"
                self.condition = "Failed"
                return
        if self.restarts >= policy["maxRestarts"]:
            self.condition = "Failed"
            return
        self.restarts += 1
        self._ending = True

    def _make(self, index: int) -> None:
        self._serial += 1
        host = f"{self._name}-{self._replicated['name']}-0-{index}"
        spec = copy.deepcopy(self._job["template"]["spec"])
        spec["hostname"], spec["subdomain"] = host, self._spec["network"].get("subdomain", self._name)
        by_label = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}
        spec["containers"][0]["env"].append({"name": "JOB_COMPLETION_INDEX", "valueFrom": by_label})
        labels = {"jobset.sigs.k8s.io/jobset-name": self._name, _INDEX: str(index)}
        self._store.create(
            "pods", "team", {"metadata": {"name": f"{host}-{self._serial}", "labels": labels}, "spec": spec}
        )
        self.made.append(index)


def from_train_job(runtime: Manifest, train_job: Manifest, status_env: dict[str, str]) -> Manifest:
    """The JobSet that Kubeflow Trainer makes. `status_env`: variables of its status server."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    (replicated,) = spec["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    job, trainer, name = replicated["template"]["spec"], train_job["spec"]["trainer"], train_job["metadata"]["name"]
    job["parallelism"] = job["completions"] = trainer["numNodes"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["name"] == "node" and runtime["spec"]["mlPolicy"]["torch"] == {}
    container["args"] = trainer["args"]
    port = {"PET_MASTER_PORT": str(train_job["port"])}  # the real one has always 29400
    given = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        **port,
        **status_env,
    }
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{_INDEX}']"}}
    container["env"] += [{"name": key, "value": text} for key, text in given.items()]
    container["env"] += [{"name": "PET_NODE_RANK", "valueFrom": index}, *trainer.get("env", [])]
    return {"metadata": {"name": name}, "spec": spec}


def _index(pod: Manifest) -> int:
    return int(pod["metadata"]["labels"][_INDEX])


def _all_of(indexes: str) -> set[int]:
    return {int(each) for each in indexes.split(",")}


def _fits(rule: dict[str, Any], pod: Manifest, container: str, code: int) -> bool:
    if "onPodConditions" in rule:
        said = {(each["type"], each["status"]) for each in pod["status"].get("conditions", [])}
        return any((each["type"], each["status"]) in said for each in rule["onPodConditions"])
    exits = rule["onExitCodes"]
    assert exits["operator"] == "In"
    return container == exits["containerName"] and code in exits["values"]
