"""All messages that a worker, an agent or a coordinator may send, each as one union type."""

from regrow.core.messages import facts, orders
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
    ForgetCopies,
    KeepState,
    PlaceCopies,
    ReportCopies,
    SnapshotStored,
    SnapshotTaken,
    StateKept,
    TakeSnapshot,
)
from regrow.core.messages.data import DataNoted, LoaderShown, OrderDeclared, ProducerServed, ProducerWanted
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.log_rules import LogRuleNews, LogRulesNoted
from regrow.core.messages.observations import NodeSeen, ProveAlive, StacksTaken, TakeStacks, WorkerAlive
from regrow.core.messages.replacements import (
    ProveReplacement,
    ReplacementProven,
    ReplacementRefuted,
    ReplacementUnproven,
)
from regrow.core.messages.replicas import CorruptionNamed, ReplicasDiffer, StateSampled
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.core.messages.tables import JoinGeneration, TableMissed, TableOrder

WorkerFact = (
    facts.WorkerReady
    | facts.ModulesImported
    | facts.WorkerFaulted
    | facts.WorkerNoted
    | facts.WorkerHalted
    | facts.HaltMissed
    | facts.WorkerResumed
    | facts.WorkerCommitted
    | facts.WorkerStaged
    | facts.WorkerFinished
    | facts.WorkerFailed
    | facts.ScriptReturned
    | facts.ScriptEnded
    | facts.FaultFired
    | SnapshotTaken
    | StateKept
    | SnapshotForDisk
    | ReplicasDiffer
    | CorruptionNamed
    | StateSampled
    | ReplacementProven
    | ReplacementRefuted
    | LoaderShown
    | ReplacementUnproven
    | OrderDeclared
    | ProducerWanted
    | ProducerServed
    | WorkerAlive
    | StacksTaken
)
"""Facts from a worker to its agent."""

WorkerOrder = (
    orders.StartScript
    | orders.ImportModules
    | orders.HaltGeneration
    | orders.FormGeneration
    | orders.ReleaseWorker
    | orders.ArmFault
    | orders.KeepOwn
    | SnapshotStored
    | TakeSnapshot
    | KeepState
    | ProveReplacement
    | ProveAlive
    | TakeStacks
)
"""Orders that an agent passes on to a worker."""

AgentFact = (
    facts.NodeJoined
    | facts.NodeDraining
    | facts.NodeStopped
    | facts.NodeProgress
    | facts.WorkerStarted
    | facts.WorkerReady
    | facts.ModulesImported
    | facts.WorkerFaulted
    | facts.WorkerNoted
    | facts.WorkerHalted
    | facts.HaltMissed
    | facts.WorkerResumed
    | facts.WorkerCommitted
    | facts.WorkerFinished
    | facts.WorkerFailed
    | facts.ScriptReturned
    | facts.ScriptEnded
    | NodeSeen
    | WorkerAlive
    | facts.WorkerExited
    | facts.FaultFired
    | CopiesHeld
    | StateKept
    | CopyStreamEnded
    | SnapshotHeld
    | PartsWritten
    | CheckpointWritten
    | CheckpointFailed
    | ReplicasDiffer
    | CorruptionNamed
    | StateSampled
    | ReplacementProven
    | ReplacementRefuted
    | LoaderShown
    | ReplacementUnproven
    | DataNoted
    | TableMissed
    | NodeExamined
    | LogRuleNews
    | LogRulesNoted
    | NodeReport
)
"""Facts from an agent to the coordinator."""

NodeTask = (
    orders.SpawnWorker
    | orders.FenceWorker
    | orders.StopNode
    | orders.NoteGeneration
    | ReportCopies
    | ForgetCopies
    | ReportNode
    | PlaceCopies
    | WriteCheckpoint
    | FinishCheckpoint
    | AbandonCheckpoint
)
"""Orders that an agent carries out itself."""

NodeOrder = NodeTask | TableOrder
"""Orders of the coordinator to an agent itself, which name the agent's node."""

AgentOrder = (
    NodeOrder
    | orders.StartScript
    | orders.ImportModules
    | orders.HaltGeneration
    | JoinGeneration
    | orders.ReleaseWorker
    | orders.ArmFault
    | orders.KeepOwn
    | TakeSnapshot
    | KeepState
    | ProveReplacement
    | ProveAlive
    | TakeStacks
)
"""Orders of the coordinator to an agent, for itself or for one of its workers."""

Fact = (
    AgentFact
    | facts.NodeLost
    | facts.StopRequested
    | facts.FaultRequested
    | facts.ScaleRequested
    | facts.DrainRequested
    | facts.MoveRequested
    | facts.TimeAdvanced
)
"""All inputs of the membership machine."""
