"""Another operator than the one that began a job: trainings go on; pods of another regrow are told of, not ended."""

import signal
from pathlib import Path

import pytest
from tests.cluster.bed import bed
from tests.cluster.operators import operators
from tests.cluster.trained import TrainedJob, micro_job
from tests.cluster.turned import TurnedJob

from regrow.core.exit_codes import OK, USAGE
from regrow_clusters.operator.crd import crd

OTHER = "team/train:2"


def image(name: str) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "train", "image": name}]}}


@pytest.mark.full
async def test_an_operator_is_upgraded_under_a_training_that_then_loses_a_pod_and_ends_with_all_its_bits(
    tmp_path: Path,
) -> None:
    async with bed(tmp_path, {"n1": 2}, real=True) as cluster, operators(cluster, tmp_path, 0) as candidates:
        cluster.store.install(candidates.older_crd())
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=1, maxReplicaCount=2))
        candidates.start_older()
        older = await candidates.leader()
        await job.until_world(2)
        await cluster.until(lambda: "changedAt" in cluster.status(), "it has said so in its words")
        assert "lastChangeTime" not in cluster.status()
        began = {place: job.at(place)["metadata"]["uid"] for place in (0, 1)}
        # As the runbook has it: the CRD first, then the Deployment, which starts the new one before the old one ends.
        cluster.store.install(crd())
        candidates.start()
        older.send_signal(signal.SIGTERM)
        await cluster.until(lambda: older.poll() is not None and candidates.holder() not in (None, older), "it leads")
        assert older.returncode == OK
        await cluster.until(lambda: "lastChangeTime" in cluster.status(), "the new one has looked at the job")
        assert "changedAt" not in cluster.status()
        await job.until_world(2)
        assert {place: job.at(place)["metadata"]["uid"] for place in (0, 1)} == began, "nobody was touched"
        # The next replica has an image with another regrow, whose agent does not know a flag that it is given.
        cluster.kubelet.other_images.add(OTHER)
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"template": image(OTHER)}})
        cluster.store.delete("pods", "team", job.at(1)["metadata"]["name"])
        await cluster.until(lambda: cluster.condition("ReplicasJoin").get("status") == "False", "that is told")
        told = cluster.condition("ReplicasJoin")["message"]
        assert f"its image is {OTHER}, and pod 0 has team/train:1" in told
        await job.until_world(1)
        assert job.at(0)["metadata"]["uid"] == began[0], "who trains is left alone"
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"template": image("team/train:1")}})
        await job.until_world(2)
        job.let_go()
        await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
        assert cluster.status()["attempt"] == 1
        job.assert_undisturbed(2)
        await job.assert_no_orphan()


def test_a_replica_of_another_regrow_is_told_of_until_all_have_joined_and_nobody_who_trains_is_ended() -> None:
    job = TurnedJob(maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    assert job.condition("ReplicasJoin") == {}
    began = [job.at(place)["metadata"]["uid"] for place in (0, 1)]
    job.patch(template=image(OTHER))
    job.kubelets.end(job.at(2), 137)
    job.until(lambda: len(job.pods("Running")) == 3)
    assert job.condition("ReplicasJoin") == {}, "it was killed, not refused"
    job.kubelets.end(job.at(2), USAGE)
    job.until(lambda: job.condition("ReplicasJoin").get("status") == "False")
    assert f"its image is {OTHER}, and pod 0 has team/train:1" in job.condition("ReplicasJoin")["message"]
    job.until(lambda: len(job.pods("Running")) == 3)
    job.until(lambda: job.condition("ReplicasJoin")["status"] == "True")
    assert [job.at(place)["metadata"]["uid"] for place in (0, 1)] == began


def test_a_replica_with_pod_0s_image_that_is_refused_names_the_log_that_says_why() -> None:
    job = TurnedJob(maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    lost = job.at(2)["metadata"]["name"]
    job.kubelets.end(job.at(2), USAGE)
    job.until(lambda: job.condition("ReplicasJoin").get("status") == "False")
    assert f"kubectl logs {lost} says why" in job.condition("ReplicasJoin")["message"]
    job.kubelets.end(job.at(0), OK)
    job.until(lambda: job.status()["phase"] == "Succeeded")
    job.until(lambda: job.condition("ReplicasJoin")["status"] == "True")
