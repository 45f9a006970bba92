"""Decisions put into commands. What is ordered of a worker is entered in the roster in the same breath."""

from typing import TypeAlias

import msgspec

from regrow.core import events as record
from regrow.core.ids import Generation, Instant, NodeId, Rank, StepNo
from regrow.core.messages import (
    AgentOrder,
    ArmFault,
    FaultSpec,
    FenceWorker,
    FormGeneration,
    HaltGeneration,
    JobFacts,
    ReleaseWorker,
    Role,
    SpawnWorker,
    StartScript,
)
from regrow.membership.faults import FaultPlan
from regrow.membership.roster import IN_GENERATION, Roster, Stage, WorkerRecord


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """The job is over. `code`: the exit code; `diagnosis`: one readable text, empty when all went well."""

    code: int
    diagnosis: str


Command: TypeAlias = AgentOrder | record.Record | EndJob


class Orders:
    """Collects the commands that answer one fact.

    Args:
        facts: what the job was started with.
        roster: where what was ordered is entered.
        plan: faults on demand, sent along.
    """

    def __init__(self, facts: JobFacts, roster: Roster, plan: FaultPlan) -> None:
        self._facts = facts
        self._roster = roster
        self._plan = plan
        self._out: list[Command] = []

    def take(self) -> list[Command]:
        """All since the last call."""
        out, self._out = self._out, []
        return out

    # --- orders ------------------------------------------------------------------------------------------------

    def spawn(
        self,
        node: NodeId,
        role: Role,
        rank: Rank | None,
        *,
        generation: Generation,
        restarts: int,
        resume: bool,
        now: Instant,
    ) -> None:
        """A new worker for a rank, or a standby."""
        # A standby builds under the last rank, so that what a script does on rank 0 alone is not done twice.
        place = rank if rank is not None else Rank(self._facts.world - 1)
        local_rank = place % self._facts.nproc
        worker = self._roster.add_worker(node, role, rank, local_rank, now)
        self._out.append(
            SpawnWorker(
                node=node,
                worker=worker.worker,
                role=role,
                rank=place,
                local_rank=local_rank,
                world=self._facts.world,
                generation=generation,
                store=next(iter(self._roster.nodes.values())).store,
                restarts=restarts,
                resume=resume,
                faults=self._plan.of(place) if role is Role.RANK else [],
            )
        )
        self.write(
            record.WorkerSpawned(at=now, worker=worker.worker, node=node, role=role, rank=place, generation=generation)
        )

    def start_script(self, worker: WorkerRecord, rank: Rank, generation: Generation, now: Instant) -> None:
        """An `imports` standby builds for its rank."""
        worker.script_ordered = True
        self._roster.move(worker, Stage.STARTING, now)
        self._out.append(StartScript(worker.worker, rank, worker.local_rank, generation))

    def halt(self, generation: Generation, reason: str, now: Instant) -> None:
        """Everyone in the generation gives it up."""
        for worker in list(self._roster.seated(*IN_GENERATION)):
            self._roster.move(worker, Stage.HALTING, now)
            self._out.append(HaltGeneration(worker.worker, generation, reason))

    def form(self, generation: Generation, step: StepNo, now: Instant) -> None:
        """Everyone who holds a rank enters a generation that starts with `state@step`."""
        seated = [(rank, self._roster.workers[worker]) for rank, worker in self._roster.places.items()]
        members = [self._roster.member(worker, rank) for rank, worker in seated]
        holders = [rank for rank, worker in seated if worker.state_at == step]
        store = self._roster.nodes[seated[0][1].node].store
        for rank, worker in seated:
            self._roster.move(worker, Stage.JOINING, now)
            self._out.append(
                FormGeneration(
                    worker=worker.worker,
                    generation=generation,
                    rank=rank,
                    local_rank=worker.local_rank,
                    step=step,
                    members=members,
                    holders=holders,
                    store=store,
                    faults=self._plan.of(rank),
                )
            )

    def release(self, stage: Stage, now: Instant) -> None:
        """Nobody needs the state of those at `stage` any more."""
        for worker in list(self._roster.seated(stage)):
            self._roster.move(worker, Stage.RELEASED, now)
            self._out.append(ReleaseWorker(worker.worker))

    def fence(self, worker: WorkerRecord, reason: str, now: Instant, *, dump: bool = False) -> None:
        """The worker must not act any more."""
        self._roster.move(worker, Stage.FENCED, now)
        self._out.append(FenceWorker(worker.node, worker.worker, reason, dump_stacks=dump))

    def arm(self, worker: WorkerRecord, fault: FaultSpec) -> None:
        """The worker fails on demand."""
        self._out.append(ArmFault(worker.worker, fault))

    # --- what is written down ----------------------------------------------------------------------------------

    def write(self, *records: record.Record) -> None:
        """Lines for the record."""
        self._out.extend(records)

    def note(self, text: str, now: Instant, worker: WorkerRecord | None = None) -> None:
        """A line that is none of the others."""
        self.write(record.Noted(at=now, text=text, worker=worker.worker if worker is not None else None))

    def end(self, code: int, diagnosis: str, now: Instant) -> None:
        """The last two commands of a job."""
        self.write(record.JobEnded(at=now, code=code, diagnosis=diagnosis))
        self._out.append(EndJob(code, diagnosis))
