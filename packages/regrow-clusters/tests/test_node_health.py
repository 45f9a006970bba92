"""Facts of clusters about their nodes become verdicts of ours; a bad node is marked, within the budget."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.jobs import training_job

from regrow.core.errors import UsageError
from regrow.core.ids import NodeId
from regrow.core.verdicts import Action, Severity
from regrow.observe.watch.present import JobFigures, SuspectNode
from regrow_clusters.cluster.node_health import NodeFact, may_mark, parse_table, read_table, slurm_facts
from regrow_clusters.operator.events import news_of_nodes
from regrow_clusters.operator.nodes import CONDITION, TAINT, UNTIL, AvoidedNodeMark, judged, marking, with_condition
from regrow_clusters.operator.observed.observing import against, found_nodes, node_of, read
from regrow_clusters.operator.observed.pod_seen import read_pod
from regrow_clusters.operator.resource import AvoidedNodeStatus, TrainingJob, TrainingJobStatus, read_job
from regrow_clusters.operator.status import next_status, nodes_finding, with_conditions

TABLE = read_table()


def node(name: str = "n1", *, ready: str = "True", **more: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}, *more.pop("conditions", [])]
    labels, annotations = more.pop("labels", {}), more.pop("annotations", {})
    meta = {"name": name, "labels": labels, "annotations": annotations}
    return {"metadata": meta, "spec": more, "status": {"conditions": conditions}}


def worst(found: dict[str, Any]) -> tuple[str, str]:
    verdicts = judged(TABLE, [found]).get("n1", [])
    return (verdicts[0].severity, verdicts[0].action) if verdicts else ("ok", "none")


HYPERPOD = "sagemaker.amazonaws.com/node-health-status"
SENTINEL = "dgxc.nvidia.com/nvsentinel-state"


@pytest.mark.parametrize(
    ("found", "severity", "action"),
    [
        (node(), "ok", "none"),
        (node(ready="Unknown"), "fatal", "none"),
        (node(unschedulable=True), "leave", "none"),
        (node(conditions=[{"type": "MemoryPressure", "status": "True"}]), "suspect", "none"),
        (node(conditions=[{"type": "MemoryPressure", "status": "False"}]), "ok", "none"),
        (node(conditions=[{"type": "KernelDeadlock", "status": "True"}]), "fatal", "reboot"),
        (node(conditions=[{"type": "KernelDeadlock", "status": "False"}]), "ok", "none"),
        (node(conditions=[{"type": "GpuXidError", "status": "True"}]), "leave", "reset"),
        (node(labels={HYPERPOD: "Schedulable"}), "ok", "none"),
        (node(labels={HYPERPOD: "Unschedulable"}), "leave", "none"),
        (node(labels={HYPERPOD: "UnschedulablePendingReboot"}), "fatal", "reboot"),
        (node(labels={HYPERPOD: "UnschedulablePendingReplacement"}), "fatal", "replace"),
        (node(labels={SENTINEL: "quarantined"}), "leave", "none"),
        (node(labels={SENTINEL: "remediation-succeeded"}), "ok", "none"),
        (node(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]), "fatal", "none"),
        (node(taints=[{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]), "ok", "none"),
        (node(taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}]), "ok", "none"),
    ],
)
def test_what_kubernetes_knows_of_a_node_is_one_of_our_verdicts(
    found: dict[str, Any], severity: str, action: str
) -> None:
    assert worst(found) == (severity, action)


@pytest.mark.parametrize(
    ("state", "reason", "severity", "action"),
    [
        ("idle", "", "", ""),
        ("draining", "", "leave", "none"),
        ("drained", "Action:Replace", "leave", "replace"),
        ("drained", "nsrf: xid 79 GPU has fallen off the bus", "fatal", "reboot"),
        ("down", "Not responding", "fatal", "none"),
        ("draining", "planned maintenance", "leave", "none"),
    ],
)
def test_why_slurm_drains_a_node_is_one_of_our_verdicts(state: str, reason: str, severity: str, action: str) -> None:
    found = TABLE.verdicts("n1", slurm_facts(state, reason))
    assert [(each.severity, each.action) for each in found[:1]] == ([(severity, action)] if severity else [])


def test_a_table_of_ones_own_says_otherwise_and_the_first_rule_that_fits_holds(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    rules = 'what = "label"\nkey = "our/state"\nvalue = "BAD*"\nseverity = "leave"\naction = "replace"\n'
    path.write_text(f'[[rule]]\n{rules}[[rule]]\nwhat = "label"\nkey = "our/*"\nseverity = "ok"\n')
    own = read_table(str(path))
    bad = own.verdicts("n1", [NodeFact("label", "our/state", "bad disk"), NodeFact("label", "our/other", "bad")])
    assert [(each.severity, each.action) for each in bad] == [(Severity.LEAVE, Action.REPLACE)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[rule]]\nwhat = 1", "rule"),
        ('[[rule]]\nwhat = "lable"\nseverity = "ok"', "rule 1 is about 'lable'.*give one of cordon"),
        ('[[rule]]\nwhat = "label"\nseverity = "bad"', "severity"),
        ('[[rule]]\nwhat = "label"\nseverity = "ok"\nvalues = "x"', "values"),
        ("[[rule", "own.toml"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_its_rule(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_table(text, "own.toml")


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read"):
        read_table(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("out", "every", "may"), [(0, 1, True), (1, 19, False), (1, 20, True), (9, 100, True), (10, 100, False)]
)
def test_a_tenth_of_the_nodes_may_be_out_and_one_always(out: int, every: int, may: bool) -> None:
    assert may_mark(out, every) is may


def names(nodes: list[dict[str, Any]]) -> list[str]:
    return [each["metadata"]["name"] for each in nodes]


def test_marks_are_set_within_the_budget_and_what_others_have_set_stays() -> None:
    others = {"key": "team", "effect": "NoSchedule"}
    nodes = [node(f"n{number:02}", taints=[dict(others)]) for number in range(20)]
    wanted = {name: AvoidedNodeMark("quarantined: gpu0 xid 79", 500.0) for name in ("n03", "n05", "n07")}
    changed, left_out = marking(nodes, wanted, 100.0)
    assert (names(changed), left_out) == (["n03", "n05"], ["n07"])
    assert changed[0]["spec"]["taints"] == [
        others,
        {"key": TAINT, "value": "quarantined--gpu0-xid-79", "effect": "NoSchedule"},
    ]
    assert changed[0]["metadata"]["annotations"] == {UNTIL: "500"} and TAINT not in str(nodes)


def test_nodes_that_are_out_already_count_and_are_not_marked() -> None:
    nodes = [node(f"n{number:02}") for number in range(10)]
    nodes[0] = node("n00", ready="Unknown")
    assert marking(nodes, {"n03": AvoidedNodeMark("bad", 500.0)}, 100.0) == ([], ["n03"])
    assert marking(nodes, {"n00": AvoidedNodeMark("bad", 500.0)}, 100.0) == ([], [])
    assert names(marking([node()], {"n1": AvoidedNodeMark("bad", 500.0)}, 100.0)[0]) == ["n1"]  # one always may


def test_a_mark_is_taken_away_when_its_time_is_over_and_not_before_though_the_job_is_gone() -> None:
    marked = marking([node()], {"n1": AvoidedNodeMark("bad", 500.0)}, 100.0)[0]
    assert marking(marked, {}, 499.0) == ([], [])
    (clean,) = marking(marked, {}, 500.0)[0]
    assert clean["spec"]["taints"] == [] and clean["metadata"]["annotations"] == {}
    marked[0]["metadata"]["annotations"] = {UNTIL: "soon"}  # somebody has spoiled it
    assert names(marking(marked, {}, 100.0)[0]) == ["n1"]


def test_the_condition_says_why_and_then_that_nothing_is_known() -> None:
    bad = with_condition(node(), AvoidedNodeMark("gpu0 xid 79", 5.0), 0.0)
    told = {each["type"]: each for each in bad["status"]["conditions"]}
    assert told["Ready"]["status"] == "True"
    assert (told[CONDITION]["status"], told[CONDITION]["message"]) == ("False", "gpu0 xid 79")
    good = with_condition(bad, None, 1.0)["status"]["conditions"]
    assert [each["status"] for each in good if each["type"] == CONDITION] == ["True"]
    assert worst(bad) == ("ok", "none")  # our own word is not taken for the cluster's


# --- what a job finds itself ------------------------------------------------------------------------------------------


def job(status: TrainingJobStatus | None = None, **spec: Any) -> TrainingJob:
    found = training_job(**spec)
    found["metadata"]["uid"] = "u1"
    made = read_job(found)
    return TrainingJob("team", "job", "u1", 1, made.spec, status or TrainingJobStatus())


def pod(name: str, place: int, where: str, attempt: int = 1) -> Any:
    labels = {"job": "job", "replica": name, "place": str(place), "attempt": str(attempt), "job-uid": "u1"}
    meta = {"name": name, "labels": {f"regrow.dev/{key}": value for key, value in labels.items()}}
    found = read_pod({"metadata": meta, "spec": {"nodeName": where}, "status": {"phase": "Running"}})
    assert found is not None
    return found


def test_the_node_of_a_job_is_found_by_its_place_or_by_the_pods_name() -> None:
    pods = [pod("job-1-0-1", 0, "n1"), pod("job-1-2-9", 2, "n3"), pod("job-0-1-1", 1, "old", attempt=0)]
    assert [node_of(job(), pods, name) for name in ("node0", "job-1-2-9", "node1", "node7")] == ["n1", "n3", "", ""]


def test_nodes_that_fail_the_jobs_examinations_are_avoided_for_their_time_told_once_and_then_forgotten() -> None:
    pods = [pod("job-1-0-1", 0, "n1"), pod("job-1-1-2", 1, "n2")]
    figures = JobFigures(3, 0, nodes=[SuspectNode(NodeId("node1"), "gpu0: xid 79")])
    old = job()
    found = found_nodes(old, pods, figures, 1000.0)
    new = next_status(old, read(old, pods, 1000.0), [], 1000.0, figures, found)
    assert new.bad_nodes == [AvoidedNodeStatus("n2", datetime.fromtimestamp(4600.0, UTC), "gpu0: xid 79")]
    assert [(each.reason, each.message) for each in news_of_nodes(old.status, new)] == [
        ("NodeAvoided", "no replica is started on node n2 until 1970-01-01T01:16:40Z: gpu0: xid 79")
    ]
    later = job(new)
    again = next_status(
        later, read(later, pods, 1030.0), [], 1030.0, figures, found_nodes(later, pods, figures, 1030.0)
    )
    assert again.bad_nodes == new.bad_nodes and not news_of_nodes(new, again)  # no write for 30 s more
    worse = JobFigures(3, 0, nodes=[SuspectNode(NodeId("node1"), "gpu0: xid 79", quarantined=True)])
    now = next_status(later, read(later, pods, 1030.0), [], 1030.0, worse, found_nodes(later, pods, worse, 1030.0))
    assert now.bad_nodes[0].quarantined
    assert next_status(later, read(later, [], 4601.0), [], 4601.0).bad_nodes == []


def test_what_speaks_against_the_jobs_own_nodes_is_a_condition() -> None:
    pods = [pod("job-1-0-1", 0, "n1"), pod("job-1-1-2", 1, "n2")]
    known = judged(TABLE, [node("n2", unschedulable=True), node("n9", unschedulable=True)])
    finding = nodes_finding(against(pods, known, ()))
    assert (finding.holds, finding.message) == (False, "n2: leave: cordon unschedulable: true")
    assert nodes_finding({}).holds
    was = TrainingJobStatus()
    told = with_conditions(was, [finding], 1, 0.0)
    assert [(each.reason, each.message) for each in news_of_nodes(was, told)] == [("NodesUnhealthy", finding.message)]
    assert not news_of_nodes(told, with_conditions(told, [finding], 1, 9.0))
