"""What coordinator, agents and workers say to one another.

Facts are past tense, orders imperative. A fact about a worker names it; an order to a worker is routed by its agent.
Every message of a generation carries its number, and is dropped where that number is not the current one.
"""

from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointFailed,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotForDisk,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.messages.copies import (
    CopiesHeld,
    CopyStreamEnded,
    PlaceCopies,
    ReportCopies,
    SnapshotStored,
    SnapshotTaken,
    TakeSnapshot,
)
from regrow.core.messages.data import DataNoted, OrderDeclared, ProducerServed, ProducerWanted
from regrow.core.messages.facts import (
    DrainRequested,
    FaultFired,
    FaultRequested,
    HaltMissed,
    ModulesImported,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeProgress,
    NodeStopped,
    ScaleRequested,
    StopRequested,
    TimeAdvanced,
    WorkerCommitted,
    WorkerExited,
    WorkerFailed,
    WorkerFaulted,
    WorkerFinished,
    WorkerHalted,
    WorkerNoted,
    WorkerReady,
    WorkerResumed,
    WorkerStaged,
    WorkerStarted,
)
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.log_rules import LogRuleNews, LogRulesNoted
from regrow.core.messages.orders import (
    ArmFault,
    FenceWorker,
    FormGeneration,
    HaltGeneration,
    ImportModules,
    NoteGeneration,
    ReleaseWorker,
    SpawnWorker,
    StartScript,
    StopNode,
)
from regrow.core.messages.replicas import CorruptionNamed, ReplicasDiffer, StateSampled
from regrow.core.messages.sights import NodeSeen, ProveAlive, StacksTaken, TakeStacks, WorkerAlive
from regrow.core.messages.succession import NodeReport, ReportNode, WorkerPast
from regrow.core.messages.tables import (
    ChangeTable,
    FetchTable,
    GenerationTable,
    JoinGeneration,
    KeepTable,
    TableMissed,
    TableOrder,
)
from regrow.core.messages.vocabulary import (
    STEP_STAGES,
    ErrorReport,
    FaultHow,
    FaultKind,
    FaultSpec,
    FaultStage,
    Member,
    Role,
    Warmth,
    WorldChange,
)

__all__ = [
    "STEP_STAGES",
    "AgentFact",
    "AgentOrder",
    "ArmFault",
    "ChangeTable",
    "DrainRequested",
    "ErrorReport",
    "Fact",
    "FaultFired",
    "FaultHow",
    "FaultKind",
    "FaultRequested",
    "FaultSpec",
    "FaultStage",
    "FenceWorker",
    "FetchTable",
    "FormGeneration",
    "GenerationTable",
    "HaltGeneration",
    "HaltMissed",
    "ImportModules",
    "JoinGeneration",
    "KeepTable",
    "LogRuleNews",
    "LogRulesNoted",
    "Member",
    "ModulesImported",
    "NodeDraining",
    "NodeExamined",
    "NodeJoined",
    "NodeLost",
    "NodeOrder",
    "NodeProgress",
    "NodeReport",
    "NodeSeen",
    "NodeStopped",
    "NodeTask",
    "NoteGeneration",
    "ProveAlive",
    "ReleaseWorker",
    "ReportNode",
    "Role",
    "ScaleRequested",
    "SpawnWorker",
    "StacksTaken",
    "StartScript",
    "StopNode",
    "StopRequested",
    "TableMissed",
    "TableOrder",
    "TakeStacks",
    "TimeAdvanced",
    "Warmth",
    "WorkerAlive",
    "WorkerCommitted",
    "WorkerExited",
    "WorkerFact",
    "WorkerFailed",
    "WorkerFaulted",
    "WorkerFinished",
    "WorkerHalted",
    "WorkerNoted",
    "WorkerOrder",
    "WorkerPast",
    "WorkerReady",
    "WorkerResumed",
    "WorkerStaged",
    "WorkerStarted",
    "WorldChange",
]

WorkerFact = (
    WorkerReady
    | ModulesImported
    | WorkerFaulted
    | WorkerNoted
    | WorkerHalted
    | HaltMissed
    | WorkerResumed
    | WorkerCommitted
    | WorkerStaged
    | WorkerFinished
    | WorkerFailed
    | FaultFired
    | SnapshotTaken
    | SnapshotForDisk
    | ReplicasDiffer
    | CorruptionNamed
    | StateSampled
    | OrderDeclared
    | ProducerWanted
    | ProducerServed
    | WorkerAlive
    | StacksTaken
)
"""What a worker tells its agent."""

WorkerOrder = (
    StartScript
    | ImportModules
    | HaltGeneration
    | FormGeneration
    | ReleaseWorker
    | ArmFault
    | SnapshotStored
    | TakeSnapshot
    | ProveAlive
    | TakeStacks
)
"""What an agent passes on to a worker."""

AgentFact = (
    NodeJoined
    | NodeDraining
    | NodeStopped
    | NodeProgress
    | WorkerStarted
    | WorkerReady
    | ModulesImported
    | WorkerFaulted
    | WorkerNoted
    | WorkerHalted
    | HaltMissed
    | WorkerResumed
    | WorkerCommitted
    | WorkerFinished
    | WorkerFailed
    | NodeSeen
    | WorkerAlive
    | WorkerExited
    | FaultFired
    | CopiesHeld
    | CopyStreamEnded
    | SnapshotHeld
    | PartsWritten
    | CheckpointWritten
    | CheckpointFailed
    | ReplicasDiffer
    | CorruptionNamed
    | StateSampled
    | DataNoted
    | TableMissed
    | NodeExamined
    | LogRuleNews
    | LogRulesNoted
    | NodeReport
)
"""What an agent tells the coordinator."""

NodeTask = (
    SpawnWorker
    | FenceWorker
    | StopNode
    | NoteGeneration
    | ReportCopies
    | ReportNode
    | PlaceCopies
    | WriteCheckpoint
    | FinishCheckpoint
    | AbandonCheckpoint
)
"""What an agent is to do itself."""

NodeOrder = NodeTask | TableOrder
"""What the coordinator orders an agent for itself: these name its node."""

AgentOrder = (
    NodeOrder
    | StartScript
    | ImportModules
    | HaltGeneration
    | JoinGeneration
    | ReleaseWorker
    | ArmFault
    | TakeSnapshot
    | ProveAlive
    | TakeStacks
)
"""What the coordinator orders an agent, for itself or for one of its workers."""

Fact = AgentFact | NodeLost | StopRequested | FaultRequested | ScaleRequested | DrainRequested | TimeAdvanced
"""All that the membership machine is told."""
