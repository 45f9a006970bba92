"""Init containers that fail are told, by the rules of Kubernetes' pages on init and on sidecar containers."""

from typing import Any

import pytest
from tests.cluster.turned import TurnedJob

DOWNLOAD = {"name": "download", "image": "team/data:1"}
PROXY = {"name": "proxy", "image": "team/proxy:1", "restartPolicy": "Always"}
"""A sidecar: an init container that is restarted whenever it ends, for as long as the pod lasts."""
PROBED = PROXY | {"startupProbe": {"httpGet": {"port": 80}}}


def with_inits(*inits: dict[str, Any], **more: Any) -> TurnedJob:
    containers = [{"name": "train", "image": "team/train:1"}]
    return TurnedJob(template={"spec": {"initContainers": list(inits), "containers": containers}}, **more)


@pytest.mark.parametrize(
    ("init", "how", "reason"),
    [
        (DOWNLOAD, "ImagePullBackOff", "Init:ImagePullBackOff"),
        (DOWNLOAD, "CreateContainerConfigError", "Init:CreateContainerConfigError"),
        (DOWNLOAD, 3, "Init:Error"),
        (DOWNLOAD | {"restartPolicy": "OnFailure"}, 3, "Init:CrashLoopBackOff"),  # of its own, from 1.34 on
        (PROBED, 1, "Init:CrashLoopBackOff"),
    ],
)
def test_an_init_container_that_fails_is_named_until_it_is_mended(init: dict[str, Any], how: Any, reason: str) -> None:
    job = with_inits(init)
    job.kubelets.inits[init["name"]] = how
    job.until(lambda: job.condition("PodsStart").get("reason") == reason)
    said = job.condition("PodsStart")
    assert said["status"] == "False" and f"init container {init['name']} " in said["message"]
    assert ("kubectl logs job-" in said["message"]) == isinstance(how, int)
    job.kubelets.inits.clear()
    job.until(lambda: job.status()["phase"] == "Training" and job.status()["replicas"] == 2, within=900)
    assert job.condition("PodsStart")["status"] == "True"


def test_between_two_tries_the_failure_of_an_init_container_stands() -> None:
    job = with_inits(DOWNLOAD)
    job.kubelets.inits["download"] = 3
    job.until(lambda: int(job.status().get("failures", 0)) >= 4, within=300)
    job.until(lambda: not job.pods())
    job.turns(5)
    assert not job.pods() and job.condition("PodsStart")["reason"] == "Init:Error"


def test_an_init_container_of_a_replica_by_which_a_job_grows_says_nothing_of_those_that_train() -> None:
    job = with_inits(DOWNLOAD, maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    job.kubelets.inits["download"] = 3
    job.store.delete("pods", "team", job.at(2)["metadata"]["name"])
    job.until(lambda: job.condition("PodsStart")["reason"] == "Init:Error")
    job.turns(60)
    assert (job.status()["phase"], job.status()["replicas"], job.status()["attempt"]) == ("Training", 2, 1)
    assert not job.status().get("badNodes")


@pytest.mark.parametrize("init", [PROXY, PROBED])
def test_a_sidecar_that_is_restarted_beside_a_training_is_no_trouble(init: dict[str, Any]) -> None:
    job = with_inits(init)
    job.until(lambda: job.trains(1))
    for reason in ("CrashLoopBackOff", "ImagePullBackOff"):
        again = [{"name": "proxy", "state": {"waiting": {"reason": reason}}, "restartCount": 7}]
        name = job.at(1)["metadata"]["name"]
        job.store.patch("pods", "team", name, {"status": {"initContainerStatuses": again}}, part="status")
        job.turns(3)
        assert job.trains(1) and job.condition("PodsStart")["status"] == "True"


def test_a_sidecar_that_is_restarted_while_a_later_init_container_works_is_no_trouble() -> None:
    job = with_inits(PROXY, DOWNLOAD)
    job.kubelets.inits |= {"proxy": 3, "download": "runs"}
    job.turns(60)
    assert job.condition("PodsStart")["status"] == "True"
    job.kubelets.inits["download"] = 3
    job.until(lambda: job.condition("PodsStart")["reason"] == "Init:Error")
    assert "init container download ended" in job.condition("PodsStart")["message"], "the sidecar has the same code"


def test_an_init_container_that_an_eviction_has_ended_is_no_trouble() -> None:
    job = with_inits(DOWNLOAD)
    job.kubelets.inits["download"] = "runs"
    job.until(lambda: len(job.pods("Pending")) == 2 and all("nodeName" in job.at(place)["spec"] for place in (0, 1)))
    ended = {"name": "download", "state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
    status = {"phase": "Failed", "reason": "Evicted", "initContainerStatuses": [ended]}
    job.store.patch("pods", "team", job.at(1)["metadata"]["name"], {"status": status}, part="status")
    for _ in range(20):
        job.turn()
        assert job.condition("PodsStart")["status"] == "True"
    job.kubelets.inits["download"] = 143
    job.until(lambda: job.condition("PodsStart")["reason"] == "Init:Error")
