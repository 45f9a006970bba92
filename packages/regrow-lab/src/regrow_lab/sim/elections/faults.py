"""Faults around an election, as values."""

import random
from typing import Literal

import msgspec

from regrow.core.ids import Instant, Seconds
from regrow.membership.succession.voters import VOTE_LEASE

COORDINATOR = -1
"""In `ElectionFault.of`: the launcher that hosts the newest coordinator at that time."""
How = Literal["dies", "restarts", "pauses", "cut", "off"]


class ElectionFault(msgspec.Struct, frozen=True):
    """One fault.

    `how`: a launcher `dies`; `restarts` as a new process that joins; `pauses`; is `cut` from all others; or is `off`,
    without the shared disk. `of`: numbers of the launchers. `lasts`: duration, or time until the restart, in seconds.
    """

    at: Instant
    how: How
    of: frozenset[int]
    lasts: Seconds = 0.0


class Conditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Behaviour of messages and clocks. Probabilities from 0 to 1.

    `lost`: a message never arrives. `slow`: it takes up to two leases. `doubled`: a request arrives twice. `drift`:
    largest deviation of a clock's rate. Clocks also differ by hours.
    """

    lost: float = 0.0
    slow: float = 0.0
    doubled: float = 0.05
    drift: float = 0.0


class ElectionSchedule(msgspec.Struct, frozen=True, omit_defaults=True):
    """All inputs of a run.

    `launchers`: their number; the first hosts the coordinator. `heals`: time from which no message is lost or slow,
    cuts and pauses are over, and a coordinator must return; None: never. `witness`: true if there is one. `seed`: of
    all other draws.
    """

    launchers: int
    seed: int
    faults: tuple[ElectionFault, ...] = ()
    conditions: Conditions = Conditions()
    witness: bool = False
    heals: Instant | None = None


def draw_election(number: int) -> ElectionSchedule:
    """The schedule of this number. The coordinator is lost at least once, or seems to be."""
    rng = random.Random(f"election {number}")
    witness = rng.random() < 0.2
    launchers = rng.randint(2, 4) if witness else rng.randint(3, 7)
    heals = rng.uniform(14.0, 22.0)
    hows: tuple[How, ...] = ("dies", "restarts", "pauses", "cut", "cut", *(("off",) if witness else ()))
    at = rng.uniform(1.0, 6.0)
    loss = ElectionFault(
        at, rng.choice(hows[:5]), frozenset([COORDINATOR]), (heals - at) * rng.choice((rng.random(), 1.0))
    )
    more = [_fault(rng, rng.choice(hows), launchers, heals) for _ in range(rng.randint(0, 5))]
    conditions = Conditions(
        rng.choice((0.0, 0.05, 0.3)), rng.choice((0.0, 0.02, 0.2)), rng.choice((0.0, 0.05, 0.3)), _DRIFT
    )
    return ElectionSchedule(launchers, number, (loss, *more), conditions, witness, heals)


_DRIFT = 1e-3
"""Twice the largest rate at which a running clock is adjusted."""


def _fault(rng: random.Random, how: How, launchers: int, heals: Instant) -> ElectionFault:
    few = rng.sample(range(launchers), rng.choice((1, 1, 1, 2, launchers - 1)))
    of = frozenset([COORDINATOR] if rng.random() < 0.4 else few)
    at = rng.uniform(1.0, heals - 1.0)
    return ElectionFault(at, how, of, min(heals - at, rng.uniform(0.1, 2 * VOTE_LEASE)))
