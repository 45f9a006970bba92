"""Lists the cluster's nodes every half a minute, and marks bad ones if that is enabled. No job's work waits for it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from regrow.core.ids import Instant
from regrow.core.verdicts import HealthVerdict
from regrow_clusters.cluster.node_health import HealthTable
from regrow_clusters.cluster.observed import AvoidedNode
from regrow_clusters.operator.api import ApiFailure, ApiKind, ClusterApi, Manifest
from regrow_clusters.operator.nodes import TAINT, AvoidedNodeMark, judged, marking, with_condition

_LOG = logging.getLogger("regrow.operator")
_MOST_AVOIDED = 64
"""Most nodes in a pod's affinity, one term each; the scheduler itself avoids cordoned and tainted nodes."""


class NodeWatch:
    """Watch on the nodes.

    Args:
        api: the cluster.
        table: the verdicts on the cluster's facts.
        mark: nodes that jobs have quarantined get a taint and a condition.
    """

    def __init__(self, api: ClusterApi, table: HealthTable, *, mark: bool) -> None:
        self._api, self._table, self._mark = api, table, mark
        self._reported: set[str] = set()
        self.verdicts: dict[str, list[HealthVerdict]] = {}
        """By node: the verdicts, the worst first; healthy nodes are left out."""
        self._asked = False
        self._keys: set[str] = set()
        self._labels: dict[str, dict[str, str]] = {}
        """By node: the labels with the requested keys."""
        self._sought: set[str] = set()
        self.look_soon = asyncio.Event()
        """Set when a job waits for the labels of a node."""

    async def turn(self, wanted: Mapping[str, AvoidedNodeMark], now: Instant) -> bool:
        """List the nodes once; True if anything has changed. A failure is logged once, and retried at the next turn."""
        try:
            nodes, _ = await self._api.list(ApiKind.NODES)
        except ApiFailure as failure:
            self._say("list", f"nodes cannot be listed, so their health is not known: {failure}")
            self._asked = self._asked or failure.refused
            return failure.refused and self._keep_labels([])
        first, self._asked = not self._asked, True
        first |= self._keep_labels(nodes)
        before, self.verdicts = self.verdicts, judged(self._table, nodes)
        if self._mark:
            await self._write_marks(nodes, wanted, now)
        return first or _shape(before) != _shape(self.verdicts)

    def bad_nodes(self) -> tuple[AvoidedNode, ...] | None:
        """Nodes on which no replica may be started, by the cluster's present facts. None: they were not listed yet."""
        if not self._asked:
            return None
        bad = [(name, found[0]) for name, found in sorted(self.verdicts.items()) if found[0].severity.failed]
        return tuple(AvoidedNode(name, float("inf"), first.text, leave=True) for name, first in bad[:_MOST_AVOIDED])

    def labels_of(self, node: str, keys: Sequence[str]) -> dict[str, str] | None:
        """The labels of a node with these keys; None: not known yet, so a list is requested.

        Empty for a node that does not exist, or if nodes may not be listed.
        """
        if node not in self._labels or not self._keys.issuperset(keys):
            self._keys.update(keys)
            self._sought.add(node)
            self.look_soon.set()
            return None
        return {key: self._labels[node][key] for key in keys if key in self._labels[node]}

    def _keep_labels(self, nodes: list[Manifest]) -> bool:
        """Keep the labels of nodes; True if a job waits for them."""
        self.look_soon.clear()
        found = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in nodes} if self._keys else {}
        sought = {node: found.get(node, {}) for node in self._sought} | found
        self._labels = {
            node: {key: str(labels[key]) for key in self._keys & labels.keys()} for node, labels in sought.items()
        }
        waited, self._sought = bool(self._sought), set()
        return waited

    async def _write_marks(self, nodes: list[Manifest], wanted: Mapping[str, AvoidedNodeMark], now: Instant) -> None:
        changed, left_out = marking(nodes, wanted, now)
        for name in left_out:
            self._say(
                f"budget {name}",
                f"node {name} ({wanted[name].reason}) is not marked: a tenth of all nodes is marked already",
            )
        for node in changed:
            name = node["metadata"]["name"]
            mark = wanted.get(name) if any(each["key"] == TAINT for each in node["spec"].get("taints") or []) else None
            try:
                made = await self._api.replace(ApiKind.NODES, node)
                await self._api.replace_status(ApiKind.NODES, with_condition(made, mark, now))
            except ApiFailure as failure:
                if not failure.conflict:
                    self._say(f"mark {name}", f"node {name} cannot be marked: {failure}")
                continue
            _LOG.info("node %s %s", name, f"is marked: {mark.reason}" if mark else "is not marked any more")

    def _say(self, what: str, text: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            _LOG.warning(text)


def _shape(found: Mapping[str, list[HealthVerdict]]) -> list[tuple[str, str]]:
    return [(name, verdicts[0].text) for name, verdicts in sorted(found.items())]
