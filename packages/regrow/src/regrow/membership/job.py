"""State of the job that all deciding parts share: its stage, its workers, and the orders."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from regrow.core.exit_codes import OK, UNPROVEN
from regrow.core.ids import Generation, Instant, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages.replacements import replaceability
from regrow.core.messages.vocabulary import FaultSpec, FaultStage, Role
from regrow.membership import diagnosis as say
from regrow.membership import scaling
from regrow.membership.fault_plan import FaultPlan, ScriptErrors
from regrow.membership.incident import Incidents
from regrow.membership.job_state import JobState
from regrow.membership.orders import AnswerScale, Orders
from regrow.membership.roster import RankSlot, Roster
from regrow.membership.scaling import Change
from regrow.membership.states import Ended, Forming, Mending, Retaining, Saving, Switching, Training, Waiting
from regrow.membership.trainings import FinishedTrainings

_HAVE_STATE = Forming | Training | Switching | Mending | Waiting | Retaining
"""States in which workers may have state that is on no disk."""
_UNPROVEN = "trained to its end, but the result is not proven to be that of a run without faults: "


class Job(JobState):
    """One job, and its state.

    Args:
        spec: settings of the job.
        faults: faults on demand, by plan.
        resume: whether the first workers load the newest durable checkpoint.
        plan, incidents, errors: taken over from the previous coordinator.
    """

    def __init__(
        self,
        spec: JobSpec,
        faults: Sequence[FaultSpec],
        resume: bool,
        *,
        plan: FaultPlan | None = None,
        incidents: Incidents | None = None,
        errors: ScriptErrors | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.roster = Roster()
        self.plan = plan or FaultPlan(faults)
        self.orders = Orders(spec, self.roster, self.plan)
        self.trainings = FinishedTrainings(spec, self.roster, self.orders)
        self.incidents = incidents or Incidents()
        self.errors = errors or ScriptErrors()
        self.replacements = Replacements()
        self.generation, self.step = Generation(0), StepNo(0)
        self.past_last_step = False
        """True once every rank has run the last step and the code after it is being recovered."""
        self.restarts = 0
        self.resumes = resume
        """True if workers that start or restart the job read the newest durable checkpoint."""
        self.refused: dict[StepNo, str] = {}
        """Durable checkpoints that some rank could not read, with the reasons; no rank reads them again."""
        self.short_since: Instant | None = None
        """Time since which there has been no place for a lost rank, or for the restart of the world."""
        self.stopping = ""
        """Reason of a requested stop; empty: none was requested. Once set, the job is never restarted."""
        self.stop_by: Instant | None = None
        """Time at which a stopping job ends, whether its state is saved or not."""
        self.look_at: Instant | None = None
        """Time at which a change of the world that has to wait is planned again; None: none waits."""
        self.returned: dict[WorkerId, tuple[Instant, list[str]]] = {}
        """Workers whose scripts have ended: the time of the end, and the threads that keep their processes alive."""
        self.belief = Belief()
        self.apart: tuple[Rank, NodeId] | None = None
        """A rank that has just moved to another node, and the node on which the rest of its replica stayed."""
        self.kept: KeptState | None = None
        """State in the agents' memory for a restart of all workers; None: they build it or read it from disk."""

    @property
    def world(self) -> int:
        """Number of ranks of the present world, or of the one that is being formed."""
        return self.roster.world

    @property
    def replicas(self) -> int:
        """Size of `world` in replicas."""
        return self.roster.world // self.spec.unit

    @property
    def proofs_text(self) -> str:
        """Text for people on the evidence about newcomers and about the result."""
        doubt = self.belief.doubt
        then = f"; the result is not proven, so the job will not end with 0 but with {UNPROVEN}: {doubt}"
        return self.replacements.text + (then if doubt else "")

    def end(self, code: int, diagnosis: str, now: Instant) -> None:
        """End the job. No further decisions are made."""
        if code == OK and self.belief.doubt:
            code, diagnosis = UNPROVEN, _UNPROVEN + self.belief.doubt
        self.goto(Ended(code))
        self.orders.end(code, diagnosis, now)

    def end_saved(self, code: int, diagnosis: str, now: Instant) -> None:
        """End the job once the state in the workers' memory is on disk; at once if the job writes no checkpoints."""
        if not self.spec.checkpoint_every or not isinstance(self.state, _HAVE_STATE):
            self.end(code, diagnosis, now)
            return
        self.orders.halt(self.generation, "the job ends", now)
        self.goto(Saving(now + self.spec.halt_deadline, code, diagnosis))

    def doubted(self, reason: str, now: Instant) -> None:
        """Note that the result is not proven equal to one without faults; with `--on-divergence stop`, end the job."""
        news = self.belief.doubts(reason)
        if news and self.spec.stop_on_divergence and not isinstance(self.state, Saving | Ended):
            self.end_saved(UNPROVEN, f"stopped, as --on-divergence asks: {reason}", now)

    def fault_requested(self, fault: FaultSpec, now: Instant) -> None:
        """Plan a fault that `regrow kill` requests, for the time when its rank reaches that stage; or refuse it."""
        name = self.roster.places.get(fault.rank)
        worker = None if name is None else self.roster.workers[name]
        if worker is None:
            self.orders.note(f"no rank {fault.rank} to fail: the world has ranks 0 to {self.world - 1}", now)
        elif fault.stage is FaultStage.BETWEEN and worker.has_session and not worker.between:
            self.orders.add_answer(AnswerScale(False, say.NOTHING_BETWEEN))
        elif self.plan.add(fault, now):
            self.orders.arm(worker, fault)

    def spawn(self, slot: RankSlot, role: Role, now: Instant, *, grown: int | None = None) -> WorkerId:
        """Start a worker; returns its name. `grown`: size in ranks of the future world that it is for."""
        restored = self.kept is not None and role is Role.RANK
        resume = self.resumes and role is Role.RANK and not restored
        generation, restarts = self.generation, self.restarts
        return self.orders.spawn(
            slot,
            role,
            generation=generation,
            restarts=restarts,
            resume=resume,
            now=now,
            restored=restored,
            avoid=self.refused,
            grown=grown,
            finished=self.trainings.finished,
        )


class WantedSize:
    """The wanted size of the world, and the change that is under way.

    Args:
        spec: settings of the job.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.limits = scaling.Limits.of(spec)
        self.wanted = spec.replicas
        """Number of replicas wanted as soon as there is room for them."""
        self.wanted_by = "the job was started with them"
        """Reason for the number in `wanted`."""
        self.change: Change | None = None
        """Change to record with the next generation."""


@dataclass(frozen=True)
class KeptState:
    """State in the agents' memory: `state@step`. `as_committed`: from before the script's code after that step."""

    step: StepNo
    as_committed: bool = False


class Belief:
    """Evidence that the result equals that of a run without faults.

    Attributes:
        doubt: reason, for people, why that is not proven; empty: there is no doubt.
    """

    def __init__(self) -> None:
        self.doubt = ""
        self.newcomers = False
        """True once a newcomer has committed a step."""
        self._latent = ""
        self._copied = False

    def doubts(self, reason: str) -> bool:
        """Note something that changes the result. Returns True for the first reason noted."""
        news = not self.doubt
        self.doubt = self.doubt or reason
        return news

    def unlike(self, reason: str) -> str:
        """Note that the script gives ranks different values. Returns a doubt if a rank has received another rank's."""
        self._latent = self._latent or reason
        return self._latent if self._copied else ""

    def copied(self) -> str:
        """Note that a rank has received the state of another. Returns the doubt that follows, empty if none."""
        self._copied = True
        return self._latent


class Replacements:
    """The evidence about newcomers of one job. One refutation outweighs all proofs.

    Attributes:
        proven: by rank, the newest step at which a newcomer computed the same as the rank.
        refuted: reason why newcomers of this job do not equal the ranks that they replace, for people; empty: none.
        unproven: reason why the last newcomer could not be compared; empty: it could be, or none was tried.
    """

    def __init__(self) -> None:
        self.proven: dict[Rank, StepNo] = {}
        self.refuted = ""
        self.alone = False
        """True if ranks have state that no other rank has."""
        self.unproven = ""
        self.own: Mapping[str, Set[str]] = {}
        """For each holding: the plain variables of the script that differ between its ranks."""
        self._doubts: set[str] = set()

    @property
    def allowed(self) -> bool:
        """True if a newcomer may fill a lost rank."""
        return not self.refuted

    def proves(self, rank: Rank, step: StepNo) -> None:
        """Note that a newcomer for `rank` computed the same as the rank at `step`."""
        self.proven[rank] = max(step, self.proven.get(rank, step))

    def refutes(self, reason: str, *, alone: bool = False) -> bool:
        """Note that a newcomer does not equal the rank that it would replace. Returns True the first time."""
        news = not self.refuted
        self.alone = self.alone or alone
        self.refuted = self.refuted or reason
        return news

    def doubts(self, reason: str) -> bool:
        """Note that a newcomer could not be compared. Returns True if this reason is new."""
        news = reason not in self._doubts
        self._doubts.add(reason)
        return news

    @property
    def text(self) -> str:
        """Text for people on the evidence about newcomers."""
        return replaceability(self.refuted, self.proven.values(), self.unproven)

    def restarted(self) -> None:
        """Drop the proofs, which do not hold for the new workers. Called when all workers are started again."""
        self.proven.clear()
