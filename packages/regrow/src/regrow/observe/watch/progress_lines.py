"""Progress of a job for the terminal that started it: a line at the first step, then a line every half minute."""

from collections.abc import Callable

from regrow.core.clock import Clock, MonotonicClock
from regrow.core.ids import Instant, Seconds
from regrow.core.messages import facts
from regrow.core.records import JobEnded, Record
from regrow.observe.story import count, seconds
from regrow.observe.watch.present import Present

EVERY: Seconds = 30.0


class ProgressLines:
    """Prints lines about the steps of a job, as its commits arrive.

    Args:
        say: prints a line.
        repeats: True if more lines follow the line about the first step.
        clock: the clock of the records.
    """

    def __init__(self, say: Callable[[str], None], *, repeats: bool, clock: Clock | None = None) -> None:
        self._say, self._repeats = say, repeats
        self.replaceable: Callable[[], str] = str
        """Returns a sentence about the proofs of newcomers; empty: there are no proofs."""
        self._clock = clock or MonotonicClock()
        self._present = Present()
        self._next: Instant | None = None
        """Time when a line is due; None: no step has been committed yet."""

    def feed(self, item: Record | facts.NodeProgress) -> None:
        """Add a fact or record of the coordinator."""
        self._present.feed(item)
        if isinstance(item, JobEnded):
            self._repeats = False
        if not isinstance(item, facts.NodeProgress) or not item.commits:
            return
        now = self._clock.now()
        if self._next is not None and (now < self._next or not self._repeats):
            return
        self._present.fold(now)
        self._present.mark(now)
        if self._present.last_commit is None:
            return
        self._say(self._begins(now) if self._next is None else self._goes_on(now))
        self._next = now + EVERY

    def _begins(self, now: Instant) -> str:
        known = self._present
        places = f"{count(len(known.ranks), 'rank')} on {count(len(known.nodes()), 'node')}"
        standbys = f", {count(known.standbys, 'standby')} built" if known.standbys else ""
        started = f" {seconds(now - known.started)} after the start" if known.started is not None else ""
        return "; ".join(filter(None, (f"training{started}: {places}{standbys}", self.replaceable())))

    def _goes_on(self, now: Instant) -> str:
        known = self._present
        parts = [f"step {known.step}"]
        if (loss := known.metrics.get("loss")) is not None:
            parts.append(f"loss {loss:.4f}")
        if speed := known.speed(now):
            parts.append(f"{speed:.1f} steps/s" if speed >= 1 else f"{seconds(1 / speed)} a step")
        if known.goodput is not None:
            parts.append(f"goodput {known.goodput:.1%}")
        return ", ".join(parts)
