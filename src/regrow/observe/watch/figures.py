"""A job in three numbers, for whoever runs it in a cluster: `GET /figures` of its coordinator, with the job's token."""

from aiohttp import web

from regrow.core.clock import Clock, MonotonicClock
from regrow.core.messages import NodeProgress
from regrow.core.records import Record
from regrow.membership.server.http_replies import reply
from regrow.observe.watch.present import JobFigures, Present


class FiguresDesk:
    """Takes in what the coordinator hears, which is cheap, and adds up when somebody asks.

    Args:
        clock: that of the records.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._present = Present()
        self._clock = clock or MonotonicClock()

    def feed(self, item: Record | NodeProgress) -> None:
        """What the coordinator has heard or written down."""
        self._present.feed(item)

    def figures(self) -> JobFigures:
        """As of now."""
        self._present.fold(self._clock.now())
        return JobFigures(self._present.step, self._present.kinds.total(), self._present.goodput)

    def routes(self) -> list[web.RouteDef]:
        """For the coordinator."""
        return [web.get("/figures", self._serve)]

    async def _serve(self, request: web.Request) -> web.Response:
        return reply(self.figures())
