"""The driver of a job on Ray: fills places with actors, replaces lost ones, grows, and starts all anew if it must."""

import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from regrow.core.errors import DeadlineExceeded, RegrowError
from regrow.core.exit_codes import OK, RUN_AGAIN, SCRIPT_ERROR, UNPROVEN, exit_text
from regrow.core.hosts import address_of
from regrow.core.ids import Seconds
from regrow.launch.remote import CoordinatorClient
from regrow.observe.watch.present import JobFigures
from regrow_guests.ray.cluster import ActorLost, RayCluster, check_ray
from regrow_guests.ray.job import NodeNews, RayJob, check, gang_words, joining_words

News = Callable[[NodeNews], None]
_TURN: Final[Seconds] = 1.0
_LOOK_EVERY: Final[Seconds] = 2.0
"""For machines that go."""
_SHOW_EVERY: Final[Seconds] = 10.0
_OF_THE_JOB: Final = (OK, SCRIPT_ERROR, UNPROVEN)
"""Codes of a node that are those of the whole job; node 0 ends in a moment too."""
_MOST_PAUSE: Final[Seconds] = 60.0
_END_MARGIN: Final[Seconds] = 15.0


class TrainingFailed(RegrowError):
    """The job has ended with another code than 0. `code`: as `regrow run` has it."""

    def __init__(self, cause: str, code: int) -> None:
        super().__init__(cause, hint="what the nodes said is in the driver's output")
        self.code = code


def train(job: RayJob, news: News = lambda _: None) -> None:
    """Train to the end, on the cluster that `ray.init` has connected to. The driver must live as long.

    Args:
        job: what is trained, and on what.
        news: called with what becomes of nodes, in the thread of the caller.

    Raises:
        UsageError: a number cannot be, or Ray is not installed.
        DeadlineExceeded: there was no room in the job's `patience`.
        TrainingFailed: the job ended with another code than 0.
    """
    check(job)
    check_ray()
    cluster = RayCluster(job.name, job.resources)
    gang = cluster.bundles(job.nodes)
    try:
        for attempt in range(1, job.restarts + 2):
            code = _Attempt(job, cluster, gang, news, attempt).run()
            if code == OK:
                return
            if code != RUN_AGAIN:
                break
        raise TrainingFailed(f"job {job.name} {exit_text(code)}", code)
    finally:
        cluster.release(gang)


@dataclass
class _Seat:
    """A place for a node.

    `stage`: it `waits` for a time, for `room`, to be `placed`, for node 0's address when it `stands`; it `starts`,
    it `runs`, and it is `over` when it has ended as the job has.
    """

    name: str
    group: Any
    bundle: int
    rank: int | None
    """Of the gang."""
    stage: str = "waits"
    since: Seconds = 0.0
    pause: Seconds = 1.0
    actor: Any = None
    ref: Any = None
    machine: str = ""
    address: str = ""
    leaves: bool = False
    begun: bool = False
    ran: bool = False
    """A node of the job has run here, or it is one by which the job would only grow."""


@dataclass
class _Attempt:
    """One life of the job, from its coordinator's start to its end."""

    job: RayJob
    cluster: RayCluster
    gang: Any
    news: News
    number: int
    seats: list[_Seat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._endpoint = ""
        self._client: CoordinatorClient | None = None
        self._serial = 0
        self._looked = self._shown = 0.0
        self._over: int | None = None
        self._said = False
        self._going: set[str] = set()

    def run(self) -> int:
        """The job's exit code; `RUN_AGAIN` where all may start anew."""
        self.seats = [_Seat(f"node{rank}", self.gang, rank, rank) for rank in range(self.job.nodes)]
        until = monotonic() + self.job.patience
        try:
            while self._over is None:
                self._turn()
                if not self._endpoint and monotonic() > until:
                    raise DeadlineExceeded(
                        f"Ray had no room for {self.job.nodes} nodes within {self.job.patience:g} s",
                        hint="ray status shows what it has; resources are those of one node of the job",
                    )
            self._see_off()
            return self._over
        finally:
            for seat in self.seats:
                self._clear(seat)

    def _turn(self) -> None:
        now = monotonic()
        for seat in self.seats:
            if seat.stage == "waits" and now >= seat.since:
                self._fill(seat)
            elif seat.stage == "stands" and self._endpoint:
                self._start(seat)
        refs = {seat.ref: seat for seat in self.seats if seat.ref is not None}
        for ref in self.cluster.ready(list(refs), _TURN):
            self._heard(refs[ref])
        if self._endpoint and now >= self._looked + _LOOK_EVERY:
            self._looked = now
            self._grow()
            self._aside(self._see_going)
            self._let_go()
        if self._endpoint and now >= self._shown + _SHOW_EVERY:
            self._shown = now
            self._aside(lambda: self.cluster.show(sum(seat.stage == "runs" for seat in self.seats), self._figures()))

    def _aside(self, look: Callable[[], object]) -> None:
        """Do what the training does not depend on: its first error is said, and ends nothing."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - nothing of the training hangs on it
            if not self._said:
                self._said = True
                warnings.warn(f"job {self.job.name} goes on, but Ray said {error!r}", RuntimeWarning, stacklevel=2)

    def _fill(self, seat: _Seat) -> None:
        seat.actor = self.cluster.actor(seat.group, seat.bundle)
        seat.stage, seat.ref = "placed", seat.actor.where.remote()

    def _heard(self, seat: _Seat) -> None:
        try:
            found = self.cluster.value(seat.ref)
        except ActorLost:
            self._lost(seat)
            return
        except Exception as error:
            if not seat.ran:
                raise  # the job cannot begin as it was written
            warnings.warn(f"{seat.name} did not come back: {error!r}", RuntimeWarning, stacklevel=2)
            self._lost(seat)
            return
        match seat.stage:
            case "room":
                self._fill(seat)
            case "placed":
                self._placed(seat, *found)
            case _ if found is None:
                seat.stage, seat.ref, seat.ran = "runs", seat.actor.wait.remote(_TURN), True
            case _:
                self._ended(seat, found)

    def _placed(self, seat: _Seat, machine: str, address: str, port: int) -> None:
        seat.stage, seat.machine, seat.address, seat.ref = "stands", machine, address, None
        if seat.rank == 0:
            self._endpoint = address_of(address, port)
            self._client = CoordinatorClient(self._endpoint, self._token, timeout=2.0)

    def _start(self, seat: _Seat) -> None:
        """As one of the nodes that begin the job, which is how it comes back too, or as one that joins."""
        if seat.rank is None:
            words = joining_words(self.job, seat.name, self._endpoint, seat.address)
        else:
            words = gang_words(self.job, seat.rank, self._endpoint, seat.address, again=self.number > 1)
        environment = {"REGROW_TOKEN": self._token, "REGROW_GIVEN_BACK_CODE": str(RUN_AGAIN)}
        if self.job.home:
            environment["REGROW_HOME"] = f"{self.job.home}/{seat.name}.{self.number}.{self._next()}"
        seat.stage = "starts"
        seat.ref = seat.actor.start.remote(words, {**self.job.environment, **environment}, self.job.folder)
        seat.begun, seat.leaves = True, False
        seat.since = monotonic()
        self.news(NodeNews("starts", seat.name, seat.machine))

    def _lost(self, seat: _Seat) -> None:
        self.news(NodeNews("lost", seat.name, seat.machine))
        self._vacate(seat, RUN_AGAIN)

    def _ended(self, seat: _Seat, code: int) -> None:
        self.news(NodeNews("ended", seat.name, seat.machine, code))
        if seat.rank != 0 and code in _OF_THE_JOB:
            seat.stage, seat.ref = "over", None
        else:
            self._vacate(seat, code)

    def _vacate(self, seat: _Seat, code: int) -> None:
        """Node 0's end is the job's; another's place is filled again, later and later if it ends at once."""
        if seat.rank == 0:
            self._over = code if seat.begun else None
        self._clear(seat)
        if seat.rank is None:
            self.seats.remove(seat)
            return
        now = monotonic()
        quick = now - seat.since < _MOST_PAUSE
        seat.pause = min(_MOST_PAUSE, 2 * seat.pause) if quick and seat.begun else 1.0
        seat.stage, seat.since = "waits", now + (seat.pause if seat.begun else 0.0)

    def _clear(self, seat: _Seat) -> None:
        if seat.actor is not None:
            self.cluster.end(seat.actor)
        if seat.rank is None:
            self.cluster.release(seat.group)
        seat.actor = seat.ref = None

    def _grow(self) -> None:
        """Ask for one more machine at a time, once all that the job began on are there."""
        there = all(seat.stage == "runs" for seat in self.seats)
        if there and len(self.seats) < self.job.most:
            group = self.cluster.bundles(1)
            name = f"{self.job.name}-{self.number}-{self._next()}"
            self.seats.append(_Seat(name, group, 0, None, stage="room", ref=group.ready(), ran=True))

    def _see_going(self) -> None:
        self._going = self.cluster.going()

    def _let_go(self) -> None:
        going = self._going
        for seat in self.seats:
            if seat.stage == "runs" and seat.machine in going and not seat.leaves:
                seat.leaves = True
                seat.actor.leave.remote()
                self.news(NodeNews("leaving", seat.name, seat.machine))

    def _see_off(self) -> None:
        """The other nodes end by themselves, with the same code, once node 0's has said that the job is over."""
        until = monotonic() + self.job.grace + _END_MARGIN
        while (left := {seat.ref: seat for seat in self.seats if seat.stage == "runs"}) and monotonic() < until:
            for ref in self.cluster.ready(list(left), _TURN):
                seat = left[ref]
                try:
                    code = self.cluster.value(ref)
                except Exception:  # noqa: BLE001 - the job is over already, with its own code
                    code = RUN_AGAIN
                if code is None:
                    seat.ref = seat.actor.wait.remote(_TURN)
                else:
                    seat.stage = "over"
                    self.news(NodeNews("ended", seat.name, seat.machine, code))

    def _figures(self) -> JobFigures | None:
        try:
            return None if self._client is None else self._client.figures()
        except RegrowError:
            return None

    def _next(self) -> int:
        self._serial += 1
        return self._serial
