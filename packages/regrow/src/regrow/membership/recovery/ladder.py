"""The ladder of recovery: its rungs, each within its budget.

retry in place → a standby or a fresh fork takes the lost rank → a free slot of another node → fewer replicas (see
`regroup.py`) → all workers again, with the state in memory (`all_again.py`) → all workers again, from the durable
checkpoint → end, with one readable diagnosis.
"""

import re
from collections.abc import Sequence, Set

from regrow.core.exit_codes import DEVICE_FAILED, RUN_AGAIN, SCRIPT_ERROR, exit_text
from regrow.core.ids import Instant, Rank
from regrow.core.messages.vocabulary import Role
from regrow.membership import diagnosis as say
from regrow.membership import scaling
from regrow.membership.fault_plan import DeviceFailure
from regrow.membership.incident import Budget
from regrow.membership.job import Job
from regrow.membership.recovery import proof_of_life
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.recovery.lost_state import Losses
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.roster import BUILDING, NodeRecord, RankSlot, Stage, WorkerRecord
from regrow.membership.states import Building, Mending, Restarting, Waiting

_KILLED_LOADER = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (Killed|Bus error)\b")
"""Error that torch raises in the script after the kernel killed a loader's process for lack of (shared) memory."""
_PREFERENCE = {Stage.READY: 0, Stage.IDLE: 1, Stage.STARTING: 2, Stage.ORDERED: 3}


class Ladder:
    """Choice of the rung for each fault; keeps the budget of faults.

    Args:
        job: the job whose workers the faults strike.
        standbys: may take a lost rank.
        copies: copies of the state on the nodes.
    """

    def __init__(self, job: Job, standbys: Standbys, copies: HeldCopies) -> None:
        self._job, self._standbys, self._copies = job, standbys, copies
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self.losses = Losses(job.roster, job.errors)
        self.budget = Budget(job.spec.max_faults, job.spec.window)
        self.newcomers = standbys.newcomers
        self._from_memory = 0
        """Number of restarts of all workers from memory since a generation was last formed."""
        self._loaders = 0
        """Number of failures by a killed loader process since a generation was last formed."""

    def formed(self) -> None:
        """Forget failed attempts, because a generation has formed."""
        self.losses.formed()
        self.newcomers.stood()
        self._from_memory = self._loaders = 0

    def mend(self, kind: str, workers: list[WorkerRecord], cause: str, now: Instant, fault_at: Instant) -> None:
        """Handle a fault: open or continue the incident and give up the generation; `fill` and `form` follow.

        Without workers, only a symptom is known; a fault that later explains it is not counted again.
        """
        ranks = [worker.rank for worker in workers if worker.rank is not None]
        self.losses.fault(kind, ranks)
        if not self._job.incidents.explains(ranks) and not self._spend(cause, now):
            return
        self._orders.write(
            *self._job.incidents.fault(
                kind, ranks, cause, generation=self._job.generation, step=self._job.step, now=now, fault_at=fault_at
            )
        )
        if not isinstance(self._job.state, Mending):
            self.halt(cause, now)
            self._job.goto(Mending(halt_deadline=now + self._spec.halt_patience))

    def halt(self, reason: str, now: Instant) -> None:
        """Order all workers of the generation to give it up at once."""
        self._orders.halt(self._job.generation, reason, now)
        if self._spec.keeps_copies:
            self._copies.ask(self._job.generation, self._orders.ask_copies(self._job.generation))

    def lost(self, skip: Set[int] = frozenset()) -> list[Rank]:
        """The lost ranks, except those of the replicas `skip`."""
        lost = [worker.rank for worker in self._roster.placed(Stage.FENCED, Stage.GONE) if worker.rank is not None]
        return sorted(rank for rank in lost if rank // self._spec.unit not in skip)

    @property
    def next_try(self) -> Instant | None:
        """Time at which another newcomer is to be tried for a lost rank; None: no rank waits for one."""
        state = self._job.state
        trying = isinstance(state, Mending) or (isinstance(state, Waiting) and not state.saving)
        return self.newcomers.next_try() if trying else None

    def hopeless(self, ranks: Sequence[Rank]) -> list[Rank]:
        """The lost ranks for which no further newcomer is tried."""
        tried = [rank for rank in ranks if self.newcomers.hopeless(rank, elsewhere=True)]
        for rank in ranks:
            if rank not in tried and self.newcomers.hopeless(rank, elsewhere=False):
                home = self._roster.home(rank)[0]
                if self._free_slot(rank, [node for node in self._roster.usable_nodes() if node is not home]) is None:
                    tried.append(rank)
        return tried

    def fill(self, now: Instant, *, skip: Set[int] = frozenset(), give_up: bool = False) -> list[Rank]:
        """Give every lost rank the best available worker: a built standby, one that builds, a fresh fork.

        Args:
            skip: replicas that are not filled because they are removed.
            give_up: a rank whose newcomers die one after the other is not tried again.

        Returns:
            The ranks for which there is no place.
        """
        stuck = []
        for rank in self.lost(skip):
            if not self._job.replacements.allowed:
                stuck.append(rank)
                continue
            if self.newcomers.pause(rank, now):
                continue
            self.newcomers.tried(rank)
            slot = self._slot_for(rank, give_up=give_up)
            if slot is None and self._roster.candidates:  # A lost rank comes before a rank that was to move.
                for each in list(self._roster.candidates.values()):
                    self._roster.nominate(each, None, each.local_rank)
                slot = self._slot_for(rank, give_up=give_up)
            if slot is None:
                stuck.append(rank)
                continue
            home = self._roster.home(rank)[0]
            moves = slot.node != home.node
            if moves and home.usable and self._left_behind(rank):
                self._job.apart = rank, home.node
            holding = self._holder(rank).holding
            there, take = self._roster.standbys(slot.node), self._standbys.can_take
            spares = [each for each in there if take(each, rank, slot.local_rank)]
            if spares:
                standby = min(spares, key=lambda each: (_PREFERENCE.get(each.stage, 9), each.built_for != rank))
                self._roster.place(standby, rank, slot.local_rank, now)
                self._standbys.start_if_placed(standby, now)
                proof_of_life.ask(standby, self._roster, self._orders, now)
            else:
                self._job.spawn(slot, Role.JOINER, now)
            filled = self._holder(rank)
            filled.holding = filled.holding or holding  # The rank's holding, until the worker has built its own.
            self._job.incidents.climb("node" if moves else "standby" if spares else "fork")
        return stuck

    def _holder(self, rank: Rank) -> WorkerRecord:
        return self._roster.workers[self._roster.places[rank]]

    def _slot_for(self, rank: Rank, *, give_up: bool) -> RankSlot | None:
        """Slot for a lost rank: on its node, or on another if that is unusable or newcomers die there.

        A node in quarantine is used only if no other has room.
        """
        home, local_rank = self._roster.home(rank)
        if home.usable and not home.quarantined and self.newcomers.at_home(rank):
            return RankSlot(home.node, rank, local_rank)
        others = [node for node in self._roster.usable_nodes() if node is not home]
        if elsewhere := self._free_slot(rank, [node for node in others if not node.quarantined]):
            return elsewhere
        if home.usable and self.newcomers.at_home(rank):
            return RankSlot(home.node, rank, local_rank)
        at_home = RankSlot(home.node, rank, local_rank) if home.usable and not give_up else None
        return self._free_slot(rank, others) or at_home

    def _left_behind(self, rank: Rank) -> list[Rank]:
        return scaling.left_behind(self._roster, rank, self._roster.home(rank)[0].node, self._spec.unit)

    def _free_slot(self, rank: Rank, nodes: list[NodeRecord]) -> RankSlot | None:
        """Slot on one of these nodes; preferably on one with room for all ranks of the replica that are left behind."""
        behind = len(self._left_behind(rank))
        roomy = [node for node in nodes if len(node.free()) > behind]
        free = {node.node: slots for node in roomy or nodes if (slots := node.free())}
        others = {each: node for each, node in scaling.nodes_of_ranks(self._roster).items() if each != rank}
        together = scaling.failing_together(self._roster)
        rank_slots = scaling.new_slots([rank], self._spec.unit, free, domains=together, held=others)
        return rank_slots[0] if rank_slots else None

    def newcomer_failed(self, worker: WorkerRecord, now: Instant) -> None:
        """Count a lost worker that was to fill a rank, if it was not built yet or had reported an error."""
        if not worker.placed or worker.rank is None or worker.entered is not None:
            return
        reported = self._job.errors.of(worker.worker)
        if worker.stage in BUILDING or reported is not None:
            self.newcomers.failed(worker.rank, reported[0] if reported is not None else None, now)

    def restart(self, cause: str, now: Instant, worker: WorkerRecord | None = None) -> None:
        """End all workers and start them again, with the state in memory or from the durable checkpoint."""
        if self._job.stopping:
            text = say_end.not_started_again(self._job.stopping, cause, self._job.step)
            self._job.end(RUN_AGAIN, text, now)
            return
        allowed = self._spec.max_restarts
        has_session = any(each.has_session for each in self._roster.placed())
        if allowed is not None and self._job.restarts >= allowed and not has_session:
            own = self.own_error(worker) if worker else ""
            spent = f"{cause}; the workers were started again {allowed} times, as --max-restarts allows"
            self._job.end(SCRIPT_ERROR, own or spent, now)
            return
        self._from_memory += self._job.kept is not None
        if self._from_memory > ATTEMPTS:
            self._job.kept = None  # The state in memory may be the cause of the failures, so do without it.
        kept = self._job.kept
        if self._job.step > self._job.trainings.began and not self._spec.durable and kept is None:
            self._job.end(SCRIPT_ERROR, self.losses.diagnosis(self._job.step, cause), now)
            return
        if not self._spend(cause, now):
            return
        where = f" with state@{kept.step}, which is in memory" if kept is not None else ""
        self._orders.note(f"all workers are started again{where}: {cause}", now)
        self._job.incidents.climb("restart" if kept is None else "all")
        self._job.resumes = self._job.resumes or self._spec.durable
        self._job.restarts += 1
        self._job.goto(Restarting(deadline=now + self._spec.halt_deadline))
        for each in list(self._roster.workers.values()):
            if each.living:
                self._orders.fence(each, cause, now)

    def not_ended(self, state: Restarting, now: Instant) -> None:
        """End the job if workers have not ended by the deadline; a job with several trainings may wait longer."""
        if (waits := self._job.trainings.late(state, now)) is not None:
            self._job.goto(waits)
            return
        stuck = [worker.worker for worker in self._roster.workers.values() if worker.stage is not Stage.GONE]
        self._job.end(RUN_AGAIN, say.cannot_be_ended(stuck), now)

    def fence_late(self, late: list[WorkerRecord], reason: str, now: Instant) -> None:
        """Fence the workers that missed a deadline, and mend the loss of their ranks."""
        for worker in late:
            self.newcomer_failed(worker, now)
            self._orders.fence(worker, reason, now, dump=True)
        self.mend("hang", late, reason, now, now)

    def await_verdict(self, now: Instant) -> None:
        """Wait briefly after a worker failed before its first step, as another's death may turn out to be the cause."""
        if self._job.state == Building():
            self._job.goto(Building(verdict_at=now + self._spec.verdict_grace))

    def script_failed(self, now: Instant) -> None:
        """Restart, or end the job, after the script failed before its first step and no other death explains that."""
        gone = list(self._roster.placed(Stage.GONE))
        failed = [worker for worker in gone if worker.exit_code] or gone
        reported = next((worker for worker in failed if self._job.errors.of(worker.worker)), failed[0])
        code = reported.exit_code or 0
        memory = self._job.kept is not None and self._from_memory < ATTEMPTS
        error = self._job.errors.of(reported.worker)
        killed = _KILLED_LOADER.search(error[0].traceback) if error is not None else None
        self._loaders += killed is not None
        cause = (
            f"rank {reported.rank}: {killed[0]}" if killed is not None else f"rank {reported.rank} {exit_text(code)}"
        )
        again = memory or (killed is not None and self._loaders < ATTEMPTS)
        if again or (self._spec.max_restarts or 0) > self._job.restarts:
            self.restart(cause, now, reported)
        else:
            self._job.end(SCRIPT_ERROR, self.own_error(reported) or say.died_building(reported.rank, code), now)

    def breaks_devices(self, worker: WorkerRecord, now: Instant) -> bool:
        """Note a lost training worker whose device failed; True, and the job ends, if the script breaks its devices.

        After the first failure the rank is filled as after any loss, after the second on another node if one has room.
        """
        if worker.exit_code != DEVICE_FAILED or worker.rank is None or worker.entered is None:
            return False
        device = (worker.node, worker.local_rank)
        failed = DeviceFailure(self._job.step, self._job.generation, worker.rank, device)
        before, own = self._job.errors.breaks_devices(failed)
        if own:
            devices = list(dict.fromkeys(each.device for each in (*before, failed)))
            self._job.end_saved(
                SCRIPT_ERROR, say_end.breaks_devices(worker.rank, failed.step, devices, len(before) + 1), now
            )
        elif before:
            self.newcomers.move(worker.rank)
        return own

    def own_error(self, worker: WorkerRecord) -> str:
        """The error that ended the worker's script, for people; empty if it reported none."""
        reported = self._job.errors.of(worker.worker)
        return say.script_error(worker.rank, reported[1], reported[0]) if reported else ""

    def _spend(self, cause: str, now: Instant) -> bool:
        if self.budget.spend(now):
            return True
        self._job.end_saved(
            RUN_AGAIN, self.losses.first(say.budget_spent(self._spec.max_faults, self._spec.window, cause)), now
        )
        return False
