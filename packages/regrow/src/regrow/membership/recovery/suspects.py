"""Signs of faulty nodes in the work of single ranks: numbers that are not finite, lines in their output."""

from regrow.core.errors import NotFinite
from regrow.core.ids import Instant, NodeId
from regrow.core.messages.log_rules import LogRuleNews
from regrow.core.messages.vocabulary import ErrorReport
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.membership.job import Job
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.quarantine import Quarantine
from regrow.membership.roster import IN_GENERATION, WorkerRecord
from regrow.membership.states import RUNNING

_NOT_FINITE = f"{NotFinite.__module__}.{NotFinite.__qualname__}"


class Suspects:
    """Turns these signs into verdicts on nodes.

    Args:
        job: the job of the ranks.
        ladder: replaces a worker if a verdict demands it.
        quarantine: takes the verdicts.
    """

    def __init__(self, job: Job, ladder: Ladder, quarantine: Quarantine) -> None:
        self._job, self._ladder, self._quarantine = job, ladder, quarantine
        self._odd: tuple[NodeId, str, str] | None = None
        """Node, device and message of the newest number that is not finite."""

    def not_finite(self, worker: WorkerRecord, error: ErrorReport) -> None:
        """Remember a body's error about a number that is not finite until the step has run again."""
        if error.type == _NOT_FINITE:
            self._odd = (worker.node, f"slot{worker.local_rank}", error.message)

    def gone_on(self, now: Instant) -> None:
        """Report the node of a number that was not finite but was finite when the step ran again."""
        odd, self._odd = self._odd, None
        if odd is not None:
            node, device, text = odd
            evidence = f"{text}; run again it was finite"
            self._quarantine.observed(HealthVerdict(node, device, Severity.SUSPECT, Action.NONE, "nan", evidence), now)

    def printed(self, worker: WorkerRecord | None, event: LogRuleNews, now: Instant) -> None:
        """Turn a worker's news about a log rule, which its output breaks or obeys again, into a verdict."""
        if event.node not in self._job.roster.nodes:
            return
        device = "" if worker is None else f"slot{worker.local_rank}"
        verdict = HealthVerdict(event.node, device, event.severity, event.action, event.source, event.evidence)
        self._quarantine.observed(verdict, now)
        if event.action is Action.REPLACE and worker is not None:
            self._replace(worker, verdict.text, now)

    def _replace(self, worker: WorkerRecord, cause: str, now: Instant) -> None:
        if isinstance(self._job.state, RUNNING) and worker.placed and worker.stage in IN_GENERATION:
            self._job.orders.fence(worker, cause, now, dump=True)
            self._ladder.mend("log", [worker], cause, now, now)
