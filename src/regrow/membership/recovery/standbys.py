"""Which places a standby can take: those for which what its script has done so far is right. Pure."""

from collections.abc import Iterator

from regrow.core.early_reads import PlaceInWorld
from regrow.core.ids import Instant, Rank
from regrow.core.messages import ImportModules, ModulesImported, WorkerReady
from regrow.membership import diagnosis as say
from regrow.membership.orders import Orders
from regrow.membership.roster import NodeRecord, Roster, Stage, WorkerRecord

_MOST_UNFIT = 4
"""After so many packages that should not have been imported ahead, none are."""


def stale(worker: WorkerRecord, rank: Rank, local_rank: int, world: int) -> PlaceInWorld | None:
    """What a worker's script has asked before its loop, and was told what is wrong for this place; None: nothing.

    Who has not run the script yet has asked nothing.
    """
    wrong = {
        PlaceInWorld.RANK: worker.built_for != rank,
        PlaceInWorld.LOCAL_RANK: worker.built_slot != local_rank,
        PlaceInWorld.WORLD: worker.built_world != world,
    }
    return next((what for what in wrong if wrong[what] and what in worker.early), None)


def narrow(roster: Roster, standby: WorkerRecord) -> PlaceInWorld | None:
    """Why a built standby could not take some place of its node that it should be there for; None: it could take all.

    Where ranks have parts of the state of their own each standby is for one place, and was built for that.
    """
    seats = [each for each in roster.nodes[standby.node].seats.values() if each.rank is not None]
    for each in seats:
        rank = Rank(-1) if each.rank is None else each.rank
        meant = not roster.sharded or each.holding == standby.holding
        if meant and (found := stale(standby, rank, each.local_rank, roster.world)):
            return found
    return None


def see_early_reads(roster: Roster, orders: Orders, standby: WorkerRecord, now: Instant) -> None:
    """A standby is built: it is not used where its script was told a place that may not be its last.

    Others then wait before the script; that is said once.
    """
    if standby.seated and standby.rank is not None:
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
    """A generation stands, maybe of another world: standbys that were told its former size make room for others."""
    for standby in roster.standbys():
        if standby.early and standby.stage is Stage.READY and narrow(roster, standby) is not None:
            orders.fence(standby, "its script was told another world", now)


def learn(roster: Roster, event: WorkerReady) -> None:
    """A rank has told what its script imports."""
    if event.imported and not roster.learnt:
        roster.learnt, roster.imports, roster.environment = True, event.imported, event.environment


def prepare(roster: Roster, orders: Orders, standby: WorkerRecord) -> None:
    """A standby waits before the script: meanwhile it imports what that will."""
    if roster.imports and not standby.seated:
        orders.add(ImportModules(standby.worker, roster.imports, roster.environment))


def imported(roster: Roster, orders: Orders, worker: WorkerRecord, event: ModulesImported, now: Instant) -> None:
    """A standby has imported all, or what it should not have: then it is ended, and others do without that package."""
    if not event.unfit:
        return
    prefix = f"{event.unfit}."
    roster.imports = [name for name in roster.imports if name != event.unfit and not name.startswith(prefix)]
    roster.unfit += 1
    if roster.unfit >= _MOST_UNFIT:
        roster.imports = []
    orders.note(f"{event.unfit} is left to the script to import: {event.why}", now, worker)
    orders.fence(worker, f"it has imported {event.unfit}, which only the script should", now)


def short_nodes(roster: Roster, attempts: int) -> Iterator[NodeRecord]:
    """The nodes that may have fewer standbys than they should, and on which others are started."""
    while roster.short:
        node = roster.nodes[roster.short.pop()]
        if node.failed_standbys < attempts and node.usable:
            yield node


def failed(roster: Roster, standby: WorkerRecord) -> int:
    """A standby was lost before it was built; how many in a row on its node."""
    node = roster.nodes[standby.node]
    node.failed_standbys += 1
    return node.failed_standbys
