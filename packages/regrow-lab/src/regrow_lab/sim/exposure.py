"""The law of exposed holders: if all ranks that hold one part of the state are on one node, that must be reported."""

from collections.abc import Callable, Mapping, Sequence

from regrow.core.ids import WorkerId
from regrow.core.messages.vocabulary import Member
from regrow.core.records import Noted
from regrow.membership import diagnosis
from regrow.membership.scaling import exposed_ranks
from regrow_lab.sim.workers import SimWorker


class ExposureLaw:
    """Watches one job.

    Args:
        workers: all simulated workers until now.
        require: raises unless the law holds.
    """

    def __init__(self, workers: Mapping[WorkerId, SimWorker], require: Callable[[bool, str], None]) -> None:
        self._workers, self._require = workers, require
        self.exposed = ""
        """Ranks of the newest generation that hold the same part and are on one node, as text."""

    def formed(self, members: Sequence[Member], commands: Sequence[object]) -> None:
        """Check a generation that is ordered with these commands."""
        holdings = {member.rank: self._workers[member.worker].holding for member in members}
        ranks = exposed_ranks(holdings, {member.rank: member.node for member in members}, {})
        exposed = diagnosis.exposed(ranks, "").partition(" and are all on")[0] if ranks else ""
        reported = any(isinstance(each, Noted) and exposed in each.text for each in commands)
        self._require(
            reported or exposed in (self.exposed, ""), f"{exposed} and are on one node, without a report of it"
        )
        self.exposed = exposed
