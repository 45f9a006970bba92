"""State of the job that all who decide about it share: its stage, its workers, and the orders."""

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
"""Workers may have state that is on no disk."""
_UNPROVEN = "trained to its end, but the result is not proven to be that of a run without faults: "


class Job(JobState):
    """One job, and its state.

    Args:
        spec: what the job was started with.
        faults: faults on demand, by plan.
        resume: whether the first workers load the newest durable checkpoint.
        plan, incidents, errors: of the coordinator before this one.
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
        """True once every rank has run the last step, and the code behind it is being recovered."""
        self.restarts = 0
        self.resumes = resume
        """True if workers that start the job, or start it again, read the newest durable checkpoint."""
        self.refused: dict[StepNo, str] = {}
        """Durable checkpoints that some rank could not read, and why: nobody reads them any more."""
        self.short_since: Instant | None = None
        """Since when there has been no place for a lost rank, or none for a world to start again."""
        self.stopping = ""
        """Why the job is to end, once somebody has asked for that; from then on it is never started again."""
        self.stop_by: Instant | None = None
        """Time when it ends then, saved or not."""
        self.returned: dict[WorkerId, tuple[Instant, list[str]]] = {}
        """Workers whose scripts have run to their end, the time, and the threads that keep their processes."""
        self.belief = Belief()
        self.apart: tuple[Rank, NodeId] | None = None
        """A rank that has just gone to another node, and the node on which it left others of its replica."""
        self.kept: KeptState | None = None
        """State in the agents' memory for workers that are all started again; None: these build, or read the disk."""

    @property
    def world(self) -> int:
        """Ranks of the world that is, or that will be when the change under way is done."""
        return self.roster.world

    @property
    def replicas(self) -> int:
        """That world in replicas."""
        return self.roster.world // self.spec.unit

    @property
    def proofs_text(self) -> str:
        """Describe for people the evidence about newcomers and about the result."""
        doubt = self.belief.doubt
        then = f"; the result is not proven, so the job will not end with 0 but with {UNPROVEN}: {doubt}"
        return self.replacements.text + (then if doubt else "")

    def end(self, code: int, diagnosis: str, now: Instant) -> None:
        """Nothing more is decided."""
        if code == OK and self.belief.doubt:
            code, diagnosis = UNPROVEN, _UNPROVEN + self.belief.doubt
        self.goto(Ended(code))
        self.orders.end(code, diagnosis, now)

    def end_saved(self, code: int, diagnosis: str, now: Instant) -> None:
        """End as soon as the state that workers have in memory is on disk, where there is a place for it."""
        if not self.spec.checkpoint_every or not isinstance(self.state, _HAVE_STATE):
            self.end(code, diagnosis, now)
            return
        self.orders.halt(self.generation, "the job ends", now)
        self.goto(Saving(now + self.spec.halt_deadline, code, diagnosis))

    def doubted(self, reason: str, now: Instant) -> None:
        """The result is not proven any more to be that of a run without faults; who has asked for that stops here."""
        news = self.belief.doubts(reason)
        if news and self.spec.stop_on_divergence and not isinstance(self.state, Saving | Ended):
            self.end_saved(UNPROVEN, f"stopped, as --on-divergence asks: {reason}", now)

    def fault_requested(self, fault: FaultSpec, now: Instant) -> None:
        """`regrow kill`: it strikes when its rank comes to that stage, or is refused."""
        name = self.roster.places.get(fault.rank)
        worker = None if name is None else self.roster.workers[name]
        if worker is None:
            self.orders.note(f"no rank {fault.rank} to fail: the world has ranks 0 to {self.world - 1}", now)
        elif fault.stage is FaultStage.BETWEEN and worker.has_session and not worker.between:
            self.orders.add_answer(AnswerScale(False, say.nothing_between()))
        elif self.plan.add(fault, now):
            self.orders.arm(worker, fault)

    def spawn(self, slot: RankSlot, role: Role, now: Instant, *, grown: int | None = None) -> WorkerId:
        """Start a worker; returns its name. `grown`: the number of ranks of the world to come that it is for."""
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
    """The size that the world should have, and the change to it that is under way.

    Args:
        spec: what the job was started with.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.limits = scaling.Limits.of(spec)
        self.wanted = spec.replicas
        """Number of replicas wanted as soon as there is room for them."""
        self.wanted_by = "the job was started with them"
        """Why it is that number."""
        self.change: Change | None = None
        """Change to record with the next generation."""


@dataclass(frozen=True)
class KeptState:
    """`state@step` is in the memory of agents. `as_committed`: before what follows in the script."""

    step: StepNo
    as_committed: bool = False


class Belief:
    """Evidence that the result equals that of a run without faults.

    Attributes:
        doubt: why that is not proven, for people; empty: nothing is known against it.
    """

    def __init__(self) -> None:
        self.doubt = ""
        self.newcomers = False
        """True once a worker that came in later has committed a step."""
        self._latent = ""
        self._copied = False

    def doubts(self, reason: str) -> bool:
        """Something was seen that makes the result another one. Returns whether that is news."""
        news = not self.doubt
        self.doubt = self.doubt or reason
        return news

    def unlike(self, reason: str) -> str:
        """Ranks have different values by the script's own doing: harmless until one gets another's. Returns a doubt."""
        self._latent = self._latent or reason
        return self._latent if self._copied else ""

    def copied(self) -> str:
        """A rank has got the state of another. Returns a doubt."""
        self._copied = True
        return self._latent


class Replacements:
    """The evidence about newcomers of one job. One refutation outweighs all proofs.

    Attributes:
        proven: the newest step at which a newcomer computed what the rank computes.
        refuted: why no newcomer of this job is equal to the rank that it replaces, for people; empty: nothing is known.
        unproven: why the last one could not be compared; empty: it could, or nobody has tried.
    """

    def __init__(self) -> None:
        self.proven: dict[Rank, StepNo] = {}
        self.refuted = ""
        self.alone = False
        """True if ranks have state that no other has."""
        self.unproven = ""
        self.own: Mapping[str, Set[str]] = {}
        """By holding: plain variables of the script of which its ranks have different values."""
        self._doubts: set[str] = set()

    @property
    def allowed(self) -> bool:
        """True if a newcomer may fill a lost rank."""
        return not self.refuted

    def proves(self, rank: Rank, step: StepNo) -> None:
        """A newcomer for `rank` computed what it computes at `step`."""
        self.proven[rank] = max(step, self.proven.get(rank, step))

    def refutes(self, reason: str, *, alone: bool = False) -> bool:
        """A newcomer is not equal to the rank that it would replace. Returns whether that is news."""
        news = not self.refuted
        self.alone = self.alone or alone
        self.refuted = self.refuted or reason
        return news

    def doubts(self, reason: str) -> bool:
        """A newcomer could not be compared. Returns whether that is news."""
        news = reason not in self._doubts
        self._doubts.add(reason)
        return news

    @property
    def text(self) -> str:
        """Describe the evidence about newcomers."""
        return replaceability(self.refuted, self.proven.values(), self.unproven)

    def restarted(self) -> None:
        """All workers are new: what was proven of those before says nothing of them."""
        self.proven.clear()
