"""Reasons for the loss of the state, in order of importance: the script's error, a lost process, a torn update."""

from regrow.core.ids import Rank, StepNo
from regrow.core.messages.vocabulary import ErrorReport
from regrow.membership import diagnosis as say
from regrow.membership.fault_plan import ScriptErrors
from regrow.membership.roster import Roster


class Losses:
    """Losses of the present incident, and their causes.

    Args:
        roster: the workers and their steps.
        errors: errors of the script.
    """

    def __init__(self, roster: Roster, errors: ScriptErrors) -> None:
        self._roster, self._errors = roster, errors
        self.text = ""
        """The last error that ended a worker's script in the present incident; empty: none has."""
        self._process = False
        self._first: tuple[Rank, StepNo, ErrorReport] | None = None
        self._passed: tuple[Rank, StepNo, ErrorReport] | None = None

    def fault(self, kind: str, ranks: list[Rank]) -> None:
        """Note a fault of these ranks; without ranks only a symptom of it is known."""
        if ranks:
            self._errors.explained()
        self._process = self._process or (bool(ranks) and kind != "exception")

    def error(self, rank: Rank, step: StepNo, error: ErrorReport) -> None:
        """Note an error that a body raised; only the first one is kept."""
        self._first = self._first or (rank, step, error)

    def formed(self) -> None:
        """Forget the losses of the incident, because a generation has formed and nothing was lost for good."""
        self._passed = self._first or self._passed
        self.text, self._process, self._first = "", False, None

    def take_passed(self) -> str:
        """Message, returned once, about an error that did not recur when the body ran again; empty: there was none."""
        passed, self._passed = self._passed, None
        return say.went_on(*passed) if passed else ""

    @property
    def torn(self) -> dict[Rank, StepNo]:
        """Ranks whose update was cut off, with its step."""
        placed = self._roster.placed()
        return {w.rank: w.torn_at for w in placed if w.rank is not None and w.torn_at is not None}

    def diagnosis(self, step: StepNo, cause: str) -> str:
        """Reason for the loss of the state: a torn update; or `cause`, if no update was torn or a process was lost."""
        torn = say.torn(self.torn)
        return self.first(say.state_lost(step, cause) if self._process or not torn else torn)

    def first(self, text: str) -> str:
        """The text, preceded by the script's own error if there was one."""
        return "\n".join([say.script_error(*self._first), text]) if self._first else text
