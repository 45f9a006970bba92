"""Reports of agents about their workers, to a coordinator that takes over a running job."""

import msgspec

from regrow.core.ids import NO_STATE, Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages.facts import WorkerFailed, WorkerFaulted, WorkerFinished, WorkerHalted, WorkerReady
from regrow.core.messages.orders import SpawnWorker
from regrow.core.messages.tables import GenerationTable


class ReportNode(msgspec.Struct, frozen=True, tag=True):
    """To an agent: report all you know of your workers. The answer covers all earlier orders; later facts are news.

    `number`: of this request, copied into the answer. `table`: whether the answer must include the newest table.
    """

    node: NodeId
    number: int
    table: bool = False


class WorkerPast(msgspec.Struct, frozen=True):
    """One worker as its agent knows it: the orders sent to it and its facts.

    `spawn`: the order that started it. `rank`, `local_rank`: its place by the newest order; `built_for`, `built_slot`,
    `built_world`: the place for which its script ran. `generation`: the newest that it was ordered to enter, 0: none;
    `entered`: the first. `stands`: it has reported that it is in `generation`. `halting`: it was ordered to give that
    generation up, at once, or (`planned`) before a step. `state_at`: last known step of its state. `ready`, `halted`,
    `finished`, `faulted`: its last facts of these kinds, the last three of this generation. `failed`: the fact of its
    script's failure. `code`: its exit code; None: it has not ended.
    """

    worker: WorkerId
    spawn: SpawnWorker
    rank: Rank
    local_rank: int
    built_for: Rank
    built_slot: int
    built_world: int
    pid: int = 0
    script_ordered: bool = False
    generation: Generation = Generation(0)
    entered: Generation | None = None
    state_at: StepNo = NO_STATE
    stands: bool = False
    halting: bool = False
    planned: bool = False
    released: bool = False
    let_on: bool = False
    fenced: bool = False
    ready: WorkerReady | None = None
    halted: WorkerHalted | None = None
    finished: WorkerFinished | None = None
    faulted: WorkerFaulted | None = None
    failed: WorkerFailed | None = None
    code: int | None = None

    @property
    def alive(self) -> bool:
        """True if the worker's process may still act."""
        return self.code is None


class NodeReport(msgspec.Struct, frozen=True, tag=True):
    """All that an agent knows of its workers: the living ones, and the ended ones that its newest table contains.

    `number`: of the request. `table`: number of the newest table. `numbered`: how many workers the agent was ordered to
    start so far, by their names. `newest`: the table itself, if requested.
    """

    node: NodeId
    number: int
    workers: list[WorkerPast]
    table: int = 0
    numbered: int = 0
    newest: GenerationTable | None = None
