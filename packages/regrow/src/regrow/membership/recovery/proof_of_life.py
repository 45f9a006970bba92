"""Check that a silent standby is alive when it gets a rank for which all others would wait."""

from collections.abc import Iterator

from regrow.core.ids import Instant, Seconds
from regrow.core.messages.observations import ProveAlive
from regrow.membership.orders import Orders
from regrow.membership.roster import Roster, Stage, WorkerRecord

PROOF_S: Seconds = 2.0
"""Time for a standby to answer when it is given a rank."""


def ask(standby: WorkerRecord, roster: Roster, orders: Orders, now: Instant) -> None:
    """Request an answer from a standby that was given a rank, while the others are being halted."""
    if standby.stage is Stage.READY or standby.script_ordered:
        roster.unproven[standby.worker] = now + PROOF_S
        orders.add(ProveAlive(standby.worker))


def give_up(roster: Roster, orders: Orders, now: Instant) -> Iterator[WorkerRecord]:
    """Fence standbys that did not answer, after yielding each; their loss is no fault of the training."""
    for name in [name for name, until in roster.unproven.items() if now >= until]:
        standby = roster.workers[name]
        yield standby
        orders.note(f"standby {name} does not answer within {PROOF_S:g} s; another worker is started", now)
        orders.fence(standby, "it does not answer", now, dump=True)
