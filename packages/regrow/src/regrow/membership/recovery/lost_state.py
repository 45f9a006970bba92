"""Why a state is lost, in the order of what people must know: the script's error, a lost process, a torn update."""

from regrow.core.ids import Rank, StepNo
from regrow.core.messages.vocabulary import ErrorReport
from regrow.membership import diagnosis as say
from regrow.membership.fault_plan import ScriptErrors
from regrow.membership.roster import Roster


class Losses:
    """Losses of the present incident, and their causes.

    Args:
        roster: the workers, and their steps.
        errors: of the script.
    """

    def __init__(self, roster: Roster, errors: ScriptErrors) -> None:
        self._roster, self._errors = roster, errors
        self.text = ""
        """The last error of a worker's own that the present incident has seen."""
        self._process = False
        self._first: tuple[Rank, StepNo, ErrorReport] | None = None
        self._passed: tuple[Rank, StepNo, ErrorReport] | None = None

    def fault(self, kind: str, ranks: list[Rank]) -> None:
        """One has struck these ranks; without ranks only a symptom of it is known."""
        if ranks:
            self._errors.explained()
        self._process = self._process or (bool(ranks) and kind != "exception")

    def error(self, rank: Rank, step: StepNo, error: ErrorReport) -> None:
        """A body has raised; the first one counts."""
        self._first = self._first or (rank, step, error)

    def over(self) -> None:
        """A generation stands: nothing was lost for good."""
        self._passed = self._first or self._passed
        self.text, self._process, self._first = "", False, None

    def passed(self) -> str:
        """The error of a body that has since been run again without it, for people; empty: there was none."""
        passed, self._passed = self._passed, None
        return say.went_on(*passed) if passed else ""

    @property
    def torn(self) -> dict[Rank, StepNo]:
        """Ranks whose update was cut off, with its step."""
        placed = self._roster.placed()
        return {w.rank: w.torn_at for w in placed if w.rank is not None and w.torn_at is not None}

    def diagnosis(self, step: StepNo, cause: str) -> str:
        """Why the state is lost; only where a process was lost, or nobody knows, it is said to be lost with that."""
        torn = say.torn(self.torn)
        return self.first(say.state_lost(step, cause) if self._process or not torn else torn)

    def first(self, text: str) -> str:
        """The text, after the script's own error where there was one."""
        return "\n".join([say.script_error(*self._first), text]) if self._first else text
