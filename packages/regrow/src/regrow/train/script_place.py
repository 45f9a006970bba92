"""The script's place in its loop: in a step, after one, or between two."""

from types import FrameType

from regrow.core.ids import StepNo
from regrow.train.after_loop import AfterLoop
from regrow.train.gradients.ddp_buckets import Settling
from regrow.train.gradients.wrappers import Modules
from regrow.train.loop_context import LoopContext
from regrow.train.rehearsal.rehearsal import Rehearsal
from regrow.train.script.next_turn import LoopIterations
from regrow.train.step import Step
from regrow.train.worker.participation import Participation


class ScriptPlace:
    """The part of a loop that records where the script is."""

    worker: Participation
    context: LoopContext
    left: bool
    """True once this worker has no part in the job any more."""
    turns: LoopIterations[Step]
    settling: Settling
    modules: Modules
    after: AfterLoop
    _rehearsal: Rehearsal
    _latest: Step | None
    _looping: bool
    _at_boundary: bool
    """True once the script has done all its work between two steps."""

    @property
    def rank(self) -> int:
        """This worker's rank now."""
        return self.worker.rank

    @property
    def began(self) -> StepNo:
        """The step of the job that is step 0 of this training."""
        return self.worker.training.began

    @property
    def runs_again(self) -> bool:
        """True if the step whose body has just ended was not committed."""
        return not self.after.open and self._latest is not None and not self._latest.committed

    @property
    def counts(self) -> bool:
        """True if the loop of steps is under way, its rehearsal over."""
        return self._looping and self._rehearsal.step is None

    @property
    def behind_a_body(self) -> bool:
        """True if the script is past a step's body, rehearsed or real."""
        step = self._rehearsal.step or (None if self._at_boundary else self._latest)
        return self.after.open or (step is not None and step.left)

    @property
    def between_steps(self) -> bool:
        """True if the loop of steps has begun and the script is in none of them."""
        return self.after.open or (self._looping and not (self._latest is not None and self._latest.inside))

    def _end_between(self) -> None:
        """Note that the script has run all its code after a step."""
        self._at_boundary = True
        if not self.left:
            self.context.protected().between.ends()

    def _set_latest(self, step: Step) -> None:
        self._latest = step

    def substitute(self, step: Step | None) -> None:
        """Set the step that the script runs instead of its own: see `ShadowedLoop.substitute`."""
        self._latest, self._at_boundary = step, step is None

    def skips_the_rest(self, step: Step, innermost: FrameType) -> None:
        """Skip the code after the step's body: see `ShadowedLoop.skips_the_rest`."""
        self.turns.not_left(step, innermost, always=True)

    def cut_off(self, error: BaseException) -> None:
        """Prepare for the next body after an error: see `ShadowedLoop.cut_off`."""
        self.settling.cut_off(self.modules, error)
