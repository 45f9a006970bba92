"""Conversion of decisions into commands. Each order to a worker is entered in the roster at the same time."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

from regrow.core import records as record
from regrow.core.ids import Generation, Instant, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import orders
from regrow.core.messages.copies import CopySource, CopyStreamEnded, PlaceCopies, ReportCopies
from regrow.core.messages.elections import Leader
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.tables import JoinGeneration, TableHead, TableMissed, runs_of
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.unions import AgentOrder
from regrow.core.messages.vocabulary import FaultSpec, Role, Warmth, WorldChange
from regrow.membership.fault_plan import FaultPlan
from regrow.membership.recovery_point import CopyHolder, Start
from regrow.membership.roster import IN_GENERATION, NodeRecord, RankSlot, Roster, Stage, WorkerRecord
from regrow.membership.tables import Tables


class EndJob(msgspec.Struct, frozen=True, tag=True):
    """Command to end the job. `code`: the exit code; `diagnosis`: a text for people, empty after success."""

    code: int
    diagnosis: str


class Deposed(EndJob, frozen=True, tag=True):
    """Command to end this coordinator, while the job goes on under another one. `by`: the elected leader.

    None: no leader is elected yet, but the voters no longer answer this one and elect another once it is gone.
    """

    by: Leader | None


class AnswerScale(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `ScaleRequested` or a `FaultRequested`, passed on among the commands.

    `reason`: the reason of a refusal, or the consequence of an accepted request.
    """

    accepted: bool
    reason: str


Command: TypeAlias = AgentOrder | record.Record | EndJob | AnswerScale


class Orders:
    """Collects the commands that answer one fact.

    Args:
        spec: settings of the job.
        roster: records what was ordered.
        plan: faults on demand, which are sent with the orders.
    """

    def __init__(self, spec: JobSpec, roster: Roster, plan: FaultPlan) -> None:
        self.tables = Tables()
        self._spec = spec
        self._roster = roster
        self._plan = plan
        self._out: list[Command] = []
        self.left: dict[Rank, list[OwnValues]] = {}
        """For each rank: the values of its own that its worker left when it ended."""

    def take(self) -> list[Command]:
        """The commands since the last call."""
        out, self._out = self._out, []
        return out

    # --- orders ------------------------------------------------------------------------------------------------

    def spawn(
        self,
        slot: RankSlot,
        role: Role,
        *,
        generation: Generation,
        restarts: int,
        resume: bool,
        restored: bool,
        now: Instant,
        avoid: Collection[StepNo] = (),
        grown: int | None = None,
        finished: Sequence[FinishedTraining] = (),
    ) -> WorkerId:
        """Start a worker for a rank, or a standby; returns its name. `grown`: size in ranks of a candidate's world.

        `avoid`: durable checkpoints that it must not read. `finished`: the script's trainings before its own.
        """
        worker = self._roster.add_worker(slot, role, now, candidate=grown is not None)
        worker.built_world = self._roster.world if grown is None else grown
        self._out.append(
            orders.SpawnWorker(
                node=slot.node,
                worker=worker.worker,
                role=role,
                rank=slot.rank,
                local_rank=slot.local_rank,
                world=self._roster.world if grown is None else grown,
                generation=generation,
                restarts=restarts,
                resume=resume,
                restored=restored,
                faults=self._plan.of(slot.rank) if role is Role.RANK else [],
                warmth=_warmth(role, early=self._roster.nodes[slot.node].early),
                avoid=sorted(avoid) if resume else [],
                stores=[] if role is Role.RANK else self._stores_for(slot.node),
                finished=list(finished),
            )
        )
        self.write(
            record.WorkerSpawned(
                at=now, worker=worker.worker, node=slot.node, role=role, rank=slot.rank, generation=generation
            )
        )
        return worker.worker

    def _stores_for(self, node: NodeId) -> list[str]:
        """Stores in which a node without ranks finds the answers that the first workers received before their loop."""
        table, own = self.tables.newest, self._roster.nodes[node].store
        return [] if table is None or own in table.stores else table.stores

    def standby_slot(self, node: NodeRecord) -> RankSlot:
        """The rank for which a new standby on this node builds.

        If all ranks have the same state and groups it is the last rank, so that work for rank 0 is not done twice; on
        a node with a single rank it is that rank, so that the script gets the right answers. Otherwise a standby can
        replace one rank only, and the node's ranks take turns, beginning with the last. Standbys of a spare node are
        built for the ranks of the last node, as ranks of other nodes have the same places in their replicas.
        """
        last = Rank(self._roster.world - 1)
        own = sorted(worker.rank for worker in node.placed.values() if worker.rank is not None)
        alike = not (self._roster.sharded or self._roster.grouped)
        if alike and (len(own) != 1 or own[0] == 0 or node.slots > 1):
            return RankSlot(node.node, last, last % self._spec.nproc)
        if not own:
            own = [Rank(rank) for rank in range(max(0, last + 1 - self._spec.nproc), last + 1)]
        taken = [standby.built_for for standby in node.standbys.values()]
        rank = min(reversed(own), key=taken.count)
        return RankSlot(node.node, rank, self._roster.home(rank)[1])

    def start_script(
        self, worker: WorkerRecord, rank: Rank, generation: Generation, now: Instant, *, world: int
    ) -> None:
        """Have an `imports` standby run the script for its rank."""
        worker.script_ordered, worker.built_for = True, rank
        worker.built_slot, worker.built_world = worker.local_rank, world
        self._roster.move(worker, Stage.STARTING, now)
        self._out.append(orders.StartScript(worker.worker, rank, worker.local_rank, generation, world))

    def halt(self, generation: Generation, reason: str, now: Instant) -> None:
        """Order every worker of the generation to give it up."""
        for worker in list(self._roster.placed(*IN_GENERATION)):
            self._roster.move(worker, Stage.HALTING, now)
            self._out.append(orders.HaltGeneration(worker.worker, generation, reason))

    def halt_before(self, step: StepNo, generation: Generation, reason: str) -> None:
        """Order every worker of the generation to go on until just before a step."""
        for worker in self._roster.placed(Stage.MEMBER):
            self._out.append(orders.HaltGeneration(worker.worker, generation, reason, step))

    def ask_copies(self, generation: Generation) -> list[NodeId]:
        """Ask every node to report its copies of state; returns the nodes that were asked."""
        nodes = [node.node for node in self._roster.living_nodes()]
        self._out.extend(ReportCopies(node, generation) for node in nodes)
        return nodes

    def build(self, generation: Generation, nodes: Sequence[NodeRecord]) -> None:
        """Distribute the keys of a generation over these nodes, on which workers for all ranks are about to start."""
        self._out.extend(self.tables.spread(TableHead(generation, self._roster.world), nodes, []))

    def missed(self, fact: TableMissed) -> None:
        """Send a node the table that it lacks."""
        self._out.extend(self.tables.missed(fact))

    def form(
        self,
        generation: Generation,
        start: Start,
        now: Instant,
        *,
        change: WorldChange | None = None,
        over: bool = False,
        as_committed: bool = False,
    ) -> None:
        """Order every worker with a rank to enter a generation.

        Args:
            change: difference in size from the last formed generation.
            over: every rank has run the last step.
            as_committed: run the script's code after the last step again, even if no worker has reported that it must.
        """
        placed = [(rank, self._roster.workers[worker]) for rank, worker in self._roster.places.items()]
        members = [self._roster.member(worker, rank) for rank, worker in placed]
        # A newcomer has run no restartable function, so all begin with the first again; others remember the results.
        # A `ready` worker reports its `restart_index` for the step that it reaches by its pending update.
        again = any(w.restart_index and w.state_at + w.ready == start.step for _, w in placed)
        head = TableHead(
            generation=generation,
            world=len(members),
            step=start.step,
            holders=runs_of(sorted(start.holders)),
            restart_index=int(as_committed or (again and not start.rewind)),
            rewind=start.rewind,
            change=change,
            whole_body=any(worker.whole_body for _, worker in placed),
            over=over,
        )
        self._out.extend(self.tables.spread(head, self._roster.member_nodes(), members))
        for rank, worker in placed:
            worker.entered = generation if worker.entered is None else worker.entered
            self._roster.move(worker, Stage.JOINING, now)
            restore = self._restore(start.restored.get(rank))
            faults, left = self._plan.of(rank), self.left.get(rank, [])
            receives = rank not in start.holders and restore is None and not head.restart_index
            own = next((each for each in left if receives and each.step == start.step), None)
            self._out.append(JoinGeneration(worker.worker, rank, generation, self.tables.number, faults, restore, own))
        self.left = {} if start.rewind else self.left  # Steps that run again may have other results.
        # Agents without ranks need the start step too, to decide which steps of their former workers count.
        elsewhere = [node.node for node in self._roster.living_nodes() if not node.placed]
        self._out.extend(orders.NoteGeneration(node, generation, start.step) for node in elsewhere)

    def _restore(self, source: CopyHolder | None) -> CopySource | None:
        if source is None:
            return None
        return CopySource(source.rank, source.step, self._roster.nodes[source.node].copy_endpoint)

    def release(self, stage: Stage, now: Instant) -> None:
        """Release the workers at `stage`, whose state is no longer needed."""
        for worker in list(self._roster.placed(stage)):
            self._roster.move(worker, Stage.RELEASED, now)
            self._out.append(orders.ReleaseWorker(worker.worker))

    def release_from_loop(self) -> None:
        """Let every worker of the generation leave its loop, or continue in the code after it."""
        self._out.extend(
            orders.ReleaseWorker(worker.worker, goes_on=True) for worker in self._roster.placed(*IN_GENERATION)
        )

    def dismiss(self, worker: WorkerRecord, reason: str, change: WorldChange, now: Instant) -> None:
        """Remove a worker from a job that goes on: release a halted one, fence any other living one."""
        if worker.stage is Stage.HALTED:
            self._roster.dismiss(worker)
            self._roster.move(worker, Stage.RELEASED, now)
            self._out.append(orders.ReleaseWorker(worker.worker, change))
        elif worker.living:
            self.fence(worker, reason, now)

    def fence(self, worker: WorkerRecord, reason: str, now: Instant, *, dump: bool = False) -> None:
        """Order the end of a worker, which must not act any more."""
        self._roster.move(worker, Stage.FENCED, now)
        self._out.append(orders.FenceWorker(worker.node, worker.worker, reason, dump_stacks=dump))

    def arm(self, worker: WorkerRecord, fault: FaultSpec) -> None:
        """Order a worker to fail on demand."""
        self._out.append(orders.ArmFault(worker.worker, fault))

    def place_copies(self, node: NodeId, buddy: NodeId | None) -> None:
        """Order a node to send its copies to `buddy` from now on; None: to keep them locally only."""
        there = self._roster.nodes[buddy].copy_endpoint if buddy is not None else ""
        self._roster.nodes[node].buddy = buddy
        self._out.append(PlaceCopies(node, buddy or NodeId(""), there))

    def add(self, order: AgentOrder) -> None:
        """Add an order that changes nothing in the roster."""
        self._out.append(order)

    def add_answer(self, answer: AnswerScale) -> None:
        """Add the answer to a request for a change."""
        self._out.append(answer)

    # --- records -----------------------------------------------------------------------------------------------

    def write(self, *records: record.Record) -> None:
        """Add records to be written."""
        self._out.extend(records)

    def copied(self, fact: CopyStreamEnded, every: int, now: Instant) -> None:
        """Record that a copy has reached the buddy, or note that it cannot."""
        if fact.error:
            self.note(f"{fact.error}; training goes on, its copies stay on {fact.node} alone", now)
            return
        self.write(
            record.CopyStreamed(
                at=now,
                node=fact.node,
                buddy=fact.buddy,
                rank=fact.rank,
                step=fact.step,
                nbytes=fact.nbytes,
                seconds=fact.seconds,
                every=every,
            )
        )

    def note(self, text: str, now: Instant, worker: WorkerRecord | None = None) -> None:
        """Write a note to the records."""
        self.write(record.Noted(at=now, text=text, worker=worker.worker if worker is not None else None))

    def end(self, code: int, diagnosis: str, now: Instant) -> None:
        """Add the command that ends a job, after its last record."""
        self.write(record.JobEnded(at=now, code=code, diagnosis=diagnosis))
        self._out.append(EndJob(code, diagnosis))


def _warmth(role: Role, *, early: bool) -> Warmth | None:
    """Warmth of a new worker; None: the warmth that the job's settings give."""
    if role is Role.PROVER:
        return Warmth.BUILT  # Its place is known from the beginning.
    return Warmth.IMPORTS if early else None
