"""The law of exposed holders: all ranks that hold one part of the state stand on one node only where it is said."""

from collections.abc import Callable, Mapping, Sequence

from regrow.core.ids import WorkerId
from regrow.core.messages.vocabulary import Member
from regrow.core.records import Noted
from regrow.membership.scaling import exposed_ranks
from regrow_lab.sim.workers import SimWorker


class ExposureLaw:
    """Watches one job.

    Args:
        workers: all simulated workers that there have been.
        require: raises unless the law holds.
    """

    def __init__(self, workers: Mapping[WorkerId, SimWorker], require: Callable[[bool, str], None]) -> None:
        self._workers, self._require = workers, require
        self.exposed = ""
        """Ranks that hold the same part and stand together, in the newest generation."""

    def formed(self, members: Sequence[Member], commands: Sequence[object]) -> None:
        """A generation is ordered, with these commands."""
        holdings = {member.rank: self._workers[member.worker].holding for member in members}
        ranks = exposed_ranks(holdings, {member.rank: member.node for member in members}, {})
        exposed = f"ranks {', '.join(map(str, ranks))} hold the same part of the state" if ranks else ""
        reported = any(isinstance(each, Noted) and exposed in each.text for each in commands)
        self._require(reported or exposed in (self.exposed, ""), f"{exposed} and stand on one node, and nobody says so")
        self.exposed = exposed
