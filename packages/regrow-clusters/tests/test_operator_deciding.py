"""The operator's decision on one job: all of it is known before anything is written."""

from typing import Any

import msgspec
import pytest
from test_operator_pods import changed, job, running

from regrow.core.ids import NodeId
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow_clusters.operator.deciding import JobDecision, JobFacts, decide
from regrow_clusters.operator.observed.observing import read
from regrow_clusters.operator.observed.pod_seen import PodSeen
from regrow_clusters.operator.planning import PodsStart
from regrow_clusters.operator.resource import TrainingJob
from regrow_clusters.operator.status import JobFinding


def decided(given: TrainingJob, pods: list[PodSeen], now: float = 100.0, **known: Any) -> JobDecision:
    return decide(given, JobFacts(pods, read(given, pods, now), **known), now)


def conditions(decision: JobDecision) -> dict[str, str]:
    return {each.type: each.reason for each in decision.status.conditions}


def test_a_lost_pod_is_ordered_again_with_a_number_that_the_status_has_taken() -> None:
    given = job(maxReplicaCount=2, podsPerReplica=1)
    seen = running(given, 0, 1)
    decision = decided(given, changed(seen, (1, 0), phase="Failed", exit_code=137, finished=50.0))
    starts = [step for step in decision.steps if isinstance(step, PodsStart)]
    assert [place.serial for step in starts for place in step.replicas] == [10]
    assert decision.status.serial == 10 and given.status.serial == 9
    assert {"ReplicaAsked", "ReplicaGone"} <= {news.reason for news in decision.news}
    assert decision.keeps_budget and decision.keeps_service and not decision.again


def test_a_job_in_which_all_is_well_is_left_alone() -> None:
    given = job(podsPerReplica=1)
    decision = decided(given, list(running(given, 0).values()))
    assert (decision.steps, decision.leaving, decision.again) == ([], [], False)
    again = decided(msgspec.structs.replace(given, status=decision.status), list(running(given, 0).values()))
    assert again.status == decision.status and again.news == []


def test_a_gang_whose_first_pod_is_gone_starts_anew_when_all_others_are() -> None:
    given = job(maxReplicaCount=2, podsPerReplica=1)
    seen = running(given, 0, 1)
    ends = decided(given, [seen[1, 0]])
    assert len(ends.steps) == 1 and not ends.again
    anew = decided(given, [])
    assert anew.again and anew.status.attempt == given.status.attempt + 1
    assert (anew.steps, anew.later, anew.keeps_service) == ([], None, False)


@pytest.mark.parametrize("watched", [True, False])
def test_evidence_against_nodes_is_a_condition_where_they_are_watched(watched: bool) -> None:
    given = job(podsPerReplica=1)
    verdicts = (
        {"n00": [HealthVerdict(NodeId("n00"), "", Severity.LEAVE, Action.NONE, "cluster", "it is cordoned")]}
        if watched
        else None
    )
    found = conditions(decided(given, list(running(given, 0).values()), verdicts=verdicts))
    assert found.get("NodesHealthy") == ("Unhealthy" if watched else None)


def test_what_was_read_of_the_queue_is_a_condition() -> None:
    said = (JobFinding("QueueFound", False, "NoSuchQueue", "make it"),)
    assert conditions(decided(job(podsPerReplica=1), [], said=said))["QueueFound"] == "NoSuchQueue"
