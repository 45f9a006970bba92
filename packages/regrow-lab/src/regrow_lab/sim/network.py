"""Virtual time, and messages that take some of it."""

import heapq
import random
from collections.abc import Callable, Hashable
from itertools import count

import msgspec

from regrow.core.ids import Instant, Seconds


class NetworkConditions(msgspec.Struct, frozen=True):
    """Behaviour of messages. In order on one channel; between channels in any order. Probabilities from 0 to 1."""

    delay: Seconds = 0.002
    """Mean of an exponential distribution."""
    slow: float = 0.0
    """Probability that one takes up to `slow_by` longer."""
    slow_by: Seconds = 5.0
    repeated: float = 0.0
    """Probability that one arrives a second time, later and out of order."""
    lost: float = 0.0
    late_exit: Seconds = 0.0
    """Longest delay of a worker's end after its own last message."""
    overtaking_exit: float = 0.0
    """Probability that a worker's end is known before its last message."""


class Timeline:
    """Actions to come, by their time.

    Args:
        start: the first instant. Not 0, since no production clock starts there either.
    """

    def __init__(self, start: Instant = 1000.0) -> None:
        self.now: Instant = start
        self._queue: list[tuple[Instant, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, instant: Instant, action: Callable[[], None]) -> None:
        """Do it then, or now where that has passed."""
        heapq.heappush(self._queue, (max(instant, self.now), next(self._numbers), action))

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Do it after a delay."""
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Go to the next thing that happens; False where there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Alarm:
    """Rings once, at the earliest of the instants it was set to since it rang last.

    Args:
        at: does something then: `Timeline.at`.
        ring: what it does.
    """

    def __init__(self, at: Callable[[Instant, Callable[[], None]], None], ring: Callable[[], None]) -> None:
        self._at, self._action = at, ring
        self._due: Instant | None = None

    def set(self, due: Instant) -> None:
        """Ring then, if not before."""
        if self._due is None or due < self._due:
            self._due = due
            self._at(due, lambda: self._ring(due))

    def _ring(self, due: Instant) -> None:
        if due == self._due:  # else an earlier one has taken its place
            self._due = None
            self._action()


class Downlink:
    """The order of what is said to one agent: as on a stream, nothing comes again after a question that came later.

    The agent has answered the question without it, and what stands behind a question does not wait for its echo.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._received = 0

    def place(self, *, question: bool) -> int:
        """Position of the next message: the number of questions before it, itself included."""
        self._asked += question
        return self._asked

    def arrives(self, place: int, *, question: bool) -> bool:
        """True if a message at that place is heard as it comes: not after a later question, nor a question twice."""
        if place < self._received + question:
            return False
        self._received = place if question else self._received
        return True


class Network:
    """Carries messages.

    Args:
        timeline: in what time.
        rng: draws delays and mishaps.
        weather: how likely those are.
    """

    def __init__(self, timeline: Timeline, rng: random.Random, weather: NetworkConditions) -> None:
        self._timeline = timeline
        self._rng = rng
        self._weather = weather
        self._free_at: dict[Hashable, Instant] = {}

    def send(self, channel: Hashable, deliver: Callable[[], None], *, sure: bool = False, extra: Seconds = 0.0) -> None:
        """Carry one message. `sure`: it is not lost, since its sender would count as lost with it."""
        weather, rng = self._weather, self._rng
        if not sure and rng.random() < weather.lost:
            return
        delay = extra + (rng.expovariate(1 / weather.delay) if weather.delay else 0.0)
        if rng.random() < weather.slow:
            delay += rng.uniform(0, weather.slow_by)
        arrives = max(self._timeline.now + delay, self._free_at.get(channel, 0.0))
        self._free_at[channel] = arrives
        self._timeline.at(arrives, deliver)
        if rng.random() < weather.repeated:
            self._timeline.at(arrives + rng.choice((0.0, 0.05, 0.5, 5.0, 50.0)) * rng.random(), deliver)
