"""Knowledge about a job that only the coordinator has: a successor cannot get it from the agents."""

from dataclasses import dataclass, field

from regrow.core.ids import Instant, NodeId, Seconds, StepNo, WorkerId
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import WorldChange
from regrow.membership.elastic.moving import RankMove
from regrow.membership.fault_plan import FaultPlan, ScriptErrors
from regrow.membership.incident import Incidents
from regrow.membership.job import Belief, KeptState, Replacements
from regrow.membership.recovery.doubts import Doubt
from regrow.membership.scaling import Change


@dataclass(frozen=True)
class GivenBack:
    """A node to be given back by `leave_by`. `store`: address of the agent that has the notice."""

    node: NodeId
    leave_by: Instant
    reason: str
    store: str


@dataclass(frozen=True)
class CoordinatorLoss:
    """Loss of the last coordinator together with its node. `at`: time at which it was last known to be alive."""

    node: NodeId
    at: Instant


@dataclass
class JobMemory:
    """Knowledge of the last coordinator about the job.

    Attributes:
        plan: faults on demand, and those that have struck.
        incidents: their number, and the open one.
        errors: errors of the script.
        table: the newest table that it made; None: none.
        step: the newest state that it knows of.
        restarts: number of restarts of all workers.
        resumes: True if workers that restart the job read a checkpoint.
        wanted, wanted_by: the wanted number of replicas, and the reason.
        change: change of the world for which all workers are being built.
        announced: a change of the world that not all workers may have received.
        spent: times of the counted faults.
        doubt: states that cannot be trusted.
        quarantined: nodes on which nothing new is started, with the reasons.
        given_back: nodes that are to be given back.
        gone: workers whose end is recorded.
        named: number of worker names used on each node.
        checkpoints: number of checkpoints begun.
        first_build: time until the first workers were ready for their first step; None: they are not ready yet.
        replacements, belief: the evidence about newcomers, and about the result.
        finished: trainings of the script before the present one.
        kept: state in the agents' memory for a restart of all workers.
        stopping, stop_by: reason and time of a requested end; empty: none was requested.
        move: ranks that are to go to another node; None: none are.
        loss: loss of the coordinator; None: it has failed, and its process goes on.
    """

    plan: FaultPlan
    incidents: Incidents
    errors: ScriptErrors
    table: GenerationTable | None
    step: StepNo
    restarts: int
    resumes: bool
    wanted: int
    wanted_by: str
    change: Change | None = None
    announced: WorldChange | None = None
    spent: list[Instant] = field(default_factory=list)
    doubt: Doubt | None = None
    quarantined: dict[NodeId, str] = field(default_factory=dict)
    given_back: list[GivenBack] = field(default_factory=list)
    gone: set[WorkerId] = field(default_factory=set)
    named: dict[NodeId, int] = field(default_factory=dict)
    checkpoints: int = 0
    first_build: Seconds | None = None
    loss: CoordinatorLoss | None = None
    replacements: Replacements = field(default_factory=Replacements)
    belief: Belief = field(default_factory=Belief)
    kept: KeptState | None = None
    finished: list[FinishedTraining] = field(default_factory=list)
    stopping: str = ""
    stop_by: Instant | None = None
    move: RankMove | None = None
