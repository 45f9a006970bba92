"""Entry of a new machine into a running job, from its agents' reports on the workers' ranks and progress.

A generation in which every worker is undisturbed goes on, and no worker receives an order. Any other generation is
given up as after a fault, and the next is formed from the workers' steps. Workers still joining become standbys.
"""

from collections.abc import Mapping, Sequence

from regrow.core import records as record
from regrow.core.exit_codes import NODE_LOST
from regrow.core.ids import Instant, NodeId, Rank, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.succession import NodeReport, WorkerPast
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import Member, Role
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.elastic.moving import RankMove
from regrow.membership.job import Job, WantedSize
from regrow.membership.nodes import Nodes
from regrow.membership.recovery import standbys
from regrow.membership.recovery.formation import Generations
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.recovery_point import enter_halted, enter_ready
from regrow.membership.roster import Stage, WorkerRecord
from regrow.membership.states import Building, Closing, Ended, Releasing, Training
from regrow.membership.succession.memory import CoordinatorLoss, GivenBack, JobMemory
from regrow.membership.workers import WorkerFailure, Workers

TAKEN_OVER = "its decisions were taken over from a coordinator that had failed"


class Succession:
    """Collects the knowledge that a machine has and agents lack, and enters a running job into a new machine.

    Args:
        job: the machine's job.
        size: the wanted size of the world.
        ladder: repairs a generation that is not intact.
        generations: knowledge about the present generation.
        standbys: receives what workers have built.
        nodes: places copies between nodes.
        workers: receives facts that the last coordinator may not have handled.
        checkpoints: must not use the numbers of earlier checkpoints again.
    """

    def __init__(
        self,
        job: Job,
        size: WantedSize,
        ladder: Ladder,
        generations: Generations,
        standbys: Standbys,
        nodes: Nodes,
        workers: Workers,
        checkpoints: Checkpoints,
    ) -> None:
        self._job, self._size, self._ladder, self._generations = job, size, ladder, generations
        self._standbys, self._nodes, self._workers = standbys, nodes, workers
        self._checkpoints = checkpoints
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._pasts: dict[str, WorkerPast] = {}
        self._gone: set[WorkerId] = set()
        """Workers whose end is in the records already."""
        self._loss: CoordinatorLoss | None = None

    def remember(self, move: RankMove | None) -> JobMemory:
        """Knowledge about the job that a successor cannot get from the agents. `move`: the accepted move, if any."""
        job, nodes = self._job, self._roster.nodes.values()
        return JobMemory(
            plan=job.plan,
            incidents=job.incidents,
            errors=job.errors,
            table=self._orders.tables.newest,
            step=job.step,
            restarts=job.restarts,
            resumes=job.resumes,
            wanted=self._size.wanted,
            wanted_by=self._size.wanted_by,
            change=self._size.change,
            announced=self._generations.announced,
            spent=list(self._ladder.budget.times),
            doubt=self._generations.doubts.open,
            quarantined={node.node: node.quarantined for node in nodes if node.quarantined},
            given_back=[
                GivenBack(node.node, node.leave_by, node.leave_reason, node.store)
                for node in nodes
                if node.leave_by is not None and not node.away  # The notice does not hold for the node's next agent.
            ],
            gone=self._gone | {w.worker for w in self._roster.workers.values() if w.stage is Stage.GONE},
            named=dict(self._roster.named),
            checkpoints=self._checkpoints.attempts,
            first_build=self._roster.first_build,
            replacements=job.replacements,
            belief=job.belief,
            kept=job.kept,
            finished=list(job.trainings.finished),
            stopping=job.stopping,
            stop_by=job.stop_by,
            move=move,
        )

    def notices(self, memory: JobMemory, now: Instant) -> list[facts.NodeDraining]:
        """Notices of nodes that are to be given back, if the agents that received them are still connected."""
        there = {node.node: node.store for node in self._roster.living_nodes()}
        return [
            facts.NodeDraining(given.node, max(0.0, given.leave_by - now), given.reason)
            for given in memory.given_back
            if there.get(given.node) == given.store
        ]

    def adopt(
        self,
        joined: Sequence[facts.NodeJoined],
        reports: Mapping[NodeId, NodeReport],
        failures: Sequence[WorkerFailure],
        memory: JobMemory,
        now: Instant,
    ) -> None:
        """Enter the job. `joined`: the connected agents, which have all reported. `failures`: came after that."""
        self._recall(memory)
        self._loss = memory.loss
        table = memory.table
        pasts = [past for report in reports.values() for past in report.workers]
        self._pasts = {past.worker: past for past in pasts}
        self._gone = set(memory.gone)
        for node, report in reports.items():
            self._roster.named[node] = max(report.numbered, self._roster.named.get(node, 0))
        numbers = [report.table for report in reports.values()]
        self._orders.tables.take_over(table, max(numbers, default=0))
        if table is None:
            for each in joined:
                self._nodes.joined(each, now)
            return
        self._enter_nodes(table, joined, reports, now)
        generations = [max(past.generation, past.spawn.generation) for past in pasts]
        self._job.generation = max([table.head.generation, *generations])
        self._job.step = memory.step
        self._roster.world = table.head.world
        if table.members:
            self._go_on(table, now)
        else:
            self._size.change = memory.change
            self._build_on(table, now)
        for node, reason in memory.quarantined.items():
            if node in self._roster.nodes:
                self._roster.nodes[node].quarantined = reason
        for fact in failures:
            if not isinstance(self._job.state, Ended):
                self._workers.apply(fact, now)

    def _recall(self, memory: JobMemory) -> None:
        self._job.restarts, self._job.resumes = memory.restarts, memory.resumes
        self._job.trainings.finished = list(memory.finished)
        self._job.replacements, self._job.belief = memory.replacements, memory.belief
        self._job.kept, self._job.stopping, self._job.stop_by = memory.kept, memory.stopping, memory.stop_by
        self._size.wanted, self._size.wanted_by = memory.wanted, memory.wanted_by
        self._ladder.budget.times.extend(memory.spent)
        self._roster.named.update(memory.named)
        self._checkpoints.attempts = memory.checkpoints
        self._roster.first_build = memory.first_build
        self._generations.announced, self._generations.doubts.open = memory.announced, memory.doubt

    def _enter_nodes(
        self,
        table: GenerationTable,
        joined: Sequence[facts.NodeJoined],
        reports: Mapping[NodeId, NodeReport],
        now: Instant,
    ) -> None:
        """Enter nodes in the order of their ranks; a node with ranks is lost if its agent is not connected."""
        there = {each.node: each for each in joined}
        homes = list(dict.fromkeys(member.node for member in table.members))
        for name in [*homes, *(node for node in there if node not in homes)]:
            slots = sum(member.node == name for member in table.members)
            node = self._roster.add_node(there.get(name) or facts.NodeJoined(name, "", slots, ""))
            if name not in there:
                node.away_since = now

    # --- a generation that was formed, or was being formed -----------------------------------------------------

    def _go_on(self, table: GenerationTable, now: Instant) -> None:
        members = [self._place(member, now) for member in table.members]
        self._roster.sharded = len({worker.holding for worker in members}) > 1
        self._job.step = max([self._job.step, *(worker.state_at for worker in members)])
        self._enter_others(now)
        if (ended := self._turned(members)) is not None:
            self._orders.write(*self._job.incidents.found_intact(set(), self._job.generation, now))
            self._job.goto(self._job.trainings.turn(ended, now))
            self._apply_again(members, now)
            return
        mine = [self._pasts.get(worker.worker) for worker in members]
        if all(past is not None and _over(past) for past in mine) and any(past and past.released for past in mine):
            self._release(members, now)
            return
        self._job.past_last_step = any(past is not None and past.let_on for past in mine)
        self._job.goto(Closing(now) if self._job.past_last_step else Training())
        stands = (Stage.MEMBER, Stage.FINISHED)
        if self._roster.all_at(*stands) and all(past is not None and _undisturbed(past) for past in mine):
            self._orders.tables.formed(self._roster.member_nodes())
            ranks = {worker.rank for worker in members if worker.rank is not None and worker.stage is Stage.MEMBER}
            self._orders.write(*self._job.incidents.found_intact(ranks, self._job.generation, now))
            self._orders.note(say.taken_over(len(members)), now)
            self._nodes.formed()
            return
        self._mend(members, now)

    def _turned(self, members: Sequence[WorkerRecord]) -> FinishedTraining | None:
        """The training of these workers, if the last coordinator had finished it and was about to begin another."""
        known = {each.name: each for each in self._job.trainings.finished}
        left = [worker.ended for worker in members if (past := self._pasts.get(worker.worker)) and past.released]
        return next((each for each in (*(known.get(one.training) for one in members), *left) if each is not None), None)

    def _place(self, member: Member, now: Instant) -> WorkerRecord:
        past = self._pasts.get(member.worker)
        if past is None:
            worker = WorkerRecord(member.worker, member.node, Role.RANK, None, member.local_rank, Stage.GONE, now)
            worker.holding, worker.endpoint = member.holding, member.endpoint
            self._roster.adopt(worker)
            self._say_gone(worker, member.rank, NODE_LOST, record.NODE_LOST, now)
        else:
            worker = self._enter(past, now)
        self._roster.place(worker, member.rank, member.local_rank, now)
        return worker

    def _say_gone(self, worker: WorkerRecord, rank: Rank, code: int, reason: str, now: Instant) -> None:
        if worker.worker not in self._gone:
            self._orders.write(record.WorkerGone(at=now, worker=worker.worker, rank=rank, code=code, reason=reason))

    def _enter(self, past: WorkerPast, now: Instant) -> WorkerRecord:
        """Enter one worker with everything that it has reported."""
        spawn = past.spawn
        worker = WorkerRecord(past.worker, spawn.node, spawn.role, None, past.local_rank, since=now)
        worker.built_for, worker.built_slot, worker.built_world = past.built_for, past.built_slot, past.built_world
        worker.pid, worker.script_ordered, worker.entered = past.pid, past.script_ordered, past.entered
        if past.ready is not None and past.ready.endpoint:
            enter_ready(worker, past.ready)
            self._standbys.learn(worker, past.ready, now)
            self._roster.grouped = self._roster.grouped or past.ready.sharded
            self._standbys.fits(worker)
            worker.parts = {}
        if past.halted is not None:
            enter_halted(worker, past.halted)
        elif past.ready is not None:
            worker.state_at = past.state_at
        worker.stage, worker.exit_code = self._stage(past), past.code
        worker.goes_on = past.finished is not None and past.finished.goes_on
        worker.ended = past.finished.training if past.finished is not None else None
        self._roster.adopt(worker)
        if past.halted is not None and not past.halted.stands and worker.stage is Stage.HALTED:
            self._roster.away.add(worker.worker)
        return worker

    def _stage(self, past: WorkerPast) -> Stage:
        if past.code is not None and past.worker in self._gone:
            return Stage.GONE
        if past.fenced:
            return Stage.FENCED
        if past.released:
            return Stage.RELEASED
        if past.generation == 0:
            return _building(past)
        if past.halted is not None:
            return Stage.HALTED
        if past.generation < self._job.generation or not past.stands:
            return Stage.JOINING
        finished = past.finished is not None and not (past.let_on and past.finished.goes_on)
        return Stage.FINISHED if finished else Stage.MEMBER

    def _enter_others(self, now: Instant) -> None:
        """Enter workers without a rank: those that never had one may fill one later, the others are fenced."""
        for past in self._pasts.values():
            if past.worker in self._roster.workers or past.code is not None:
                continue
            worker = self._enter(past, now)
            if worker.stage is Stage.RELEASED:
                self._roster.dismiss(worker)
            elif worker.living and (past.generation > 0 or past.spawn.role is Role.RANK):
                self._orders.fence(worker, TAKEN_OVER, now)
            elif worker.living and past.spawn.role is Role.PROVER:
                self._orders.fence(worker, "the rank that requested it for a proof is gone", now)
            elif worker.living and past.built_world != self._roster.world and past.spawn.role is not Role.STANDBY:
                self._orders.fence(worker, "it was built for another world", now)
            elif worker.stage is Stage.READY:
                standbys.see_early_reads(self._roster, self._orders, worker, now)

    def _mend(self, members: Sequence[WorkerRecord], now: Instant) -> None:
        for worker in members:
            past = self._pasts.get(worker.worker)
            behind = past is not None and 0 < past.generation < self._job.generation
            if worker.stage is Stage.RELEASED or (behind and worker.stage is Stage.JOINING):
                self._orders.fence(worker, TAKEN_OVER, now)
        lost = [worker for worker in members if worker.stage in (Stage.GONE, Stage.FENCED)]
        self._orders.note(say.NOT_ALL_TRAINING, now)
        if self._loss is None:
            self._ladder.mend("coordinator", lost, say.IN_BETWEEN, now, now)
        else:
            cause = f"{self._loss.node}, which hosted the coordinator, was lost"
            self._ladder.mend("node", lost, cause, now, self._loss.at)
        self._apply_again(members, now)

    def _apply_again(self, members: Sequence[WorkerRecord], now: Instant) -> None:
        """Handle again the facts that the last coordinator may not have handled: first errors, then exits."""
        pasts = [past for worker in members if (past := self._pasts.get(worker.worker)) is not None]
        errors = [*(past.failed for past in pasts), *(past.faulted for past in pasts)]
        for fact in errors:
            if fact is not None and not isinstance(self._job.state, Ended):
                self._workers.apply(fact, now)
        for past in pasts:
            if past.code is not None and not isinstance(self._job.state, Ended):
                self._workers.apply(facts.WorkerExited(past.worker, past.code, now), now)

    def _release(self, members: Sequence[WorkerRecord], now: Instant) -> None:
        self._job.goto(Releasing(now + self._spec.halt_deadline))
        self._orders.write(*self._job.incidents.found_intact(set(), self._job.generation, now))
        self._orders.note(say.taken_over(len(members)), now)
        self._orders.release(Stage.FINISHED, now)
        self._apply_again(members, now)

    # --- workers that build ------------------------------------------------------------------------------------

    def _build_on(self, table: GenerationTable, now: Instant) -> None:
        """Let all workers go on building, as no generation was formed since they were started."""
        self._job.goto(Building())
        if self._job.kept is not None:
            self._generations.copies.ask(self._job.generation, self._orders.ask_copies(self._job.generation))
        builders = {
            past.spawn.rank: past
            for past in self._pasts.values()
            if past.spawn.role is Role.RANK and past.spawn.generation == table.head.generation
        }
        # A worker that was fenced, or whose failure was handled already, shows that its world was being given up.
        missing = [
            rank for rank in range(table.head.world) if (p := builders.get(Rank(rank))) is None or self._given_up(p)
        ]
        for rank, past in sorted(builders.items()):
            self._roster.place(self._enter(past, now), rank, past.local_rank, now)
        self._enter_others(now)
        if missing:
            self._roster.renumber([], now)
            self._roster.world = table.head.world  # Kept so that another size of the next world is recorded.
            self._orders.note(say.NOT_ALL_TRAINING, now)
            self._ladder.restart(f"{TAKEN_OVER}, and rank {missing[0]} is not there", now)
            self._apply_again(list(self._roster.workers.values()), now)
            return
        self._apply_again(list(self._roster.placed()), now)
        if isinstance(self._job.state, Building):
            self._orders.note(say.taken_over(table.head.world), now)

    def _given_up(self, past: WorkerPast) -> bool:
        return past.fenced or (past.worker in self._gone and past.code != 0)


def _building(past: WorkerPast) -> Stage:
    if past.ready is None:
        return Stage.STARTING if past.pid else Stage.ORDERED
    if past.ready.endpoint:
        return Stage.READY
    return Stage.STARTING if past.script_ordered else Stage.IDLE


def _undisturbed(past: WorkerPast) -> bool:
    """True if a worker's generation was not disturbed by a fault, an exit, or an order to stop."""
    return past.code is None and not (past.halting or past.released or past.fenced or past.faulted or past.failed)


def _over(past: WorkerPast) -> bool:
    """True if a worker has run its last step."""
    return past.finished is not None and not past.fenced
