"""Standbys, and the places that each can take: those for which its script has run correctly. Pure."""

from regrow.core.early_reads import PlaceInWorld
from regrow.core.exit_codes import SCRIPT_ERROR
from regrow.core.ids import Instant, Rank
from regrow.core.messages import facts
from regrow.core.messages.data import LoaderShown
from regrow.core.messages.orders import ImportModules
from regrow.core.messages.vocabulary import ErrorReport, Role, Warmth
from regrow.membership import diagnosis as say
from regrow.membership.job import Job
from regrow.membership.layouts import Layouts
from regrow.membership.orders import Orders
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery.loaders import Loaders
from regrow.membership.recovery.newcomers import ATTEMPTS, Newcomers
from regrow.membership.recovery.proofs.rounds import Proofs
from regrow.membership.roster import NodeRecord, Roster, Stage, WorkerRecord
from regrow.membership.states import Building

NO_FREE_DEVICE = (
    "standbys wait before the script (--warmth imports): ranks use all devices of their node, where a built one would "
    "take memory a second time (--warmth built has them all the same, --spares a node of their own)"
)
TWICE_ON_A_DEVICE = (
    "a standby has built on a device that a rank uses: its model takes memory there a second time, and the rank may "
    "run out of it (standbys with --warmth imports take none until they are needed)"
)
_MOST_UNFIT = 4
"""Once this many packages were found unfit for an early import, no package is imported early."""


class Standbys:
    """Workers that wait for a lost rank, and the conditions under which newcomers get one.

    Args:
        job: the job of the workers.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self.layouts, self.loaders = Layouts(job.spec.unit), Loaders()
        self.newcomers = Newcomers()
        self.proofs = Proofs(job, self.can_take)
        self._devices_said = False

    def top_up(self, now: Instant, *, quiet: bool) -> None:
        """Start missing standbys on each node, except where they keep dying, and go on with proofs.

        `quiet`: True if steps are being run and nothing is repaired; otherwise proofs pause.
        """
        if not quiet:
            self.proofs.pause(now)
        if not quiet or not self._job.replacements.allowed:
            return
        while self._roster.short:
            name = next(iter(self._roster.short))
            del self._roster.short[name]
            node = self._roster.nodes[name]
            if node.failed_standbys >= ATTEMPTS or node.quarantined or not node.usable:
                continue
            for _ in range(self._wanted(node) - len(node.standbys)):
                self._job.spawn(self._orders.standby_slot(node), Role.STANDBY, now)
            self._roster.short.pop(node.node, None)
        self.proofs.advance(now)

    def _wanted(self, node: NodeRecord) -> int:
        """Number of standbys that a node should have; a spare node has at least one for each rank that it may take."""
        if self._spec.spares and not node.placed:
            return max(self._spec.standbys, self._spec.nproc)
        return self._spec.standbys

    def failed(self, standby: WorkerRecord, now: Instant) -> None:
        """Count a lost standby; after several in a row no more are started on its node."""
        node = self._roster.nodes[standby.node]
        node.failed_standbys += 1
        if node.failed_standbys == ATTEMPTS:
            self._orders.note(
                say_end.standbys_given_up(standby.worker, self._job.errors.of(standby.worker)), now, standby
            )

    def built(self, worker: WorkerRecord, now: Instant) -> None:
        """Check a worker that is ready for its first step; drop it if its model differs from the others'."""
        fits = self.fits(worker)
        if not fits:
            text = self.layouts.differs(worker) if worker.role.placed else say.layout_differs(worker.worker, None)
            self._unfit(worker, text, "built another model", now)
        elif worker.role in (Role.STANDBY, Role.JOINER):
            self._roster.nodes[worker.node].failed_standbys = 0
            see_early_reads(self._roster, self._orders, worker, now)

    def shown(self, worker: WorkerRecord, shown: LoaderShown, now: Instant) -> None:
        """Check the loader of a worker that has reached its loop, or has read its first batches there."""
        rank = worker.rank if worker.placed else worker.candidate_for
        if text := self.loaders.refusal(shown, rank):
            self._unfit(worker, text, "it trains another number of steps", now)
            return
        for note in self.loaders.notes(shown, rank):
            self._orders.note(note, now, worker)

    def _unfit(self, worker: WorkerRecord, text: str, why: str, now: Instant) -> None:
        """Handle a worker that does not fit the job: end the job if it is one of the first workers, else drop it."""
        if worker.role.placed and isinstance(self._job.state, Building):
            self._job.end(SCRIPT_ERROR, text, now)
            return
        if worker.role is Role.PROVER:
            self.proofs.unfit(worker, text, now)
            return
        self._orders.note(f"{text}; it is not used", now, worker)
        if worker.role is Role.STANDBY:
            self.failed(worker, now)
        elif worker.placed and worker.rank is not None:
            self.newcomers.failed(worker.rank, ErrorReport("StateError", text, text), now)
        self._orders.fence(worker, why, now)

    def fits(self, worker: WorkerRecord) -> bool:
        """True if a worker has built the same model as the others."""
        return self.layouts.fits(worker)

    def can_take(self, worker: WorkerRecord, rank: Rank, local_rank: int, world: int | None = None) -> bool:
        """True if a newcomer fits a rank: its script has not run, or has read nothing that is wrong in that place.

        `world`: size of the future world in ranks, if it differs from the present one.
        """
        if worker.stage is Stage.IDLE:
            return True
        anywhere = not (self._roster.sharded or self._roster.grouped)
        fits = anywhere or self.layouts.place(worker.built_for) == self.layouts.place(rank)
        return fits and not stale(worker, rank, local_rank, world or self._job.world)

    def learn(self, worker: WorkerRecord, event: facts.WorkerReady, now: Instant) -> None:
        """Learn the script's imports from a worker, and whether built standbys would share a device with a rank."""
        roster, node = self._roster, self._roster.nodes[worker.node]
        if event.imported and not roster.learnt:
            roster.learnt, roster.imports, roster.environment = True, event.imported, event.environment
        beside = worker.role.placed or any(slot.rank is not None for slot in node.placed.values())
        if not (event.devices_taken and beside) or self._spec.warmth is not Warmth.BUILT:
            return
        asked = self._spec.warmth_asked
        node.early = node.early or not asked
        if self._spec.standbys and not self._devices_said and (not asked or worker.role is Role.STANDBY):
            self._devices_said = True
            self._orders.note(TWICE_ON_A_DEVICE if asked else NO_FREE_DEVICE, now, worker)

    def start_if_placed(self, worker: WorkerRecord, now: Instant) -> None:
        """Order an `imports` standby that has a rank to run the script."""
        if worker.stage is Stage.IDLE and worker.placed and worker.rank is not None:
            self._orders.start_script(worker, worker.rank, self._job.generation, now, world=self._job.world)


def stale(worker: WorkerRecord, rank: Rank, local_rank: int, world: int) -> PlaceInWorld | None:
    """A fact about its place that the worker's script read before its loop and that is wrong here; None: no fact is.

    A worker that has not run its script yet has read nothing.
    """
    wrong = {
        PlaceInWorld.RANK: worker.built_for != rank,
        PlaceInWorld.LOCAL_RANK: worker.built_slot != local_rank,
        PlaceInWorld.WORLD: worker.built_world != world,
    }
    return next((what for what in wrong if wrong[what] and what in worker.early), None)


def narrow(roster: Roster, standby: WorkerRecord) -> PlaceInWorld | None:
    """A fact by which a built standby is wrong for some place on its node that it should cover; None: it fits all.

    In a sharded world each standby covers only the places of its own holding.
    """
    rank_slots = [each for each in roster.nodes[standby.node].placed.values() if each.rank is not None]
    for each in rank_slots:
        rank = Rank(-1) if each.rank is None else each.rank
        meant = not roster.sharded or each.holding == standby.holding
        if meant and (found := stale(standby, rank, each.local_rank, roster.world)):
            return found
    return None


def see_early_reads(roster: Roster, orders: Orders, standby: WorkerRecord, now: Instant) -> None:
    """Fence a built standby whose script read a fact about its place that may differ where it is needed.

    Later standbys of the node then wait before the script, which a note reports once.
    """
    if standby.placed and standby.rank is not None:
        wrong = stale(standby, standby.rank, standby.local_rank, roster.world)
    else:
        wrong = narrow(roster, standby)
    if wrong is None:
        return
    if wrong is not PlaceInWorld.WORLD:
        roster.nodes[standby.node].early = True
        if not roster.early:
            roster.early = standby.early[wrong]
            orders.note(say.early_reads(roster.early), now, standby)
    orders.fence(standby, "its script has asked for its place before it had one", now)


def renew(roster: Roster, orders: Orders, now: Instant) -> None:
    """Fence standbys whose scripts have read another size of the world than the new generation has."""
    for standby in roster.standbys():
        if standby.early and standby.stage is Stage.READY and narrow(roster, standby) is not None:
            orders.fence(standby, "its script has read another world size", now)


def prepare(roster: Roster, orders: Orders, standby: WorkerRecord) -> None:
    """Order a standby that waits before the script to import the script's modules meanwhile."""
    if roster.imports and not standby.placed:
        orders.add(ImportModules(standby.worker, roster.imports, roster.environment))


def imported(roster: Roster, orders: Orders, worker: WorkerRecord, event: facts.ModulesImported, now: Instant) -> None:
    """Take a standby's report on its imports: if a module is unfit for this, fence the standby and drop its package."""
    if not event.unfit:
        return
    prefix = f"{event.unfit}."
    roster.imports = [name for name in roster.imports if name != event.unfit and not name.startswith(prefix)]
    roster.unfit += 1
    if roster.unfit >= _MOST_UNFIT:
        roster.imports = []
    orders.note(f"{event.unfit} is left to the script to import: {event.why}", now, worker)
    orders.fence(worker, f"it has imported {event.unfit}, which only the script should", now)
