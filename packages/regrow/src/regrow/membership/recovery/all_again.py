"""The rung `all`: survivors leave their state in their agents' memory, and all workers start again with that state.

It is for jobs in which newcomers do not equal the ranks that they would replace, or cannot be built. All workers start
as the first ones did, with real collectives in their set-up, as under any other launcher.
"""

from collections.abc import Iterator
from dataclasses import replace

from regrow.core.ids import NO_STATE, Generation, Instant, NodeId, StepNo, WorkerId
from regrow.core.messages.copies import KeepState, StateKept
from regrow.membership import diagnosis as say
from regrow.membership import recovery_point
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.deadlines import KEEP_S
from regrow.membership.job import Job, KeptState
from regrow.membership.recovery.doubts import Doubts
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.roster import Stage, WorkerRecord
from regrow.membership.states import Retaining


class StartFromMemory:
    """Decides which survivors leave their state in memory, and when enough of it is kept.

    Args:
        job: the job whose workers are started again.
        ladder: starts them, and decides further if the state cannot be kept.
        copies: the nodes' present copies of the state.
        checkpoints: saves the state first, in case the restart fails too.
        doubts: doubts about the newest state.
    """

    def __init__(self, job: Job, ladder: Ladder, copies: HeldCopies, checkpoints: Checkpoints, doubts: Doubts) -> None:
        self._job, self._ladder, self._copies, self._checkpoints = job, ladder, copies, checkpoints
        self._doubts = doubts
        self._roster, self._orders = job.roster, job.orders
        self._asked: set[WorkerId] = set()
        self._kept: dict[WorkerId, NodeId] = {}
        self._of: tuple[Generation, StepNo] = Generation(0), NO_STATE
        self._cause = ""
        self._to_disk = False
        self._keep_by: Instant = 0.0
        """Time until which survivors are asked for their state."""

    def begin(self, cause: str, now: Instant, *, to_disk: bool) -> None:
        """Ask the halted survivors for their state, to restart all workers with it. `to_disk`: save it to disk too."""
        self._cause, self._to_disk = cause, to_disk
        if self._doubts.open is not None:
            self._ladder.restart(say.no_agreed_state(self._doubts.open.step), now)
            return
        if self._copies.missing([_living(worker) for worker in self._roster.placed()]):
            return  # This is called again after each answer.
        step = self._newest()
        if self._of != (self._job.generation, step):
            self._of = self._job.generation, step
            self._asked, self._kept = set(), {}
        self._keep_by = now + KEEP_S
        self._job.goto(Retaining(self._keep_by, step))
        self.advance(now)

    def apply(self, fact: StateKept, now: Instant) -> None:
        """Note an agent's report that it keeps a worker's state, or its reason why it cannot."""
        worker = self._roster.workers.get(fact.worker)
        if worker is not None and fact.step == self._of[1] and fact.worker in self._asked:
            if fact.error:
                self._orders.note(f"the state of rank {worker.rank} cannot be kept in memory: {fact.error}", now)
                self._asked.discard(fact.worker)
                self._kept[fact.worker] = NodeId("")
            else:
                self._kept[fact.worker] = worker.node

    def advance(self, now: Instant) -> None:
        """Ask the workers that have the state; restart all workers once it is kept or no worker is left to ask."""
        state = self._job.state
        if not isinstance(state, Retaining):
            return
        if state.step != NO_STATE and now < self._keep_by:
            for worker in self._to_ask(state.step):
                self._asked.add(worker.worker)
                self._orders.add(KeepState(worker.worker, state.step, self._as_committed(state.step)))
            if any(self._awaited(name) for name in self._asked):
                return
        disk_by = self._keep_by - KEEP_S + self._checkpoints.patience
        if (self._to_disk or not self._all_kept(state.step)) and now < disk_by:
            step = self._checkpoints.savable()
            if step is not None and not self._checkpoints.finished(step, now, halted=True):
                self._checkpoints.forsake_dead(now)
                if state.deadline != disk_by:
                    self._job.goto(replace(state, deadline=disk_by))
                return
        self._go(state.step, now)

    def _all_kept(self, step: StepNo) -> bool:
        start = self._start(step)
        return not isinstance(start, recovery_point.Uncovered) and start.step >= step

    def _start(self, step: StepNo) -> recovery_point.Start | recovery_point.Uncovered:
        survivors = [replace(recovery_point.survivor_state(w), state_at=NO_STATE) for w in self._roster.placed()]
        return recovery_point.decide(survivors, self._everywhere(step))

    def _go(self, step: StepNo, now: Instant) -> None:
        start = self._start(step)
        if isinstance(start, recovery_point.Uncovered) or self._checkpoints.newest > start.step:
            self._job.kept = None
            self._ladder.restart(f"{self._cause}; the newest state is not in the memory of the nodes", now)
            return
        self._job.kept = KeptState(start.step, start.step == step and self._as_committed(step))
        self._ladder.restart(self._cause, now)

    def _everywhere(self, step: StepNo) -> recovery_point.Copies:
        """The copies of state on all nodes, including those that survivors have just left there."""
        from_workers: dict[NodeId, list[recovery_point.KeptCopy]] = {
            node: list(copies) for node, copies in self._copies.held.items()
        }
        for name, node in self._kept.items():
            worker = self._roster.workers.get(name)
            if node and worker is not None and worker.rank is not None and not self._roster.nodes[node].away:
                copy = recovery_point.KeptCopy(worker.rank, worker.holding, step)
                from_workers.setdefault(node, []).append(copy)
        return from_workers

    def _survivors(self, step: StepNo) -> list[WorkerRecord]:
        return [worker for worker in self._roster.placed(Stage.HALTED) if worker.state_at == step]

    def _newest(self) -> StepNo:
        """Newest step for which survivors and the nodes' copies together have the whole state."""
        everything = {worker.holding for worker in self._roster.placed()}
        for step in sorted({worker.state_at for worker in self._roster.placed(Stage.HALTED)}, reverse=True):
            held = {copy.holding for copies in self._copies.held.values() for copy in copies if copy.step == step}
            if step >= 0 and held | {worker.holding for worker in self._survivors(step)} >= everything:
                return step
        return NO_STATE

    def _to_ask(self, step: StepNo) -> Iterator[WorkerRecord]:
        """One worker for each node and holding; every worker if equal holdings do not prove equal state."""
        each = self._job.replacements.alone or bool(self._job.belief.doubt)
        seen: set[tuple[NodeId, str]] = set()
        for worker in sorted(self._survivors(step), key=lambda one: one.rank or 0):
            place = worker.node, worker.holding
            if worker.worker in self._asked:
                seen.add(place)
            elif worker.worker not in self._kept and (each or place not in seen):
                seen.add(place)
                yield worker

    def _awaited(self, name: WorkerId) -> bool:
        return name not in self._kept and name in self._roster.workers and self._roster.workers[name].living

    def _as_committed(self, step: StepNo) -> bool:
        return any(worker.restart_index and worker.state_at == step for worker in self._roster.placed())


def _living(worker: WorkerRecord) -> recovery_point.SurvivorState:
    survivor = recovery_point.survivor_state(worker)
    return survivor if worker.stage is Stage.HALTED else replace(survivor, state_at=NO_STATE, ready=False)
