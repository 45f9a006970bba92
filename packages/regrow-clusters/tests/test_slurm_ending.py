"""End of a gang's Slurm job, and its new submission; a Slurm that only remembers its requests."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from regrow.core.ids import Seconds
from regrow_clusters.slurm.client import SlurmClient, SlurmFailure
from regrow_clusters.slurm.ending import GangEnd
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.node_arguments import GangNode
from regrow_clusters.slurm.observing import backups
from regrow_clusters.slurm.reading import JobRequests, SlurmJob
from regrow_clusters.slurm.scripts import JobPart, part_in, script_of

SPEC = SlurmJobSpec("gpt", ["train.py"], replica_count=3, max_replica_count=5, max_restarts=1)
PART = JobPart(SPEC, avoid=("bad",))


class RememberedSlurm(SlurmClient):
    """Requests in order. `dead`: the first host does not answer; `away`: the controller does not."""

    def __init__(self, requests: JobRequests | None = None, *, state: str = "RUNNING", dead: bool = False) -> None:
        super().__init__({})
        self.requests = requests or JobRequests()
        self.jobs = [
            SlurmJob(7, "gpt", None, state, nodes=("n0", "n1", "n2")),
            SlurmJob(8, "gpt+3", 3, "RUNNING", nodes=("n3",)),
            SlurmJob(9, "gpt+4", 4, "PENDING"),
        ]
        self.dead, self.away = dead, False
        self.asked: list[str] = []
        self.next: JobPart | None = None
        self.listens = False
        self.knocked: list[tuple[str, str]] = []

    def queue(self, name: str) -> list[SlurmJob]:
        if self.away:
            raise SlurmFailure("squeue: Unable to contact slurm controller")
        return self.jobs

    def batch_script(self, job_id: int) -> str:
        return script_of(PART, ["regrow"])

    def submit(self, script: str) -> int:
        self.next = part_in(script)
        self.asked.append("submit")
        return 10

    def cancel(self, job_id: int, *, pending: bool = False) -> None:
        self.asked.append(f"cancel {job_id}")

    def address(self, host: str) -> str:
        return host.replace("n", "10.0.0.")

    def on_host(self, job_id: int, host: str, words: Sequence[str], *, within: Seconds = 30.0) -> str:
        if words[0] == "bash":
            self.knocked.append((host, words[-1]))
            if not self.listens:
                raise SlurmFailure(f"srun: nobody listens on {host}")
            return ""
        if words[0] == "sh":
            self.asked.append(f"tell {host} {words[-1].split('echo ')[1]}")
        if self.dead:
            raise SlurmFailure(f"srun: {host} does not answer")
        return ""


def ending(slurm: RememberedSlurm, index: int, part: JobPart = PART, **more: Any) -> GangEnd:
    return GangEnd(
        part, GangNode(7, index, f"n{index}", "n[0-2]"), slurm, lambda: slurm.requests, lambda text: None, **more
    )


def test_a_job_that_is_done_takes_its_waiting_replicas_out_of_the_queue() -> None:
    slurm = RememberedSlurm()
    ending(slurm, 0).by_first(0, ())
    assert slurm.asked == ["cancel 9"]


def test_a_job_that_can_be_run_again_is_submitted_anew_as_it_was_asked_for_last() -> None:
    slurm = RememberedSlurm(JobRequests(replicas=4, avoid={"asked": time.time() + 60, "long ago": 1.0}))
    ending(slurm, 0).by_first(75, ("lost",))
    assert slurm.asked == ["submit"]
    assert slurm.next is not None
    assert (slurm.next.attempt, slurm.next.avoid) == (2, ("asked", "lost")), (
        "nothing is known against the other any more"
    )
    assert slurm.next.spec.replicas == 4


@pytest.mark.parametrize("slurm", [RememberedSlurm(JobRequests(over=True)), RememberedSlurm(state="COMPLETING")])
def test_a_job_that_was_cancelled_is_not_submitted_anew(slurm: RememberedSlurm) -> None:
    ending(slurm, 0).by_first(75, ())
    assert slurm.asked == ["cancel 9"]


def test_a_gang_is_not_started_more_often_than_it_may_be() -> None:
    slurm = RememberedSlurm()
    ending(slurm, 0, JobPart(SPEC, attempt=2)).by_first(75, ())
    assert slurm.asked == ["cancel 9"]


def test_while_the_first_host_answers_its_own_script_ends_the_allocation() -> None:
    slurm = RememberedSlurm()
    ending(slurm, 1).by_survivor()
    assert slurm.asked == []


def test_a_survivor_submits_the_gang_without_the_lost_host_and_ends_the_allocation() -> None:
    slurm = RememberedSlurm(dead=True)
    ending(slurm, 1).by_survivor()
    assert slurm.asked == ["submit", "cancel 7"]
    assert slurm.next is not None and slurm.next.avoid == ("bad", "n0")


def test_a_survivor_that_comes_later_finds_the_next_gang_there() -> None:
    slurm = RememberedSlurm(dead=True)
    waited: list[float] = []

    def sleep(seconds: Seconds) -> None:
        waited.append(seconds)
        slurm.jobs.append(SlurmJob(10, "gpt", None, "PENDING"))

    ending(slurm, 2, sleep=sleep).by_survivor()
    assert waited == [5.0]
    assert slurm.asked == ["cancel 7"]


def test_who_is_cut_off_itself_ends_nothing() -> None:
    slurm = RememberedSlurm(dead=True)
    slurm.away = True
    ending(slurm, 1).by_survivor()
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("code", "dead", "done"),
    [
        (0, True, ["cancel 9", "tell n0 0 > /r/code", "cancel 7"]),
        (0, False, ["cancel 9", "tell n0 0 > /r/code"]),
        (93, True, ["cancel 9", "tell n0 93 > /r/code", "cancel 7"]),
        (75, True, ["submit", "tell n0 75 > /r/code", "cancel 7"]),
        (75, False, ["submit", "tell n0 75 > /r/code"]),
    ],
)
def test_where_another_has_taken_over_its_end_is_the_allocations(code: int, dead: bool, done: list[str]) -> None:
    slurm = RememberedSlurm(dead=dead)
    successor(slurm).by_successor(code, "10.0.0.2:29400")
    assert slurm.asked == done
    assert slurm.knocked == ([("n2", "exec 3<>/dev/tcp/10.0.0.2/29400")] if code == 75 else [])


def test_who_alone_does_not_reach_a_coordinator_that_was_elected_ends_nothing() -> None:
    slurm = RememberedSlurm(dead=True)
    slurm.listens = True
    successor(slurm).by_successor(75, "10.0.0.2:29400")
    assert slurm.asked == []


def test_an_end_that_another_node_sees_to_is_left_to_it() -> None:
    slurm = RememberedSlurm(dead=True, state="COMPLETING")
    successor(slurm).by_successor(0, "10.0.0.2:29400")
    assert slurm.asked == []


def successor(slurm: RememberedSlurm) -> GangEnd:
    """On the second node, whose turn is the first where the first node is gone."""
    gang_node = GangNode(7, 1, "n1", "n[0-2]", result="/r")
    return GangEnd(PART, gang_node, slurm, lambda: slurm.requests, lambda text: None, sleep=lambda seconds: None)


def test_of_many_nodes_some_look_after_the_end_far_from_each_other() -> None:
    assert backups(4) == [1, 2, 3]
    assert backups(17) == list(range(1, 17))
    some = backups(1000)
    assert len(some) == 16 and some[0] == 1 and some[-1] == 999
    assert max(later - sooner for sooner, later in itertools.pairwise(some)) < 70
