"""Kubernetes' nodes: the facts that they report, and the mark of a bad node. Pure."""

import copy
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from regrow.core.ids import Instant
from regrow.core.verdicts import HealthVerdict
from regrow_clusters.cluster.node_health import HealthTable, NodeFact, may_mark
from regrow_clusters.operator.resource import GROUP

TAINT: Final = f"{GROUP}/unhealthy"
UNTIL: Final = f"{GROUP}/unhealthy-until"
CONDITION: Final = "RegrowTrainingHealthy"
_LONGEST_VALUE: Final = 63
Manifest = dict[str, Any]


class AvoidedNodeMark(msgspec.Struct, frozen=True):
    """Mark of a bad node: the reason, and the time until which it holds."""

    reason: str
    until: Instant


def node_facts(node: Manifest) -> list[NodeFact]:
    """The cluster's facts about a node."""
    spec, status, labels = node.get("spec") or {}, node.get("status") or {}, node["metadata"].get("labels") or {}
    found = [NodeFact("cordon", "unschedulable", "true")] if spec.get("unschedulable") else []
    for taint in spec.get("taints") or []:
        value = f"={taint['value']}" if taint.get("value") else ""
        found.append(NodeFact("taint", taint.get("key", ""), f"{taint.get('effect', '')}{value}"))
    for each in status.get("conditions") or []:
        text = " ".join(word for word in (each.get("reason", ""), each.get("message", "")) if word)
        found.append(NodeFact("condition", each.get("type", ""), each.get("status", ""), text[:200]))
    return [*found, *(NodeFact("label", key, str(value)) for key, value in sorted(labels.items()))]


def judged(table: HealthTable, nodes: Iterable[Manifest]) -> dict[str, list[HealthVerdict]]:
    """Verdicts by node, the worst first; healthy nodes are left out."""
    found = {each["metadata"]["name"]: table.verdicts(each["metadata"]["name"], node_facts(each)) for each in nodes}
    return {name: verdicts for name, verdicts in found.items() if verdicts}


def marking(
    nodes: list[Manifest], wanted: Mapping[str, AvoidedNodeMark], now: Instant
) -> tuple[list[Manifest], list[str]]:
    """The nodes to be written, and the names of those that the limit on marked nodes leaves unmarked.

    Expired marks are removed first. Taints and annotations of others stay.
    """
    changed, left_out, out = [], [], 0
    for node in nodes:
        until = _marked_until(node)
        if until is not None and until <= now and node["metadata"]["name"] not in wanted:
            changed.append(_unmarked(node))
        elif until is not None or _is_out(node):
            out += 1
    for node in sorted(nodes, key=lambda each: str(each["metadata"]["name"])):
        mark = wanted.get(node["metadata"]["name"])
        if mark is None or _marked_until(node) is not None:
            continue
        if _is_out(node):
            continue  # it takes no pods anyway; whoever took it out of use decides when it returns
        if may_mark(out, len(nodes)):
            out += 1
            changed.append(_marked(node, mark, now))
        else:
            left_out.append(node["metadata"]["name"])
    return changed, left_out


def with_condition(node: Manifest, mark: AvoidedNodeMark | None, now: Instant) -> Manifest:
    """The node with regrow's condition. `mark`: reason of the mark; None: the node is not marked any more."""
    new = copy.deepcopy(node)
    others = [each for each in new.setdefault("status", {}).get("conditions") or [] if each.get("type") != CONDITION]
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {
        "type": CONDITION,
        "status": "True" if mark is None else "False",
        "reason": "NothingKnown" if mark is None else "FailedExaminations",
        "message": "" if mark is None else mark.reason,
        "lastTransitionTime": stamp,
        "lastHeartbeatTime": stamp,
    }
    new["status"]["conditions"] = [*others, said]
    return new


def _is_out(node: Manifest) -> bool:
    """True if the node takes no new pods, for any reason."""
    ready = [
        each.get("status") for each in (node.get("status") or {}).get("conditions") or [] if each["type"] == "Ready"
    ]
    return bool((node.get("spec") or {}).get("unschedulable")) or ready not in ([], ["True"])


def _marked_until(node: Manifest) -> Instant | None:
    """Time until which the node has regrow's mark; None: it has none."""
    if not any(each.get("key") == TAINT for each in (node.get("spec") or {}).get("taints") or []):
        return None
    try:
        return float((node["metadata"].get("annotations") or {}).get(UNTIL, "0"))
    except ValueError:
        return 0.0


def _marked(node: Manifest, mark: AvoidedNodeMark, now: Instant) -> Manifest:
    new = copy.deepcopy(node)
    new["metadata"].setdefault("annotations", {})[UNTIL] = f"{mark.until:.0f}"
    taints = new.setdefault("spec", {}).setdefault("taints", [])
    value = "".join(each if each.isalnum() else "-" for each in mark.reason)[:_LONGEST_VALUE].strip("-")
    taints.append({"key": TAINT, "value": value, "effect": "NoSchedule"})
    return new


def _unmarked(node: Manifest) -> Manifest:
    new = copy.deepcopy(node)
    (new["metadata"].get("annotations") or {}).pop(UNTIL, None)
    new["spec"]["taints"] = [each for each in new["spec"].get("taints") or [] if each.get("key") != TAINT]
    return new
