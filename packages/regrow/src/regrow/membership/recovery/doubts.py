"""Trust in the survivors' newest state after replicas were found to differ. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.ids import Rank, StepNo
from regrow.membership import recovery_point


@dataclass(frozen=True)
class Doubt:
    """Doubt about the states at `step`. `wrong`: ranks that are known to be wrong; others may be wrong too."""

    step: StepNo
    wrong: frozenset[Rank]


@dataclass
class Doubts:
    """The present doubt about the survivors' newest state, if any."""

    open: Doubt | None = None

    def start(self, survivors: Sequence[recovery_point.SurvivorState]) -> recovery_point.Start | None:
        """State to continue from while there is a doubt; None if no trusted state is left, or there is no doubt."""
        if self.open is None:
            return None
        agreed = recovery_point.go_back(survivors, self.open.step)
        if agreed is not None or any(each.verified >= 0 for each in survivors):
            return agreed
        # Without any earlier agreement, only a majority can be trusted.
        right = frozenset(e.rank for e in survivors if e.state_at == self.open.step and e.rank not in self.open.wrong)
        if self.open.wrong and {e.holding for e in survivors if e.rank in right} == {e.holding for e in survivors}:
            return recovery_point.Start(self.open.step, right)
        return None
