"""Serves the progress of a job, and its bad nodes: `GET /figures` of its coordinator, with the job's token."""

from aiohttp import web

from regrow.core.clock import Clock, MonotonicClock
from regrow.core.ids import NodeId
from regrow.core.messages import facts
from regrow.core.records import NodeJudged, NodeQuarantined, Record
from regrow.core.verdicts import Severity
from regrow.membership.server.http_replies import reply
from regrow.observe.watch.present import JobFigures, Present, SuspectNode

_MOST_NODES = 64


class FiguresApi:
    """Collects the coordinator's facts and records, which is cheap, and adds them up only on request.

    Args:
        clock: the clock of the records.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._present = Present()
        self._clock = clock or MonotonicClock()
        self._suspects: dict[NodeId, SuspectNode] = {}

    def feed(self, item: Record | facts.NodeProgress) -> None:
        """Add a fact or record of the coordinator."""
        self._present.feed(item)
        if isinstance(item, NodeQuarantined):
            self._suspects[item.node] = SuspectNode(item.node, item.reason, quarantined=True)
        elif isinstance(item, NodeJudged) and Severity(item.severity).failed and len(self._suspects) < _MOST_NODES:
            known = self._suspects.get(item.node)
            if known is None or not known.quarantined:
                text = " ".join(word for word in (f"{item.source}:", item.device, item.evidence) if word)
                self._suspects[item.node] = SuspectNode(item.node, text)

    def figures(self) -> JobFigures:
        """The present figures."""
        self._present.fold(self._clock.now())
        known = self._present
        return JobFigures(known.step, known.faults, known.goodput, list(self._suspects.values()))

    def routes(self) -> list[web.RouteDef]:
        """Routes to add to the coordinator's server."""
        return [web.get("/figures", self._serve)]

    async def _serve(self, request: web.Request) -> web.Response:
        return reply(self.figures())
