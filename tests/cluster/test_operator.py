"""The operator over HTTP, with lightkube: what it makes, how soon, and what it says of what cannot be."""

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner
from tests.cluster.bed import KEY, Bed, bed
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import Refused
from tests.cluster.jobs import training_job

from regrow.cli.tree import commands
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.leadership import Leadership
from regrow_clusters.operator.objects import NODE_RANK, TOPOLOGY

SMALL: dict[str, Any] = {"replicaCount": 2, "maxReplicaCount": 4, "maxPendingReplicas": 2}
SMALL["scaleUpSnoozeTimeInSeconds"] = 0


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Bed]:
    async with bed(tmp_path, {"n1": 2, "n2": 2, "n3": 2}) as made:
        yield made


async def test_a_job_gets_its_gang_grows_and_a_lost_pod_is_replaced_at_once(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.operator(resync_every=600.0):
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "all replicas run")
        await cluster.until(lambda: cluster.status().get("replicas") == 4, "it says so")
        gang = cluster.store.get("pods", "team", "job-1-0-1")
        command = gang["spec"]["containers"][0]["command"]
        assert command[:4] == ["regrow", "run", "--job=job", "--nnodes=2:4"]
        assert command[-1] == "train.py"
        assert gang["metadata"]["ownerReferences"][0]["controller"] is True
        joiner = next(each for each in cluster.pods() if each["metadata"]["labels"]["regrow.dev/place"] == "3")
        assert joiner["spec"]["containers"][0]["command"][:2] == ["regrow", "agent"]
        cluster.store.delete("pods", "team", joiner["metadata"]["name"], grace=0)
        # At once, for nobody looks at all jobs again; benchmarks/operator_cost.py has the figure.
        await cluster.until(lambda: len(cluster.pods()) == 4, "another is made")
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 2}})
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "it is made smaller")
        assert {each["metadata"]["labels"]["regrow.dev/place"] for each in cluster.pods("Running")} == {"0", "1"}
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 1}})
        told = (
            "spec.replicas is 1, and the job never has fewer than replicaCount (2): it has 2; lower spec.replicaCount"
        )
        await cluster.until(lambda: told in cluster.condition("SpecValid")["message"], "it says so")
        assert len(cluster.pods("Running")) == 2
        cluster.store.delete("trainingjobs", "team", "job")
        await cluster.until(lambda: not cluster.pods(), "everything it owned is gone")
        assert cluster.store.all_of("secrets") == cluster.store.all_of("services") == []


async def test_cut_watches_lost_history_and_an_api_server_that_is_away_are_lived_through(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.operator():
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "all replicas run")
        cluster.fake.down = True
        cluster.store.delete("pods", "team", cluster.pods("Running")[-1]["metadata"]["name"], grace=0)
        cluster.store.compact()
        before = len(cluster.fake.requests)
        cluster.fake.cut()
        await cluster.until(lambda: len(cluster.fake.requests) > before, "it is asked for while it is away")
        cluster.fake.down = False
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "all replicas run again")
        cluster.fake.cut()
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 3}})
        await cluster.until(lambda: len(cluster.pods("Running")) == 3, "it is made smaller")
    # With the operator away nothing changes; the next one goes on from what it sees.
    cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 4}})
    async with cluster.operator():
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "the next operator grows it")


async def test_watches_that_are_cut_without_a_word_are_begun_anew_and_nothing_is_missed(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.client(manager="regrow-operator", silent_for=1.0) as api:
        running = asyncio.create_task(Controller(api, KEY, wall=cluster.clock).run())
        try:
            await cluster.until(lambda: len(cluster.pods("Running")) == 4, "all replicas run")
            for size in (3, 4):
                cluster.fake.forget_watches()
                cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": size}})
                await cluster.until(lambda size=size: len(cluster.pods("Running")) == size, "it is heard")  # type: ignore[misc]
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.wait({running})
    assert cluster.fake.managers == {"regrow-operator", ""}, "it writes under its own name, deletes under none"


async def test_a_drain_of_many_nodes_takes_one_pod_of_a_gang_and_the_next_when_that_is_replaced(
    cluster: Bed,
) -> None:
    cluster.store.create("trainingjobs", "team", training_job(replicaCount=3, maxReplicaCount=3))

    def running() -> dict[str, str]:
        return {each["metadata"]["labels"]["regrow.dev/place"]: each["metadata"]["name"] for each in pods()}

    def pods() -> list[dict[str, Any]]:
        return cluster.pods("Running")

    def kept() -> list[int]:
        return [each["spec"]["minAvailable"] for each in cluster.store.all_of("poddisruptionbudgets")]

    async with cluster.operator():
        await cluster.until(lambda: len(pods()) == 3 and kept() == [2], "the gang runs, and has its budget")
        before = running()
        cluster.store.evict("team", before["2"])
        with pytest.raises(Refused, match="disruption budget"):
            cluster.store.evict("team", before["1"])
        await cluster.until(lambda: len(pods()) == 3, "another one runs in its place")
        cluster.store.evict("team", before["1"])
        await start_anew(cluster, replicaCount=1)
        await cluster.until(lambda: kept() == [0], "a gang of one pod holds up no drain")
    async with cluster.operator():
        await start_anew(cluster, replicaCount=2)
        await cluster.until(lambda: kept() == [1], "another operator finds it, and changes it")
    cluster.store.delete("trainingjobs", "team", "job")
    await cluster.until(lambda: not kept(), "it goes with its job")


def named(cluster: Bed, job: str) -> list[str]:
    """The pods of a job."""
    return [each["metadata"]["name"] for each in cluster.pods() if each["metadata"]["name"].startswith(job)]


async def start_anew(cluster: Bed, **spec: Any) -> None:
    """Suspend the job, edit it, and let its gang begin again."""
    cluster.store.patch("trainingjobs", "team", "job", {"spec": {"suspend": True}})
    await cluster.until(lambda: not cluster.pods() and cluster.status()["replicas"] == 0, "all pods are given back")
    cluster.store.patch("trainingjobs", "team", "job", {"spec": {**spec, "suspend": False}})
    await cluster.until(lambda: cluster.status()["replicas"] == cluster.status()["desiredReplicas"] > 0, "it runs")


async def test_a_job_runs_without_its_budget_where_the_operator_may_not_make_one(cluster: Bed) -> None:
    asked: list[str] = []

    def forbid(verb: str, plural: str, body: dict[str, Any]) -> Refused | None:
        if plural != "poddisruptionbudgets":
            return None
        asked.append(verb)
        return Refused(403, "Forbidden", "poddisruptionbudgets.policy is forbidden")

    cluster.store.refuse = forbid
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 4, "all replicas run")
    assert asked == ["create"], "it is not asked for again and again"


async def test_of_two_operators_one_leads_and_the_other_takes_over(cluster: Bed) -> None:
    async with cluster.client() as api:
        # Held for so long that none loses it by a pause of this process, nor has it but by being given it.
        first = Leadership(api, namespace="team", identity="a", held_for=600.0, renew_every=0.05)
        second = Leadership(api, namespace="team", identity="b", held_for=600.0, renew_every=0.05)
        await first.acquire()
        holding = asyncio.create_task(first.hold())
        taking = asyncio.create_task(second.acquire())
        done, _ = await asyncio.wait({taking}, timeout=0.5)
        assert not done and not holding.done()
        holding.cancel()
        await first.release()
        await asyncio.wait_for(taking, 60)
        assert cluster.store.get("leases", "team", "regrow-operator")["spec"]["holderIdentity"] == "b"


async def test_what_cannot_be_is_said_in_a_condition_that_names_field_and_cure(cluster: Bed) -> None:
    long = "a-name-that-is-much-too-long-for-a-job-of-pods"
    cluster.store.create("trainingjobs", "team", training_job(long))
    cluster.store.create("trainingjobs", "team", training_job("sizes", replicaCount=3, maxReplicaCount=2))
    cluster.store.create("trainingjobs", "team", training_job("bare", template={"spec": {}}))
    queue: dict[str, Any] = {"backend": "kueue", "kueue": {"queueName": "nowhere"}}
    cluster.store.create("trainingjobs", "team", training_job("queued", **queue))
    cluster.store.refuse = lambda verb, plural, body: (
        Refused(403, "Forbidden", "exceeded quota: pods")
        if plural == "pods" and body["metadata"]["name"].startswith("poor")
        else None
    )
    cluster.store.create("trainingjobs", "team", training_job("poor"))
    async with cluster.operator():
        await cluster.until(lambda: cluster.condition("SpecValid", long).get("status") == "False", "the name")
        assert "metadata.name has 46 characters" in cluster.condition("SpecValid", long)["message"]
        await cluster.until(lambda: cluster.condition("SpecValid", "sizes").get("status") == "False", "sizes")
        assert "spec.maxReplicaCount is 2, below replicaCount (3): give 3 or more" in str(cluster.status("sizes"))
        await cluster.until(lambda: cluster.condition("SpecValid", "bare").get("status") == "False", "containers")
        await cluster.until(lambda: cluster.condition("PodsCreated", "poor").get("status") == "False", "quota")
        assert "exceeded quota: pods; ask for quota" in cluster.condition("PodsCreated", "poor")["message"]
        cluster.scheduler.nodes.clear()
        cluster.store.patch("trainingjobs", "team", "sizes", {"spec": {"maxReplicaCount": 3}})
        await cluster.until(lambda: cluster.condition("SpecValid", "sizes").get("status") == "True", "it is mended")
        cluster.store.patch("trainingjobs", "team", "queued", {"spec": {"suspend": True}})
        await cluster.until(lambda: cluster.status("queued").get("phase") == "Suspended", "it is suspended")
        await cluster.until(lambda: not named(cluster, "queued"), "its pods are given back")
        cluster.store.patch("trainingjobs", "team", "queued", {"spec": {"suspend": False}})
        await cluster.until(lambda: cluster.condition("QueueFound", "queued").get("status") == "False", "queue")
        assert "spec.kueue.queueName is 'nowhere'" in cluster.condition("QueueFound", "queued")["message"]


async def test_an_image_without_regrow_is_said_and_the_job_starts_when_another_is_named(cluster: Bed) -> None:
    cluster.said.without_regrow.add("team/bare:1")
    body = training_job(**SMALL)
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["image"] = "team/bare:1"
    cluster.store.create("trainingjobs", "team", body)
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("phase") == "Failed", "it is said")
        assert "pod 0 (job-1-0-1) could not start its command: is regrow in the image?" in str(
            cluster.condition("Failed")
        )
        mended = {"spec": {"containers": [{**container, "image": "team/train:1"}]}}
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"template": mended}})
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "it runs after all")
        await cluster.until(lambda: cluster.status()["replicas"] == 4, "it says so")
        assert cluster.status()["phase"] == "Training" and cluster.status()["attempt"] == 2
        assert cluster.condition("Failed")["status"] == "False"


async def test_a_job_that_has_trained_and_failed_stays_failed_whatever_is_edited(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 4, "all replicas run")
        cluster.said.end(cluster.store.get("pods", "team", "job-1-0-1"), 1)
        await cluster.until(lambda: cluster.status().get("phase") == "Failed", "its script has failed")
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 3}})
        await cluster.until(lambda: cluster.status().get("observedGeneration") == 2, "it was looked at")
        assert cluster.status()["phase"] == "Failed" and not cluster.pods("Running")


async def test_a_spec_that_is_spoiled_while_the_job_trains_changes_nothing_until_it_is_mended(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SMALL))
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 4, "all replicas run")
        before = {each["metadata"]["uid"] for each in cluster.pods("Running")}
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicaDiscreteValues": [3]}})
        await cluster.until(lambda: cluster.condition("SpecValid").get("status") == "False", "it is said")
        text = "spec.replicaDiscreteValues does not have replicaCount (2), with which the job starts: add it"
        assert text in cluster.condition("SpecValid")["message"]
        assert {each["metadata"]["uid"] for each in cluster.pods("Running")} == before
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicaDiscreteValues": [2, 3]}})
        await cluster.until(lambda: cluster.status().get("replicas") == 3, "it has the size that may be")
        assert cluster.condition("SpecValid")["status"] == "True"


async def test_who_may_not_make_secrets_or_jobs_is_told_what_to_ask_for(cluster: Bed, tmp_path: Path) -> None:
    cluster.store.refuse = lambda verb, plural, body: (
        Refused(403, "Forbidden", f"{plural} is forbidden") if plural == "secrets" else None
    )
    cluster.store.create("trainingjobs", "team", training_job())
    async with cluster.operator():
        await cluster.until(lambda: cluster.condition("PodsCreated").get("status") == "False", "it is said")
        told = "a secret was refused: secrets is forbidden; ask for quota, or for the operator's permission to make"
        assert told in cluster.condition("PodsCreated")["message"]
        cluster.store.refuse = lambda verb, plural, body: None
        await cluster.until(lambda: cluster.condition("PodsCreated").get("status") == "True", "it has the right now")
    cluster.store.refuse = lambda verb, plural, body: Refused(403, "Forbidden", f"{plural} is forbidden")
    told = await regrow(cluster, tmp_path, "submit", str(written(tmp_path, training_job("other"))))
    assert "trainingjobs is forbidden" in told and "ask for the right to do this in the namespace" in told


def written(folder: Path, body: dict[str, Any]) -> Path:
    file = folder / "job.yaml"
    file.write_text(str(body))
    return file


async def regrow(cluster: Bed, folder: Path, *words: str) -> str:
    """Output of `regrow k8s`, as a user of this cluster."""
    config = folder / "kubeconfig"
    config.write_text(kubeconfig(cluster.address))
    runner = CliRunner(env={"KUBECONFIG": str(config)})
    result = await asyncio.to_thread(runner.invoke, commands, ["k8s", *words])
    return result.output or str(result.exception)


async def test_names_and_fields_that_cannot_be_are_refused_before_they_reach_the_cluster(
    cluster: Bed, tmp_path: Path
) -> None:
    queue = {"queueName": "team", "priorityClas": "high"}
    for body, says in (
        (training_job("7b"), "metadata.name is '7b': use small letters, digits and '-', and begin with a letter"),
        (training_job("gpt.1"), "metadata.name is 'gpt.1': use small letters"),
        (training_job(domainLabel="a rack"), "spec.domainLabel is 'a rack', which is no key of a label: give one"),
        (
            training_job(template={"spec": {"containers": [{"image": "a", "resurces": {"limits": {}}}]}}),
            "spec.template.spec.containers[0].resurces is no field of a pod (did you mean resources?)",
        ),
        (
            training_job(template={"spec": {"containers": [{"image": "a", "env": [{"name": "A", "valu": "b"}]}]}}),
            "spec.template.spec.containers[0].env[0].valu is no field of a pod (did you mean value?)",
        ),
        (
            training_job(template={"spec": {"nodeSelectr": {}, "containers": [{"image": "a"}]}}),
            "spec.template.spec.nodeSelectr is no field of a pod (did you mean nodeSelector?)",
        ),
        (training_job("Gpt"), "metadata.name is 'Gpt': use small letters"),
        (
            training_job(backend="kueue", kueue=queue),
            "spec.kueue.priorityClas is no field of a TrainingJob (did you mean",
        ),
    ):
        assert says in await regrow(cluster, tmp_path, "submit", str(written(tmp_path, body)))
    assert cluster.store.all_of("trainingjobs") == []


async def test_nothing_is_said_of_a_queue_where_the_server_does_not_know_what_queues_are(cluster: Bed) -> None:
    cluster.fake.unserved.add("localqueues")
    queue: dict[str, Any] = {"backend": "kueue", "kueue": {"queueName": "team"}}
    cluster.scheduler.nodes.clear()
    cluster.store.create("trainingjobs", "team", training_job(**queue))
    async with cluster.operator():
        asked = ("GET", "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues/team")
        await cluster.until(lambda: cluster.fake.requests.count(asked) >= 2, "the queue was asked for")
        assert cluster.status()["pendingReplicas"] == 2 and not cluster.condition("QueueFound")


async def test_jobs_are_submitted_shown_and_scaled_from_a_terminal(cluster: Bed, tmp_path: Path) -> None:
    file, say = tmp_path / "job.yaml", functools.partial(regrow, cluster, tmp_path)
    body = training_job(**SMALL, colour="red")
    file.write_text(str(body))
    assert "spec.colour is no field of a TrainingJob" in await say("submit", str(file))
    body = training_job(**SMALL, replicasCount=3)
    file.write_text(str(body))
    assert "did you mean replicaCount?" in await say("submit", str(file))
    beside = {"spec": {"containers": [{"name": name, "image": "team/train:1"} for name in ("train", "proxy")]}}
    file.write_text(str(training_job(**SMALL | {"template": beside})))
    assert "job team/job is there" in await say("submit", str(file))
    assert "AlreadyExists" in await say("submit", str(file)) or "already exists" in await say("submit", str(file))

    def creating(name: str) -> str:
        raise Refused(400, "BadRequest", f'container "train" in pod "{name}" is waiting to start: ContainerCreating')

    cluster.fake.logs = lambda name: f"first of {name}\nlast of {name}\n"
    assert "job job has no pod for replica 0 now" in await say("logs", "job")
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 4, "all replicas run")
        assert await say("logs", "job") == "first of job-1-0-1\nlast of job-1-0-1\n"
        assert await say("logs", "job", "--replica", "1", "--tail", "1") == "last of job-1-1-2\n"
        assert "job job has no node 4 (it can have nodes 0 to 3)" in await say("logs", "job", "--node", "4")
        assert "give one of them" in await say("logs", "job", "--node", "1", "--replica", "1")
        cluster.fake.logs = creating
        assert "is waiting to start" in await say("logs", "job", "--node", "1")
        assert "is waiting to start" in await say("logs", "job", "--node", "1", "-f")
        job = cluster.job()
        said = {**job["status"], "step": 12, "incidents": 1, "goodput": 0.875}
        cluster.store.replace("trainingjobs", "team", "job", {**job, "status": said}, part="status")
        assert "step 12, incidents 1, goodput 88%, when it was last asked" in await say("status", "job")
        assert "replicas: 4, wanted 4, waiting 0" in await say("status", "job")
        assert "job job can have 2 to 4" in await say("scale", "job", "--replicas", "5")
        assert "is to have 3 replicas" in await say("scale", "job", "--replicas", "3")
        await cluster.until(lambda: len(cluster.pods("Running")) == 3, "it is made smaller")
    assert "there is no" in await say("status", "other") or "not found" in await say("status", "other")


async def test_ranks_of_a_gang_under_one_rack_are_neighbours_whatever_order_its_nodes_come_in(cluster: Bed) -> None:
    rack = "example.com/rack"
    cluster.scheduler.nodes = {f"n{number}": 1 for number in range(5)}
    for number in range(5):
        meta = {"name": f"n{number}", "labels": {rack: "a" if number % 2 == 0 else "b"}}
        cluster.store.create("nodes", "", {"metadata": meta, "spec": {}, "status": {}})
    cluster.store.create("trainingjobs", "team", training_job(**(SMALL | {"replicaCount": 4}), topologyLabels=[rack]))
    async with cluster.operator():
        await cluster.until(lambda: cluster.condition("PodsPlaced").get("status") == "True", "all were told")
        await cluster.until(lambda: len(cluster.pods("Running")) == 4, "they run")
    told = {pod["spec"]["nodeName"]: pod["metadata"]["annotations"] for pod in cluster.pods()}
    ranks = {node: int(notes[NODE_RANK]) for node, notes in told.items()}
    assert ranks == {"n0": 0, "n2": 1, "n1": 2, "n3": 3}
    assert {notes[TOPOLOGY] for node, notes in told.items() if node in ("n0", "n2")} == {"/a"}
    async with cluster.operator():  # another one, which knows it from the job's status
        cluster.store.patch("nodes", "", "n2", {"metadata": {"labels": {rack: "b"}}})
        lost = next(pod for pod in cluster.pods() if pod["spec"]["nodeName"] == "n1")["metadata"]["name"]
        cluster.store.delete("pods", "team", lost, grace=0)
        await cluster.until(
            lambda: (
                len(cluster.pods("Running")) == 4 and lost not in {pod["metadata"]["name"] for pod in cluster.pods()}
            ),
            "another one joins",
        )
        assert cluster.status()["seats"] == [0, 2, 1, 3]
