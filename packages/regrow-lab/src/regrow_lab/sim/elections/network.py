"""Simulated launchers, and the network and the shared disk between them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from regrow.core.ids import Instant, NodeId, Seconds
from regrow.core.messages.elections import Voter, WitnessWord
from regrow.membership.succession.election import Election
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.witness import Witness
from regrow_lab.sim.elections.faults import Conditions
from regrow_lab.sim.network import Timeline

_APART: Seconds = 1e4
"""Largest deviation of a clock from the true time."""


@dataclass
class SimLauncher:
    """A simulated launcher process, which may host a coordinator. While it is paused, its actions wait.

    Attributes:
        skew, rate: its clock shows `skew + rate * true time`.
        voters: voters for the coordinator in this process; None: there is no coordinator in it.
        follows: term of the coordinator that it follows, and number of that coordinator's launcher; None: none.
    """

    number: int
    skew: Seconds
    rate: float
    election: Election
    voters: Voters | None = None
    follows: tuple[int, int] | None = None
    beat: Instant | None = None
    dead: bool = False
    paused_until: Instant = 0.0
    votes: dict[tuple[int, bool], set[str]] = field(default_factory=dict)
    witness: Witness = field(default_factory=lambda: Witness(VOTE_LEASE))


class SimNetwork:
    """Launchers, with the network and the disk between them.

    Args:
        rng: draws delays and faults.
        conditions: their probabilities.
        heals: time from which there are no faults.
    """

    def __init__(self, rng: random.Random, conditions: Conditions, heals: Instant | None) -> None:
        self.timeline = Timeline(0.0)
        self.launchers: list[SimLauncher] = []
        self.log: list[tuple[Instant, str, tuple[Any, ...]]] = []
        """Events until now: the time, a format, and its values."""
        self.places: dict[int, WitnessWord] = {}
        self.cuts: list[tuple[Instant, frozenset[int]]] = []
        self.off: dict[int, Instant] = {}
        self._rng, self._conditions = rng, conditions
        self._heals = float("inf") if heals is None else heals

    @property
    def now(self) -> Instant:
        """The true time."""
        return self.timeline.now

    @property
    def rng(self) -> random.Random:
        """Random generator for everything that is not in the schedule."""
        return self._rng

    def say(self, what: str, *values: Any) -> None:
        """Log an event."""
        self.log.append((self.now, what, values))

    def make(self) -> SimLauncher:
        """Create one more launcher."""
        number, drift = len(self.launchers), self._conditions.drift
        node = NodeId(f"node{number}")
        skew, rate = self._rng.uniform(-_APART, _APART), 1.0 + self._rng.uniform(-drift, drift)
        made = SimLauncher(number, skew, rate, Election(Voter(f"{node}@x", node, str(number))))
        self.launchers.append(made)
        return made

    def clock(self, launcher: SimLauncher) -> Instant:
        """Time on a launcher's clock."""
        return launcher.skew + launcher.rate * self.now

    def apart(self, a: int, b: int) -> Instant | None:
        """Time until which two launchers are cut off from each other; None: they are connected."""
        if not self.cuts:
            return None
        now = self.timeline.now
        self.cuts = [(end, side) for end, side in self.cuts if end > now]
        return max((end for end, side in self.cuts if (a in side) != (b in side)), default=None)

    def seen_gone(self, by: SimLauncher, number: int, *, hosts: bool) -> bool:
        """True if another launcher sees that nothing listens there any more. `hosts`: look for a coordinator."""
        there = self.launchers[number]
        return (there.dead or (hosts and there.voters is None)) and self.apart(by.number, number) is None

    def at(self, launcher: SimLauncher, act: Callable[[], None]) -> None:
        """Act now, or when the launcher is no longer paused."""
        if launcher.dead:
            return
        if launcher.paused_until > self.now:
            self.timeline.at(launcher.paused_until, lambda: self.at(launcher, act))
        else:
            act()

    def again(self, launcher: SimLauncher, delay: Seconds, act: Callable[[], None]) -> None:
        """Act after a delay, if the launcher is alive then."""
        self.timeline.after(delay, lambda: self.at(launcher, act))

    def send(self, sender: SimLauncher, to: int, deliver: Callable[[SimLauncher], None]) -> None:
        """Send a message as TCP would: late, after a cut, or not at all; a repeated request may arrive twice."""
        receiver, healthy = self.launchers[to], self.now >= self._heals

        def arrive() -> None:
            self.at(receiver, lambda: deliver(receiver))

        healed, chance = self.apart(sender.number, to), self._rng.random
        for _ in range(1 + (chance() < self._conditions.doubled)):
            if not healthy and chance() < self._conditions.lost:
                continue
            delay = self._delay(0.001, 0.05, healthy)
            if healed is not None:
                if chance() < 0.5:
                    continue
                delay += healed - self.now
            self.timeline.after(delay, arrive)

    def at_disk(self, me: SimLauncher, act: Callable[[], Callable[[], None]]) -> None:
        """Access the shared file system: late, not at all, or after a disconnection of this launcher."""
        healthy = self.now >= self._heals
        if not healthy and self._rng.random() < self._conditions.lost:
            return
        delay = self._delay(0.01, 0.01, healthy) + max(0.0, self.off.get(me.number, 0.0) - self.now)

        def arrive() -> None:
            answer = act()
            self.again(me, self._rng.uniform(0.001, 0.05), answer)

        self.timeline.after(delay, arrive)

    def _delay(self, least: Seconds, most: Seconds, healthy: bool) -> Seconds:
        if not healthy and self._rng.random() < self._conditions.slow:
            return self._rng.uniform(0.5, 2 * VOTE_LEASE)
        return self._rng.uniform(least, most)
