"""Virtual time, and messages with delays."""

import heapq
import random
from collections.abc import Callable, Hashable
from itertools import count

import msgspec

from regrow.core.ids import Instant, Seconds


class NetworkConditions(msgspec.Struct, frozen=True):
    """Behaviour of messages: ordered within a channel, unordered between channels. Probabilities from 0 to 1."""

    delay: Seconds = 0.002
    """Mean of an exponential distribution."""
    slow: float = 0.0
    """Probability that a message takes up to `slow_by` longer."""
    slow_by: Seconds = 5.0
    repeated: float = 0.0
    """Probability that a message arrives a second time, later and out of order."""
    lost: float = 0.0
    late_exit: Seconds = 0.0
    """Longest delay of a worker's end after its own last message."""
    overtaking_exit: float = 0.0
    """Probability that a worker's end is known before its last message."""


class Timeline:
    """Future actions, ordered by time.

    Args:
        start: the first instant. Not 0, as production clocks do not start there either.
    """

    def __init__(self, start: Instant = 1000.0) -> None:
        self.now: Instant = start
        self._queue: list[tuple[Instant, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, instant: Instant, action: Callable[[], None]) -> None:
        """Schedule an action, at once if the instant has passed."""
        heapq.heappush(self._queue, (max(instant, self.now), next(self._numbers), action))

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Alarm:
    """Rings once, at the earliest instant set since it last rang.

    Args:
        at: schedules an action: `Timeline.at`.
        ring: the action.
    """

    def __init__(self, at: Callable[[Instant, Callable[[], None]], None], ring: Callable[[], None]) -> None:
        self._at, self._action = at, ring
        self._due: Instant | None = None

    def set(self, due: Instant) -> None:
        """Ring at this instant, unless an earlier one is set."""
        if self._due is None or due < self._due:
            self._due = due
            self._at(due, lambda: self._ring(due))

    def _ring(self, due: Instant) -> None:
        if due == self._due:  # else an earlier instant was set
            self._due = None
            self._action()


class Downlink:
    """Order of the messages to one agent: as on a stream, a message is never repeated after a later question.

    The agent's answer to the question would not include the repetition. Later messages do not wait for the question.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._received = 0

    def place(self, *, question: bool) -> int:
        """Position of the next message: the number of questions before it, itself included."""
        self._asked += question
        return self._asked

    def arrives(self, place: int, *, question: bool) -> bool:
        """True if a message is accepted on arrival: not after a later question, and no question twice."""
        if place < self._received + question:
            return False
        self._received = place if question else self._received
        return True


class Network:
    """Carries messages.

    Args:
        timeline: the virtual time.
        rng: draws delays and faults.
        weather: their probabilities.
    """

    def __init__(self, timeline: Timeline, rng: random.Random, weather: NetworkConditions) -> None:
        self._timeline = timeline
        self._rng = rng
        self._weather = weather
        self._free_at: dict[Hashable, Instant] = {}

    def send(self, channel: Hashable, deliver: Callable[[], None], *, sure: bool = False, extra: Seconds = 0.0) -> None:
        """Carry one message. `sure`: it is never lost, because its sender would count as lost too."""
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
