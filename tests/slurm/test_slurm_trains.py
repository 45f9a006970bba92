"""Real trainings on a real Slurm: nodes are taken, killed and cut off, and no bit of the result changes."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.elastic import HURRY, assert_same, fixed_run
from tests.slurm.jobs import SubmittedJob, slurm_job
from tests.slurm.rig import GRACE_S, SlurmCluster, slurm_cluster

from regrow.launch.folder import read_entry

SHORT, LONG, FOREVER = 20, 150, 4000
FIRST_STEP_S = 180.0
"""From submitting to the first step, on a machine that does other things too; a bound for tests, not for users."""
FOLLOWS = "follows the job's coordinator to"
"""A node's words when another coordinator was elected."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(4) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    with slurm_job(cluster, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def long_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fixed_run(tmp_path_factory.mktemp("fixed"), LONG)


def test_a_gang_trains_as_one_process_would_and_leaves_nothing(job: SubmittedJob, tmp_path: Path) -> None:
    gang = job.submit(steps=SHORT, pace=0.0)
    job.cluster.until(lambda: job.ledger(gang).commits or None, f"the first step; {job.output()}")
    assert time.monotonic() - job.submitted_at < FIRST_STEP_S
    told = job.finish(gang)
    (tmp_path / "alone").mkdir()
    assert_same(job.here, told, fixed_run(tmp_path / "alone", SHORT), 2)
    assert [len(each.workers) for each in told.generations] == [2]
    job.here.assert_nothing_left()


def hosts(job: SubmittedJob, *names: str) -> list[str]:
    """Hosts on which the Slurm jobs of these names run."""
    lines = job.cluster.ask("squeue", "-h", "-t", "R", "-o", "%j|%N").splitlines()
    return [node for name, _, node in (line.partition("|") for line in lines) if name in names]


def coordinator_of(job: SubmittedJob, gang: int) -> str:
    """Address of a gang's coordinator: host and port."""
    entry = read_entry(job.here.home / "jobs" / f"job-{gang}")
    assert entry is not None
    return entry.address


def test_elastic_replicas_leave_for_a_job_of_higher_priority_come_back_and_one_that_is_cut_off_never_commits(
    job: SubmittedJob, long_alone: dict[str, Any]
) -> None:
    gang = job.submit(steps=LONG, maxReplicaCount=4, maxPendingReplicas=2)
    job.until_world(gang, 4)
    scaling = job.cluster.ask(
        "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "srun sleep 600"
    )
    asked = time.monotonic()
    job.cluster.until(lambda: job.state(int(scaling)) == "RUNNING" or None, f"it runs; {job.output()}")
    took = time.monotonic() - asked
    job.until_world(gang, 2)
    waiting = job.cluster.until(
        lambda: [name for name, state in job.cluster.queue().items() if "+" in name and state == "PENDING"] or None,
        "the wish to grow is in the queue again",
    )
    assert set(waiting) <= {"job+2", "job+3"}
    job.cluster.ask("scancel", scaling)
    job.until_world(gang, 4)
    assert took < GRACE_S, "they left by themselves, and were not killed at the end of their grace"
    assert [job.exit_code(number) for number in (*job.numbers("job+2"), *job.numbers("job+3"))].count(75) == 2
    assert {each.kind for each in job.ledger(gang).incidents} == {"grow", "preempt"}
    (node,) = hosts(job, "job+3")
    assert any("regrow agent" in each for each in job.cluster.processes(node))
    job.cluster.cut(node)
    try:
        job.until_world(gang, 3)
        job.cluster.until(
            lambda: not any("regrow" in each for each in job.cluster.processes(node)) or None, f"{node} stops itself"
        )
        told = job.finish(gang)
    finally:
        job.cluster.join(node)
    job.clear()
    assert_same(job.here, told, long_alone, 3)
    assert len({each.step for each in told.incidents}) >= 3


def test_a_killed_node_is_replaced_at_once_elsewhere_and_drained_where_the_job_asks_for_it(
    job: SubmittedJob, long_alone: dict[str, Any]
) -> None:
    gang = job.submit(steps=LONG, maxReplicaCount=2, spares=1, drainBadNodes=True)
    job.until_world(gang, 2)
    before = hosts(job, "job")
    assert before == ["node[0-2]"]
    job.cluster.kill("node1")
    killed = time.monotonic()
    number = job.cluster.until(lambda: job.numbers("job+1") or None, f"a replacement is asked for; {job.output()}")
    took = time.monotonic() - killed
    assert "ExcNodeList=node1" in job.cluster.ask("scontrol", "show", "job", str(number[0]))
    said = job.cluster.until(
        lambda: re.search(r"Reason=(regrow.*)", job.cluster.ask("scontrol", "show", "node", "node1")),
        f"it is drained; {job.output()}",
    )
    assert f"regrow: job job ({gang}): it was lost" in said.group(1)
    assert "node1 is drained" in job.output()
    job.until_world(gang, 2)
    job.cluster.until(lambda: hosts(job, "job") == ["node[0,2]"] or None, "Slurm has found it too")
    code, text = job.regrow("slurm", "scale", "job", "--replicas", "2")
    assert code == 0, f"Slurm changes no comment of a job that has lost a node: {text}"
    told = job.finish(gang)
    job.clear()
    job.cluster.boot("node1")
    job.cluster.ask("scontrol", "update", "nodename=node1", "state=resume")
    job.cluster.until(lambda: set(job.cluster.states().values()) == {"idle"} or None, "all nodes are idle")
    assert took < 10.0, "long before Slurm finds that the node is down"
    assert_same(job.here, told, long_alone, 2)
    assert [each.steps_lost for each in told.incidents] == [0] * len(told.incidents)


@pytest.mark.full
def test_scaled_down_by_one_a_job_that_has_lost_a_node_to_its_spare_trains_with_one_fewer_at_once(
    job: SubmittedJob, long_alone: dict[str, Any]
) -> None:
    gang = job.submit(steps=LONG, maxReplicaCount=3, spares=1)
    job.until_world(gang, 3)
    job.cluster.until(lambda: job.on("node3") or None, "a replica beyond the gang runs")
    job.cluster.kill("node1")
    job.cluster.until(lambda: job.numbers("job+1") or None, f"a replacement is asked for; {job.output()}")
    job.until_world(gang, 3)
    code, text = job.regrow("slurm", "scale", "job", "--replicas", "2")
    assert code == 0, text
    job.until_world(gang, 2)
    assert job.cluster.queue()["job+1"] == "PENDING", "the lost node was not replaced yet"
    told = job.finish(gang)
    job.clear()
    assert_same(job.here, told, long_alone, 2)


@pytest.mark.full
def test_a_replica_that_waits_without_a_node_is_asked_for_again_when_the_node_is_bad_no_more(
    job: SubmittedJob, long_alone: dict[str, Any]
) -> None:
    words = ["sbatch", "--parsable", "-p", "high", "-w", "node3", "--exclusive", "-o", "/dev/null"]
    other = job.cluster.ask(*words, "--wrap", "srun sleep 600")
    gang = job.submit(steps=LONG, maxReplicaCount=3, badNodeTimeInSeconds=25)
    job.until_world(gang, 3)
    assert hosts(job, "job+2") == ["node2"]
    job.cluster.kill("node2")
    _, waits = job.cluster.until(
        lambda: numbers if len(numbers := job.numbers("job+2")) == 2 else None,
        f"another one is asked for; {job.output()}",
    )
    assert "ExcNodeList=node2" in job.cluster.ask("scontrol", "show", "job", str(waits))
    job.cluster.boot("node2")
    job.until_world(gang, 3)
    assert hosts(job, "job+2") == ["node2"] and len(job.numbers("job+2")) == 3, job.output()
    job.cluster.ask("scancel", other)
    told = job.finish(gang)
    job.clear()
    assert_same(job.here, told, long_alone, 3)


def test_the_loss_of_the_batch_host_leaves_nothing_and_the_gang_starts_anew(job: SubmittedJob, tmp_path: Path) -> None:
    keep = str(tmp_path / "checkpoints")
    flags = ["--data-cache=off", "--checkpoint-every=1s"]
    gang = job.submit(steps=LONG, maxReplicaCount=3, checkpointDir=keep, runFlags=flags)
    job.until_world(gang, 3)
    job.cluster.until(lambda: "state@" in job.output() or None, "there is a checkpoint")
    job.cluster.kill("node0")
    again = job.cluster.until(
        lambda: [number for number in job.numbers("job") if number > gang] or None, f"anew; {job.output()}"
    )
    assert len(again) == 1
    assert "ExcNodeList=node0" in job.cluster.ask("scontrol", "show", "job", str(again[0]))
    job.ended(gang)
    job.until_world(again[0], 3)
    told = job.finish(again[0])
    job.clear()
    assert min(told.commits) > 0, "it went on from the checkpoint"


@pytest.mark.full
def test_where_another_coordinator_is_elected_the_loss_of_the_batch_host_costs_no_step_and_commands_reach_it(
    job: SubmittedJob, long_alone: dict[str, Any], record_property: Callable[[str, float], None]
) -> None:
    gang = job.submit(steps=LONG, maxReplicaCount=3, spares=1, elect=True, leaseInSeconds=30)
    job.until_world(gang, 3)
    before = job.numbers("job+3")
    job.cluster.kill("node0")
    # What the gang itself says is lost with srun, which was on that host.
    job.cluster.until(lambda: FOLLOWS in job.output() or None, "another is elected")
    job.until_world(gang, 3)
    wanted = job.cluster.until(
        lambda: [each for place in range(4) for each in job.numbers(f"job+{place}") if each not in before] or None,
        f"a replacement is asked for; {job.output()}",
    )
    assert "ExcNodeList=node0" in job.cluster.ask("scontrol", "show", "job", str(wanted[0]))
    code, text = job.regrow("slurm", "status", "job")
    assert code == 0 and "wanted: 3 replicas (from 2 to 3), start 1" in text and "replicas: 3" in text, text
    left = {job.cluster.address(node): node for node in job.cluster.nodes[1:]}  # all of them train
    elected = left.pop(coordinator_of(job, gang).rpartition(":")[0])
    other = min(left.values())
    code, text = job.regrow("slurm", "drain", "job", elected)
    assert code == 2 and f"{elected} has the coordinator of job job" in text, text
    code, text = job.regrow("slurm", "drain", "job", other)
    assert code == 0 and f"{other} is given back" in text, text
    job.until_world(gang, 2)
    (job.here.folder / HURRY).touch()
    job.ended(gang)
    job.nothing_queued()
    told = job.ledger(gang)
    job.clear()
    assert job.numbers("job") == [gang], "it was not submitted anew"
    assert_same(job.here, told, long_alone, 2)
    (lost,) = [each for each in told.incidents if each.cause == "node0, which hosted the coordinator, was lost"]
    record_property("seconds until every rank had committed again", round(lost.total, 2))
    assert lost.total < FIRST_STEP_S


@pytest.mark.full
def test_at_slurms_notice_an_elected_coordinator_saves_the_state_the_gang_starts_anew_and_can_be_cancelled(
    job: SubmittedJob, tmp_path: Path
) -> None:
    flags = ["--data-cache=off", "--checkpoint-every=1h"]  # so what it goes on from was saved at the notice
    elects = {"maxReplicaCount": 3, "spares": 1, "elect": True, "leaseInSeconds": 30}
    elects["gracefulShutdownTimeoutInSeconds"] = 120  # what is to be shown is not how fast a busy machine writes
    gang = job.submit(steps=FOREVER, checkpointDir=str(tmp_path / "checkpoints"), runFlags=flags, **elects)
    job.until_world(gang, 3)
    job.cluster.kill("node0")
    job.cluster.until(lambda: FOLLOWS in job.output() or None, "another is elected")
    reached = job.until_world(gang, 3)  # one of them beyond the gang, which alone could neither train nor elect
    job.cluster.ask("scancel", "--signal=TERM", str(gang))  # as at its time limit
    again = job.cluster.until(
        lambda: [number for number in job.numbers("job") if number > gang] or None, f"anew; {job.output()}"
    )
    assert len(again) == 1
    job.ended(gang)
    job.until_world(again[0], 2)
    assert reached < min(job.ledger(again[0]).commits) <= max(job.ledger(gang).commits) + 1, job.output()
    before = coordinator_of(job, again[0])
    job.cluster.kill(job.cluster.ask("squeue", "-h", "-j", str(again[0]), "-o", "%B"))
    # All of it is in the gang, whose words are lost with srun.
    job.cluster.until(lambda: coordinator_of(job, again[0]) != before or None, f"another is elected; {job.output()}")
    job.until_world(again[0], 2)
    code, text = job.regrow("slurm", "cancel", "job")
    assert code == 0 and "job job is ending" in text, text
    job.ended(again[0])
    job.nothing_queued()
    job.clear()
    assert job.numbers("job") == [gang, *again], "it was not submitted anew"


@pytest.mark.full
def test_where_only_the_first_launcher_is_killed_the_batch_script_hears_how_the_job_ended(
    job: SubmittedJob, long_alone: dict[str, Any]
) -> None:
    gang = job.submit(steps=LONG, maxReplicaCount=3, replicas=2, spares=1, elect=True, leaseInSeconds=30)
    job.until_world(gang, 2)
    launcher = json.loads((job.here.home / "jobs" / f"job-{gang}" / "job.json").read_text())["pid"]
    on_first = ["srun", f"--jobid={gang}", "--overlap", "-N1", "-n1", "-w", "node0"]
    job.cluster.ask(*on_first, "kill", "-9", str(launcher))
    job.cluster.until(lambda: "was elected in its place" in job.output() or None, f"an election; {job.output()}")
    job.until_world(gang, 2)
    told = job.finish(gang)
    job.clear()
    assert job.numbers("job") == [gang], "it was not submitted anew"
    assert_same(job.here, told, long_alone, 2)
