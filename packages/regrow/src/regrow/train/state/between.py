"""Code between the commit of a step and the begin of the next belongs to that step.

A worker that has committed a step itself runs that code, and joins a new generation after it. A worker that joins a new
generation before that code (a step was run again, or received from others) has state that includes its effects already,
so the changes of its own run are put back. If restartable functions are still to be run, newcomers run all of that
code, so they receive the state as it was at the commit.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from regrow.core.errors import StateError
from regrow.core.ids import NO_STATE, StepNo
from regrow.train.state.audit import Habits, Look, ScriptPart, changed
from regrow.train.state.looking import Looker
from regrow.train.state.modes import Modes, Place
from regrow.train.state.moment import Moment, Scope
from regrow.train.values.variables import Variables

_ATTRIBUTES_EVERY = 100
_LEARNT_AFTER = 2
"""Steps that are watched closely: all state that may change is digested, and copied if newcomers may ask for it."""


class RememberedState(Protocol):
    """Protected state whose moments can be remembered and compared."""

    modes: Modes
    variables: Variables
    looker: Looker
    habits: Habits

    def moment(self) -> Moment:
        """Memory for another moment, to which the state can go back; forgotten when the state is replaced."""

    def dismiss(self, moment: Moment) -> None:
        """Drop a moment that is not needed any more."""


class Between:
    """Handles protected state in the time between two steps.

    Args:
        state: the protected state.
    """

    def __init__(self, state: RememberedState) -> None:
        self._state = state
        self._looker = state.looker
        self._commit, self._mark, self._now = state.moment(), state.moment(), state.moment()
        self._committed_at = NO_STATE
        self._steps = 0
        self._closely = False
        self._attributes: dict[Place, object] | None = None
        self._over = self._passing = False
        self._before: Look | None = None
        """State at the commit, while changes after commits are still to be learnt."""
        self.serves_commits = False
        """True if newcomers may have to run all code after the commit: the script has restartable functions."""

    def committed(self, step: StepNo) -> None:
        """Begin after a commit: the state is at `step`, and the code that follows has effect."""
        self._mark.forget()
        self._committed_at = step
        closely = self._steps < _LEARNT_AFTER
        if closely or self._steps % _ATTRIBUTES_EVERY == 0:
            self._learn_attributes()
        self._steps += 1
        if self.serves_commits:
            self._commit.take(self._looker.large() if closely else self._known())
        self._before = self._looker.look(closely=closely)
        self._closely = closely

    def after_last_step(self, step: StepNo) -> None:
        """Begin after the last step: the state is at `step`, and all code that follows has effect."""
        if self._passing and self._commit.taken:
            self._commit.put_back()
        if self._mark.taken:
            self._mark.put_back()
            self._mark.forget()
        self._committed_at, self._before, self._over, self._passing = step, None, True, False
        closely = self._steps < _LEARNT_AFTER
        self._commit.take(self._looker.large() if closely else self._known() | self._looker.likely())

    def passes_by(self, step: StepNo) -> None:
        """As `after_last_step`, for code that all others have run already: its changes are put back."""
        self.after_last_step(step)
        self._passing = True

    def rehearsed(self) -> None:
        """Called after the body of a rehearsal: learn which state the script changes after it."""
        self._before, self._closely = self._looker.look(closely=True), True

    def _learn_attributes(self) -> None:
        if self._attributes is not None:
            self._state.modes.learn(self._attributes)
        self._attributes = self._state.modes.attributes()

    def resumed(self, step: StepNo) -> None:
        """Called in a new generation at `step`: the code that the script still runs has effect, as all ranks run it."""
        if self._committed_at != step or not self._commit.taken:
            self.committed(step)

    def effects_included(self) -> None:
        """Note that the state already has the effects of the code after the step: undo those of the script's run."""
        self._committed_at, self._before = NO_STATE, None
        closely = self._steps < _LEARNT_AFTER
        self._mark.take(self._looker.large() if closely else self._known() | self._looker.likely())
        self._state.variables.postpone()
        # By digests, as weights that are exchanged for an evaluation and restored are no change.
        self._marked, self._closely = self._looker.look(closely=True), True

    def ends(self) -> None:
        """Put back changes that do not count, before the next step. Raises `StateError` if one cannot be put back."""
        if self._mark.taken:
            lost = [
                name
                for name in changed(self._marked, self._looker.look(closely=self._closely))
                if name not in self._mark.scope
            ]
            if lost:
                raise StateError(
                    f"{lost[0]} was changed between two steps, for the first time just after a step that a fault had "
                    "struck, so that it cannot be compared with the other ranks",
                    hint="change it inside the step's body, after optimizer.step()",
                )
            self._mark.put_back()
            self._mark.forget()
        elif self._before is not None:
            now = self._looker.look(closely=self._closely)
            self._state.habits.learn(ScriptPart.BETWEEN, changed(self._before, now))
        self._before = None

    def extend(self, scope: Scope) -> None:
        """Remember the state that a restartable function may change, unless it has changed since the commit."""
        if self._before is None or not self._commit.taken:
            return
        touched = changed(self._before, self._looker.look(closely=self._closely))
        self._commit.extend(Scope(scope.parameters - set(touched), scope.objects - set(touched), host=scope.host))

    @contextlib.contextmanager
    def as_committed(self, step: StepNo, *, over: bool = False) -> Iterator[None]:
        """Context in which the state is as it was at the commit that reached `step`, without later changes.

        Args:
            over: as it was after the loop, including the code that follows the last step.
        """
        if self._committed_at != step or not self._commit.taken or (over and not self._over):
            yield
            return
        scope = self._commit.scope
        if self._before is not None and self._closely:
            now = self._looker.look(closely=True)
            lost = [name for name in changed(self._before, now) if name not in scope]
            if lost:
                raise StateError(
                    f"{lost[0]} was changed between two steps, for the first time when a newcomer came in",
                    hint="change it inside the step's body, after optimizer.step()",
                )
        self._now.take(scope)
        try:
            self._commit.put_back()
            yield
        finally:
            self._now.put_back()

    @contextlib.contextmanager
    def leaves_no_trace(self) -> Iterator[None]:
        """Put back all changes of the state made in this context, unless the state was replaced meanwhile."""
        moment = self._state.moment()
        moment.take(self._known())
        try:
            yield
        finally:
            if moment.taken:
                moment.put_back()
            self._state.dismiss(moment)

    def _known(self) -> Scope:
        return self._looker.scope_of(self._state.habits.all)
