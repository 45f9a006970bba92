"""Forecast of the cost of faults before a job runs: pure arithmetic over a model of failing nodes.

Nodes fail independently of one another and of the past, so faults of a fleet are a Poisson process. Sources: J. W.
Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974); J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), whose complete model gives the duration
of a run.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from regrow.core.ids import Seconds

HOUR: Seconds = 3600.0
MONTH: Seconds = 30 * 24 * HOUR
YEAR: Seconds = 365 * 24 * HOUR
_MANY = 500.0
"""Expected number of simultaneous faults above which a normal distribution is used."""


@dataclass(frozen=True)
class Fleet:
    """The nodes of a job.

    Attributes:
        nodes: their number.
        faults_an_hour: faults of all nodes together.
        price: of a node for an hour.
    """

    nodes: int
    faults_an_hour: float
    price: float = 0.0

    @property
    def between(self) -> Seconds:
        """Mean time from one fault to the next."""
        return HOUR / self.faults_an_hour if self.faults_an_hour else math.inf

    def faults(self, within: Seconds) -> float:
        """Expected number of faults in this time."""
        return self.faults_an_hour * within / HOUR

    def chance(self, within: Seconds) -> float:
        """Probability of at least one fault in this time."""
        return -math.expm1(-self.faults(within))

    def cost(self, lost: Seconds) -> float:
        """Cost of the whole fleet for this time."""
        return self.nodes * self.price * lost / HOUR

    def spares(self, repair: Seconds, sure: float) -> int:
        """Number of idle nodes that are enough, with probability `sure`, while lost ones are repaired.

        Args:
            repair: absence of a lost node.
            sure: probability, below 1.
        """
        away = self.faults(repair)
        if away > _MANY:
            return math.ceil(away + NormalDist().inv_cdf(sure) * math.sqrt(away))
        chance = total = math.exp(-away)
        spares = 0
        while total < sure:
            spares += 1
            chance *= away / spares
            total += chance
        return spares


class RecoveryModel(Protocol):
    """Consequences of a fault."""

    @property
    def lost(self) -> Seconds:
        """Mean time that the whole job loses by a fault."""
        ...

    def goodput(self, fleet: Fleet) -> float:
        """Part of the time that is spent on steps that count."""
        ...


@dataclass(frozen=True)
class FromCheckpoints:
    """All ranks restart from the last checkpoint, and repeat the steps after it.

    Attributes:
        every: time between two checkpoints.
        writing: time for which training stops to write one.
        recover: time from the fault until training goes on.
    """

    every: Seconds
    writing: Seconds
    recover: Seconds

    @property
    def lost(self) -> Seconds:
        """Half of the time between two checkpoints, and the recovery."""
        return self.every / 2 + self.recover

    def goodput(self, fleet: Fleet) -> float:
        """Goodput by Daly's complete model: faults can also strike while a checkpoint is written, and in a recovery."""
        between = fleet.between
        if math.isinf(between):
            return self.every / (self.every + self.writing)
        try:
            takes = between * math.exp(self.recover / between) * math.expm1((self.every + self.writing) / between)
        except OverflowError:
            return 0.0
        return self.every / takes

    def best(self, fleet: Fleet) -> "FromCheckpoints":
        """The same model with the best interval."""
        return FromCheckpoints(daly(self.writing, fleet.between), self.writing, self.recover)


@dataclass(frozen=True)
class InProcess:
    """Survivors keep their state, and only the current step runs again.

    Attributes:
        lost: time from the fault until the step after the last committed one is committed.
    """

    lost: Seconds

    def goodput(self, fleet: Fleet) -> float:
        """Goodput; faults can also strike during a recovery."""
        return math.exp(-self.lost / fleet.between)


def young(writing: Seconds, between: Seconds) -> Seconds:
    """The best time between two checkpoints, to the first order."""
    return math.sqrt(2 * writing * between)


def daly(writing: Seconds, between: Seconds) -> Seconds:
    """The best time between two checkpoints, to a higher order."""
    if math.isinf(between):
        return math.inf
    if writing >= 2 * between:
        return between
    part = writing / (2 * between)
    return young(writing, between) * (1 + math.sqrt(part) / 3 + part / 9) - writing
