"""Checks that were made on a real control plane, as far as they are about no process; README.md has all of them."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.cluster.fake_store import Manifest
from tests.cluster.jobs import training_job
from tests.cluster.turned import TurnedJob

from regrow_clusters.operator.api import ApiKind
from regrow_clusters.operator.manifests import manifests, rules
from regrow_clusters.operator.resource import PLURAL

HERE = Path(__file__).parent


def test_each_check_and_each_defect_has_tests_that_there_are() -> None:
    lines = [each for each in (HERE / "README.md").read_text().splitlines() if each.startswith("| ")]
    rows = [each for each in lines if not each.startswith(("| ---", "| check |", "| defect |"))]
    assert len(rows) == 28 + 20
    for row in rows:
        named = re.findall(r"`([\w/-]+\.py)::(\w+)`", row)
        assert named, f"{row} names no test"
        for file, name in named:
            text = (HERE.parents[1] / file if file.startswith("packages/") else HERE.parent / file).read_text()
            assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"there is no {file}::{name}"


def test_an_operator_asks_for_nothing_that_its_manifests_do_not_allow() -> None:
    allowed = {
        (group, resource, verb)
        for each in rules()
        for group in each["apiGroups"]
        for resource in each["resources"]
        for verb in each["verbs"]
    }
    asked = set()

    def before(verb: str, kind: ApiKind, _namespace: str, _name: str) -> None:
        status = (verb, kind.value) == ("update", PLURAL)  # nothing else of a job is written
        asked.add((f"{kind.value}/status" if status else kind.value, verb))

    for quota in (None, 2):
        _live(TurnedJob(quota, topologyLabels=["example.com/rack"]), before)
    assert {(resource, verb) for resource, verb in asked if verb == "delete"} == {("pods", "delete")}
    assert asked <= {(resource, verb) for _, resource, verb in allowed}


def _live(job: TurnedJob, before: Callable[[str, ApiKind, str, str], None]) -> None:
    """All that a job may need of its operator."""
    job.operator.api.before = before
    job.until(lambda: job.status().get("phase") == "Training")
    job.store.delete("pods", "team", job.at(1)["metadata"]["name"])
    job.turns(60)
    job.store.delete("pods", "team", job.at(0)["metadata"]["name"])
    job.until(lambda: bool(job.status()["attempt"] == 2 and job.status()["phase"] == "Training"))
    job.patch(suspend=True)
    job.until(lambda: not job.pods())


def test_an_operator_may_run_under_the_strictest_pod_security() -> None:
    # Kubernetes: Pod Security Standards, Restricted.
    (made,) = [each for each in manifests(namespace="ops", image="x") if each["kind"] == "Deployment"]
    spec = made["spec"]["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] != 0
    assert spec["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
    for volume in spec["volumes"]:
        assert volume.keys() - {"name"} <= {"configMap", "emptyDir", "projected", "secret", "downwardAPI"}
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in container.get("ports", []))


def test_all_pods_of_a_job_are_deleted_by_their_label_and_the_gang_starts_anew() -> None:
    job = TurnedJob(maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    for name in job.pods():
        job.store.delete("pods", "team", name)
    job.until(lambda: job.trains(2, 3))
    assert not job.status()["badNodes"]


def test_pods_of_a_node_whose_object_is_deleted_are_made_good_elsewhere() -> None:
    # The garbage collector of pods ends those of a node that is no more: a condition, phase Failed, no grace.
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    del job.nodes.nodes[lost["spec"]["nodeName"]]
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    status = {"phase": "Failed", "conditions": [*lost["status"]["conditions"], disrupted]}
    job.store.patch("pods", "team", lost["metadata"]["name"], {"status": status}, part="status")
    job.turn()
    if lost["metadata"]["name"] in job.pods():
        job.store.delete("pods", "team", lost["metadata"]["name"], grace=0)
    job.until(lambda: job.trains(1))
    assert job.at(1)["spec"]["nodeName"] != lost["spec"]["nodeName"]


def test_a_job_that_is_deleted_in_the_foreground_goes_after_all_that_it_owns() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    job.store.patch("trainingjobs", "team", "job", {"metadata": {"finalizers": ["foregroundDeletion"]}})
    job.store.delete("trainingjobs", "team", "job")
    made = set(job.pods())
    job.until(lambda: ("trainingjobs", "team", "job") not in job.store.objects)
    assert (
        not job.pods() and {each.new["metadata"]["name"] for each in job.store.history if each.plural == "pods"} == made
    )
    assert not [key for key in job.store.objects if key[0] not in ("events", "queues")]


def test_pods_that_a_deleted_job_leaves_as_orphans_train_on_beside_the_next_job_of_its_name() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    orphans = set(job.pods())
    for plural in ("pods", "services", "secrets", "poddisruptionbudgets"):
        for each in job.store.all_of(plural, "team"):
            left: Manifest = {"metadata": {"ownerReferences": None}}
            job.store.patch(plural, "team", each["metadata"]["name"], left)
    job.store.delete("trainingjobs", "team", "job")
    job.turns(5)
    job.store.create("trainingjobs", "team", training_job(replicaCount=2))
    job.until(lambda: (job.status().get("phase"), job.status().get("replicas")) == ("Training", 2))
    assert len(job.pods("Running")) == 4 and orphans < set(job.pods("Running"))
