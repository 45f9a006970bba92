"""Knowledge of a job that a coordinator has and no agent could give its successor."""

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
    """A node is to be given back by then. `reason`: who asks. `store`: of the agent there; the next has no notice."""

    node: NodeId
    leave_by: Instant
    reason: str
    store: str


@dataclass(frozen=True)
class CoordinatorLoss:
    """The last coordinator went with its node. `at`: when it was last known to be there."""

    node: NodeId
    at: Instant


@dataclass
class JobMemory:
    """Knowledge of the last coordinator.

    Attributes:
        plan: faults on demand, and which have struck.
        incidents: their number, and the one that is open.
        errors: of the script.
        table: the newest that it has made; None: none.
        step: the newest state that it has heard of.
        restarts: how often all workers were started again.
        resumes: whether workers that start the job again read a checkpoint.
        wanted, wanted_by: the number of replicas asked for, and why.
        change: of the world that all workers are being built for.
        announced: a change of the world that workers may not all have heard of.
        spent: when faults were counted.
        doubt: states that are not to be trusted.
        quarantined: nodes on which nothing new is started, and why.
        given_back: nodes that are to be given back.
        gone: workers whose end was written down.
        named: how many workers of each node have had names.
        checkpoints: how many were begun.
        first_build: how long the first workers took to their first step; None: they have not come to it.
        replacements, belief: the evidence about newcomers, and about the result.
        finished: trainings of the script before the present one.
        kept: state that agents have in memory for workers that are all started again.
        stopping, stop_by: why the job is to end, and when; empty: no end was asked for.
        move: ranks that are to go to another node; None: none are.
        loss: how the coordinator was lost; None: it has failed, and its process goes on.
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
