"""An agent's watch on workers that make no progress. The coordinator judges whether any of them hangs."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from regrow.agent.workers.evidence import Evidence
from regrow.core.board import BoardReading, Flight
from regrow.core.ids import Generation, Instant, NodeId, Seconds, StepNo, WorkerId
from regrow.core.messages.observations import NodeSeen, WorkerObservation

_RECENT_STEPS = 50
_REPORT_AFTER_S: Seconds = 5.0
_REPORT_EVERY_S: Seconds = 2.0
_LOOK_EVERY_S: Seconds = 0.25
_LOOKS, _LOOKS_WHILE_STILL = 8, 40
"""Least number of reads of boards in the time of the bound, and of reads and reports while a rank stands still."""
_GAP_S: Seconds = 1.0
"""A read this late shows that the agent itself was paused, and maybe all its workers with it."""
_BUSY = 0.05
"""Share of a processor at or above which a worker counts as computing."""
_CPU_WINDOW_S: Seconds = 10.0


class BoardView(NamedTuple):
    """View of a worker's progress page. `holds_rank`: False for a standby, for which no rank waits."""

    reading: BoardReading
    flight: Flight
    holds_rank: bool
    counts: Callable[[], dict[str, int]] = dict
    """Returns the worker's number of collectives by group; called only if the worker stands still."""


class Watcher:
    """Remembers the contents of the boards, and the recent step times.

    Args:
        node: the node of the workers.
        bound: shortest standstill that can count as a hang.
        evidence: returns the kernel's evidence on all workers.
    """

    def __init__(self, node: NodeId, bound: Seconds, evidence: Callable[[], Mapping[WorkerId, Evidence]]) -> None:
        self._node = node
        self._after = min(_REPORT_AFTER_S, bound / 4)
        self._every = min(_REPORT_EVERY_S, bound / _LOOKS_WHILE_STILL)
        self._seldom, self._often = (min(_LOOK_EVERY_S, bound / times) for times in (_LOOKS, _LOOKS_WHILE_STILL))
        self.interval = self._seldom
        """Seconds until the next call of `look`."""
        self._evidence = evidence
        self._steps: deque[Seconds] = deque(maxlen=_RECENT_STEPS)
        self._since: dict[WorkerId, tuple[int, Instant]] = {}
        self._cpu: dict[WorkerId, deque[tuple[Instant, Seconds]]] = {}
        self._looked_at: Instant | None = None
        self._reported_at: Instant = float("-inf")
        self._reporting = False

    def step_took(self, seconds: Seconds) -> None:
        """Note the duration of a committed step."""
        self._steps.append(seconds)

    def look(self, boards: Mapping[WorkerId, BoardView], now: Instant) -> NodeSeen | None:
        """The report that is due now, if any; forgets workers not in `boards`. To be called after `interval`."""
        self._note(boards, now)
        still = [boards[worker] for worker, (_, since) in self._since.items() if now - since >= self._after]
        urgent = any(board.holds_rank for board in still)
        self.interval = self._often if urgent else self._seldom
        every = self._every if urgent else _REPORT_EVERY_S
        if not (still or self._reporting) or (still and now - self._reported_at < every - self.interval / 2):
            return None
        self._reporting, self._reported_at = bool(still), now
        known = self._evidence()
        observations = [self._observe(name, board, known[name], now) for name, board in boards.items() if name in known]
        return NodeSeen(self._node, observations, max(self._steps, default=0.0))

    def _note(self, boards: Mapping[WorkerId, BoardView], now: Instant) -> None:
        gap = 0.0 if self._looked_at is None else now - self._looked_at - self.interval
        self._looked_at = now
        self._cpu = {worker: used for worker, used in self._cpu.items() if worker in boards}
        since: dict[WorkerId, tuple[int, Instant]] = {}
        for worker, board in boards.items():
            beats, at = self._since.get(worker, (-1, now))
            # A gap may be a pause of the whole machine, so it does not count as standstill.
            at = min(now, at + gap) if gap > _GAP_S else at
            since[worker] = (board.reading.beats, at if beats == board.reading.beats else now)
        self._since = since

    def _observe(self, worker: WorkerId, board: BoardView, seen: Evidence, now: Instant) -> WorkerObservation:
        reading, flight = board.reading, board.flight
        seconds = now - self._since[worker][1]
        return WorkerObservation(
            worker=worker,
            generation=Generation(reading.generation),
            step=StepNo(reading.step),
            calls=reading.calls,
            phase=reading.phase,
            seconds=seconds,
            waits=None if flight.number < 0 else flight.number > 0,
            awaits=flight.oldest if flight.number > 0 else "",
            stopped=seen.state in ("T", "t"),
            busy=seen.state in ("R", "D") or self._computes(worker, seen.cpu, seconds, now),
            blocked=seen.blocked,
            counts=board.counts(),
            used=round(seen.cpu, 2),
        )

    def _computes(self, worker: WorkerId, cpu: Seconds, still: Seconds, now: Instant) -> bool:
        """True if the worker's processes used a processor in the last seconds of its standstill."""
        used = self._cpu.setdefault(worker, deque())
        used.append((now, cpu))
        window = min(_CPU_WINDOW_S, still / 2)
        while len(used) > 2 and now - used[1][0] >= window:
            used.popleft()
        (begun, before), span = used[0], now - used[0][0]
        return span > 0 and (cpu - before) / span >= _BUSY and begun < now
