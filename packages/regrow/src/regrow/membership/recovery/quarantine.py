"""Quarantine of nodes: after two failures within the window a node gets no new workers while others have room.

A node fails if an examination finds something `leave` or `fatal`, or if the state of a rank on it was found to be
wrong. Its workers train on until they can be moved. A quarantine never ends a job or makes it smaller: it is not begun
if there is no other node, and lost ranks are filled on the node if there is no room elsewhere.
"""

from collections.abc import Callable

from regrow.core import records as record
from regrow.core.ids import Instant, NodeId
from regrow.core.messages.health import NodeExamined
from regrow.core.verdicts import HealthVerdict, Severity
from regrow.membership import diagnosis as say
from regrow.membership.job import Job

MOST_FAILURES = 2
_KEPT = 8
"""Number of a node's newest verdicts that are shown; the records have all of them."""


class Quarantine:
    """Takes verdicts on nodes.

    Args:
        job: the job of the nodes.
        unfit: called with each node that comes into quarantine, and the reason.
    """

    def __init__(self, job: Job, unfit: Callable[[NodeId, str], None]) -> None:
        self._job, self._roster, self._orders, self._unfit = job, job.roster, job.orders, unfit
        self._failures: dict[NodeId, list[Instant]] = {}
        self._reported: set[NodeId] = set()
        self._examined: dict[NodeId, list[str]] = {}
        self._observed: dict[NodeId, dict[tuple[str, str], str]] = {}
        """Verdicts on nodes from the work of the job on them, by source and device."""

    def examined(self, event: NodeExamined, now: Instant) -> None:
        """Record an agent's examination of its node, and count a failure if the node is unfit."""
        node = self._roster.nodes.get(event.node)
        if node is None:
            return
        self._examined[event.node] = [verdict.text for verdict in event.verdicts]
        self._show(event.node)
        for verdict in event.verdicts:
            self._orders.write(_record(event.node, verdict, event.occasion, now))
        failed = [verdict.text for verdict in event.verdicts if verdict.severity.failed]
        if failed:
            self.failed(event.node, failed[0], now)

    def observed(self, verdict: HealthVerdict, now: Instant) -> None:
        """Take a verdict from the work on a node; `ok` withdraws the source's earlier verdict on the device."""
        known = self._observed.setdefault(verdict.node, {})
        known.pop((verdict.source, verdict.device), None)
        if verdict.severity is not Severity.OK:
            known[verdict.source, verdict.device] = verdict.text
        self._show(verdict.node)
        self._orders.write(_record(verdict.node, verdict, record.IN_TRAINING, now))
        if verdict.severity.failed:
            self.failed(verdict.node, verdict.text, now)

    def _show(self, name: NodeId) -> None:
        reported = [*reversed(self._observed.get(name, {}).values()), *self._examined.get(name, [])]
        self._roster.nodes[name].verdicts = reported[:_KEPT]

    def failed(self, name: NodeId, reason: str, now: Instant) -> None:
        """Count a failure of a node; the second one within the window begins its quarantine."""
        node = self._roster.nodes[name]
        since = now - self._job.spec.window
        failures = [at for at in self._failures.get(name, []) if at > since] + [now]
        self._failures[name] = failures
        if len(failures) < MOST_FAILURES or node.quarantined:
            return
        others = [each for each in self._roster.usable_nodes() if each is not node and not each.quarantined]
        if others:
            node.quarantined = reason
            self._unfit(name, reason)
        elif name in self._reported:
            return
        self._reported.add(name)
        text = say.quarantined(name, len(failures), reason, alone=not others)
        self._orders.write(record.NodeQuarantined(at=now, node=name, reason=reason, alone=not others, text=text))


def _record(node: NodeId, verdict: HealthVerdict, occasion: str, now: Instant) -> record.NodeJudged:
    return record.NodeJudged(
        at=now,
        node=node,
        device=verdict.device,
        severity=verdict.severity,
        action=verdict.action,
        source=verdict.source,
        evidence=verdict.evidence,
        occasion=occasion,
    )
