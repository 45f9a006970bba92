"""Nodes that fail their examinations: twice within the window, and no new worker goes there while there is room."""

from typing import Any

from tests.unit.membership.elastic_job import lose
from tests.unit.membership.membership_job import Job
from tests.unit.membership.test_trainings import Followed

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.replacements import ReplacementProven
from regrow.core.messages.vocabulary import FaultKind, Role
from regrow.core.records import NodeJudged, NodeQuarantined
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.launch.listing import status_lines
from regrow.membership.machine import EndJob
from regrow.membership.states import Training
from regrow.observe.story import describe


def verdict(node: str, severity: Severity, device: str = "gpu0") -> HealthVerdict:
    return HealthVerdict(NodeId(node), device, severity, Action.RESET, "nvml", "the driver asks for: GPU reset")


def examined(job: Job, node: str, *severities: Severity, after: float = 1.0) -> None:
    found = [verdict(node, severity, f"gpu{index}") for index, severity in enumerate(severities)]
    job.tell(NodeExamined(NodeId(node), "joined", found, 0.5), after=after)


def nodes(count: int, *, slots: int, world: int = 4, **changes: Any) -> Job:
    return Job(world, nodes=count, slots=slots, **changes).trained(4)


def joiners(job: Job) -> list[str]:
    return [spawn.node for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER]


def kill(job: Job, rank: int) -> None:
    """One rank dies in its step; the others halt."""
    lost = job.of(rank)
    job.exited(lost)
    for other in job.ranks:
        if other != rank:
            job.halted(other, 5)


def quarantined(job: Job) -> dict[str, str]:
    return {node.node: node.quarantined for node in job.machine.snapshot().nodes if node.quarantined}


def test_once_is_only_written_down() -> None:
    job = nodes(2, slots=4)
    examined(job, "n1", Severity.LEAVE, Severity.FATAL, Severity.SUSPECT)
    assert [(each.device, each.severity) for each in job.all(NodeJudged)] == [
        ("gpu0", "leave"),
        ("gpu1", "fatal"),
        ("gpu2", "suspect"),
    ]
    assert quarantined(job) == {}
    kill(job, 3)
    assert joiners(job) == ["n1"]


def test_twice_within_the_window_and_new_workers_go_elsewhere() -> None:
    job = nodes(2, slots=4)
    examined(job, "n1", Severity.LEAVE)
    examined(job, "n1", Severity.FATAL)
    (told,) = job.all(NodeQuarantined)
    assert (told.node, told.alone) == ("n1", False)
    assert "GPU reset" in quarantined(job)["n1"]
    assert not job.all(EndJob), "who runs there stays"
    kill(job, 3)
    assert joiners(job) == ["n0"]


def test_suspicion_alone_never_counts() -> None:
    job = nodes(2, slots=4)
    for _ in range(5):
        examined(job, "n1", Severity.SUSPECT, Severity.SUSPECT)
    assert quarantined(job) == {}


def test_failures_that_are_further_apart_than_the_window_do_not_add_up() -> None:
    job = nodes(2, slots=4, window=600.0)
    for _ in range(3):
        examined(job, "n1", Severity.LEAVE, after=601.0)
    assert quarantined(job) == {}
    examined(job, "n1", Severity.LEAVE, after=599.0)
    assert set(quarantined(job)) == {"n1"}


def test_where_there_is_no_room_elsewhere_the_lost_rank_is_filled_all_the_same() -> None:
    job = nodes(2, slots=2)
    examined(job, "n1", Severity.LEAVE)
    examined(job, "n1", Severity.LEAVE)
    assert set(quarantined(job)) == {"n1"}
    kill(job, 3)
    assert joiners(job) == ["n1"]
    assert not job.all(EndJob)


def test_the_only_node_is_never_in_quarantine_and_that_is_said_once() -> None:
    job = nodes(1, slots=4)
    for _ in range(4):
        examined(job, "n0", Severity.FATAL)
    assert quarantined(job) == {}
    (told,) = job.all(NodeQuarantined)
    assert told.alone
    assert "goes on being used" in str(describe(told))
    kill(job, 3)
    assert joiners(job) == ["n0"]


def test_the_last_node_that_is_well_stays_in_use() -> None:
    job = nodes(2, slots=4)
    for node in ("n0", "n1"):
        for _ in range(2):
            examined(job, node, Severity.FATAL)
    assert set(quarantined(job)) == {"n0"}


def test_standbys_are_not_kept_in_quarantine() -> None:
    job = Job(4, nodes=2, slots=4, standbys=1)
    examined(job, "n1", Severity.LEAVE)
    examined(job, "n1", Severity.LEAVE)
    job.trained(4)
    assert [spawn.node for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.STANDBY] == ["n0"]


def test_a_world_grows_onto_healthy_nodes_only() -> None:
    job = Job(2, nodes=2, slots=2, max_replicas=4).trained(4)
    examined(job, "n1", Severity.LEAVE)
    examined(job, "n1", Severity.LEAVE)
    assert set(quarantined(job)) == {"n1"}
    job.tell(facts.ScaleRequested(4, "more"))
    assert joiners(job) == ["n0"]


def test_a_job_that_starts_again_leaves_it_out_where_the_others_have_room() -> None:
    job = Job(4, nodes=2, slots=4, max_restarts=5)
    examined(job, "n0", Severity.LEAVE)
    examined(job, "n0", Severity.LEAVE)
    before = [job.of(rank) for rank in job.ranks]
    started = len(job.all(orders.SpawnWorker))
    job.exited(before[3], code=1)
    job.wait()
    for worker in before[:3]:
        job.exited(worker)
    assert [spawn.node for spawn in job.all(orders.SpawnWorker)[started:]] == ["n1"] * 4


def test_status_shows_the_reason_and_what_was_found_last() -> None:
    job = nodes(2, slots=4)
    examined(job, "n1", Severity.LEAVE)
    examined(job, "n1", Severity.LEAVE, Severity.SUSPECT)
    shown = "\n".join(status_lines(job.machine.snapshot()))
    assert "n1: in quarantine, gets no new workers: leave: nvml gpu0: the driver asks for: GPU reset (reset)" in shown
    assert "n1: suspect: nvml gpu1" in shown
    examined(job, "n1")
    assert "suspect" not in "\n".join(status_lines(job.machine.snapshot())), "it is well again"


def test_a_node_that_nobody_knows_is_no_matter() -> None:
    job = nodes(1, slots=4)
    examined(job, "n9", Severity.FATAL)
    assert job.all(NodeJudged) == []


def test_a_script_that_fails_says_nothing_of_its_node() -> None:
    job = nodes(2, slots=4)
    job.faulted(3, 5, kind=FaultKind.BODY)
    assert quarantined(job) == {}


def test_a_node_in_quarantine_that_is_gone_for_good_is_nothing_to_the_next_coordinator() -> None:
    """Its ranks had left it, so no report and no table names it any more."""
    job = Followed(2)
    job.trained(4)
    job.machine.roster.add_node(facts.NodeJoined(NodeId("n1"), "host", 1, "store1")).quarantined = "its memory is bad"
    lose(job, "n1")
    other = job.successor(knowing=True)
    other.handle(ReplacementProven(job.of(0), other.generation, Rank(0), StepNo(3)), 2e4)
    assert isinstance(other.state, Training) and "n1" not in other.roster.nodes
