"""The files of deploy/quota do what they say: two teams borrow, inference takes the day and training the night."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.fake_cohort import FakeCohort
from tests.cluster.fake_nodes import FakeScheduler, SaidToRun
from tests.cluster.fake_store import FakeStore, Manifest
from tests.cluster.scheduled_operator import ScheduledOperator

from regrow_clusters.operator.commands import check_manifest
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.objects import JOB_LABEL, PLACE_LABEL

FILES = Path(__file__).parents[2] / "deploy" / "quota"
TEAMS = {"team-a": "words", "team-b": "images"}


def documents(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))


class SharedCluster:
    """8 nodes, each with room for one pod of 8 GPUs; the clock moves by a second a turn."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.store = FakeStore(lambda: self.now)
        self.store.install(crd())
        objects = documents("kueue.yaml")
        for each in objects:
            if each["kind"] == "PriorityClass":
                key = ("priorityclasses", "", each["metadata"]["name"])
                self.store.objects[key] = {**each, "metadata": {"uid": key[2], **each["metadata"]}}
        self.kueue = FakeCohort(self.store, objects)
        self.store.refuse = self._webhook
        self.scheduler = FakeScheduler(self.store, {f"n{number}": 1 for number in range(8)})
        self.kubelets = SaidToRun(self.store, lease=15.0)
        self.operator = ScheduledOperator(self.store)
        self.operator.relist()
        self.serving: Manifest = {}
        self.least = dict.fromkeys(TEAMS, 99)
        """Replicas of each team that ran, at the worst moment since they all ran."""
        for each in documents("jobs.yaml"):
            if each["kind"] == "TrainingJob":
                self.store.create("trainingjobs", each["metadata"]["namespace"], each)
            else:
                self.serving = each
        self.made = 0

    def _webhook(self, verb: str, plural: str, body: Manifest) -> None:
        if (verb, plural) == ("create", "pods"):
            self.kueue.admit_pod(body)

    def serve(self, replicas: int) -> None:
        """As the Deployment's controller does."""
        mine = [each for each in self.store.all_of("pods", "inference") if "deletionTimestamp" not in each["metadata"]]
        for pod in mine[replicas:]:
            self.store.delete("pods", "inference", pod["metadata"]["name"])
        for _ in range(replicas - len(mine)):
            self.made += 1
            body = copy.deepcopy(self.serving["spec"]["template"])
            body["metadata"]["name"] = f"chat-{self.made}"
            self.store.create("pods", "inference", body)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            self.operator.hear()
            await self.operator.look()
            self.kueue.turn()
            self.scheduler.turn()
            self.kubelets.turn()
            self.store.collect()
            for team in TEAMS:
                self.least[team] = min(self.least[team], self.running(team))

    def running(self, namespace: str) -> int:
        return sum(each["status"]["phase"] == "Running" for each in self.store.all_of("pods", namespace))

    def gang(self, team: str) -> set[str]:
        """The uids of its gang's pods."""
        found = self.store.all_of("pods", team, lambda each: JOB_LABEL in each["metadata"]["labels"])
        return {each["metadata"]["uid"] for each in found if int(each["metadata"]["labels"][PLACE_LABEL]) < 2}


@pytest.mark.full
async def test_training_takes_the_night_and_inference_the_day_and_no_gang_ever_loses_a_pod() -> None:
    cluster = SharedCluster()
    cluster.serve(1)
    await cluster.turns(300)
    assert cluster.running("inference") == 1
    assert cluster.running("team-a") + cluster.running("team-b") == 7  # by night they borrow what inference leaves
    gangs = {team: cluster.gang(team) for team in TEAMS}
    cluster.least = dict.fromkeys(TEAMS, 99)
    for day in range(2):
        cluster.serve(4)
        await cluster.turns(120)
        assert cluster.running("inference") == 4, f"day {day}"
        assert {team: cluster.running(team) for team in TEAMS} == {"team-a": 2, "team-b": 2}
        cluster.serve(1)
        await cluster.turns(300)
        assert cluster.running("team-a") + cluster.running("team-b") == 7, f"night {day}"
    assert {team: cluster.gang(team) for team in TEAMS} == gangs
    assert cluster.least == {"team-a": 2, "team-b": 2}
    statuses = [cluster.store.get("trainingjobs", team, name)["status"] for team, name in TEAMS.items()]
    assert [each["attempt"] for each in statuses] == [1, 1]


@pytest.mark.full
async def test_a_team_that_comes_late_gets_its_own_quota_back_from_who_has_borrowed_it() -> None:
    cluster = SharedCluster()
    late = cluster.store.get("trainingjobs", "team-b", "images")
    cluster.store.delete("trainingjobs", "team-b", "images")
    await cluster.turns(300)
    assert cluster.running("team-a") == 6  # its own quota and four that are idle
    cluster.serve(2)
    await cluster.turns(60)
    assert (cluster.running("team-a"), cluster.running("inference")) == (6, 2)  # all 8 nodes
    gang = cluster.gang("team-a")
    cluster.store.create("trainingjobs", "team-b", late)
    await cluster.turns(60)
    assert cluster.running("team-b") == 2 and cluster.running("team-a") == 4
    assert cluster.kueue.used("team-b") == 16
    assert cluster.gang("team-a") == gang


def test_the_files_are_jobs_that_can_be_and_fit_their_quotas() -> None:
    jobs = [each for each in documents("jobs.yaml") if each["kind"] == "TrainingJob"]
    queues = {each["metadata"]["name"]: each for each in documents("kueue.yaml") if each["kind"] == "ClusterQueue"}
    names: dict[str, set[Any]] = {}
    for each in documents("kueue.yaml"):
        names.setdefault(each["kind"], set()).add(each["metadata"]["name"])
    for job in jobs:
        check_manifest(job, "jobs.yaml", namespace="")
        spec = job["spec"]
        assert {spec["kueue"]["priorityClass"], spec["kueue"]["elasticPriorityClass"]} <= names["WorkloadPriorityClass"]
        assert {spec["priorityClassName"], spec["elasticPriorityClassName"]} <= names["PriorityClass"]
        quota = queues[job["metadata"]["namespace"]]["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]
        assert spec["replicaCount"] * 8 <= quota["nominalQuota"]  # nobody has a right to the gang
