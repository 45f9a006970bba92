"""The driver of a job on Ray: fills places with actors, replaces lost ones, grows, and restarts all if it must."""

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
from regrow_guests.ray.job import NodeNews, RayJob, check, gang_arguments, joining_arguments

News = Callable[[NodeNews], None]
_TURN: Final[Seconds] = 1.0
_LOOK_EVERY: Final[Seconds] = 2.0
"""Interval of checks for draining machines."""
_SHOW_EVERY: Final[Seconds] = 10.0
_OF_THE_JOB: Final = (OK, SCRIPT_ERROR, UNPROVEN)
"""Codes of a node that end the whole job; node 0 soon ends with the same one."""
_MOST_PAUSE: Final[Seconds] = 60.0
_END_MARGIN: Final[Seconds] = 15.0


class TrainingFailed(RegrowError):
    """The job has ended with a code other than 0. `code`: exit code of `regrow run`."""

    def __init__(self, cause: str, code: int) -> None:
        super().__init__(cause, hint="the nodes' output is in the driver's output")
        self.code = code


def train(job: RayJob, news: News = lambda _: None) -> None:
    """Train to the end, on the cluster that `ray.init` has connected to. The driver must live until then.

    Args:
        job: the training and its resources.
        news: called with events of nodes, in the thread of the caller.

    Raises:
        UsageError: a number is not valid, or Ray is not installed.
        DeadlineExceeded: there was no room within the job's `patience`.
        TrainingFailed: the job ended with a code other than 0.
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
class _RayNode:
    """A place for a node.

    `stage`: it `waits` for a time; it waits for `room`; its actor is being `placed`; it `stands` while it waits for
    node 0's address; it `starts`; it `runs`; it is `over` when it has ended with the job.
    """

    name: str
    group: Any
    bundle: int
    rank: int | None
    """Node rank in the gang; None: it joins later."""
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
    """True if a node of the job has run here, or if the job can do without it."""


@dataclass
class _Attempt:
    """One attempt at the job, from its coordinator's start to its end."""

    job: RayJob
    cluster: RayCluster
    gang: Any
    news: News
    number: int
    nodes: list[_RayNode] = field(default_factory=list)

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
        """Run the attempt; returns the job's exit code, `RUN_AGAIN` if all may restart."""
        self.nodes = [_RayNode(f"node{rank}", self.gang, rank, rank) for rank in range(self.job.nodes)]
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
            for node in self.nodes:
                self._clear(node)

    def _turn(self) -> None:
        now = monotonic()
        for node in self.nodes:
            if node.stage == "waits" and now >= node.since:
                self._fill(node)
            elif node.stage == "stands" and self._endpoint:
                self._start(node)
        refs = {node.ref: node for node in self.nodes if node.ref is not None}
        for ref in self.cluster.ready(list(refs), _TURN):
            self._answered(refs[ref])
        if self._endpoint and now >= self._looked + _LOOK_EVERY:
            self._looked = now
            self._grow()
            self._aside(self._see_going)
            self._let_go()
        if self._endpoint and now >= self._shown + _SHOW_EVERY:
            self._shown = now
            self._aside(lambda: self.cluster.show(sum(node.stage == "runs" for node in self.nodes), self._figures()))

    def _aside(self, look: Callable[[], object]) -> None:
        """Call a function on which the training does not depend: only its first error is reported, as a warning."""
        try:
            look()
        except Exception as error:  # noqa: BLE001 - the training does not depend on it
            if not self._said:
                self._said = True
                warnings.warn(f"job {self.job.name} goes on, but Ray said {error!r}", RuntimeWarning, stacklevel=2)

    def _fill(self, node: _RayNode) -> None:
        node.actor = self.cluster.actor(node.group, node.bundle)
        node.stage, node.ref = "placed", node.actor.where.remote()

    def _answered(self, node: _RayNode) -> None:
        try:
            found = self.cluster.value(node.ref)
        except ActorLost:
            self._lost(node)
            return
        except Exception as error:
            if not node.ran:
                raise  # the job cannot begin with these settings
            warnings.warn(f"{node.name} did not come back: {error!r}", RuntimeWarning, stacklevel=2)
            self._lost(node)
            return
        match node.stage:
            case "room":
                self._fill(node)
            case "placed":
                self._placed(node, *found)
            case _ if found is None:
                node.stage, node.ref, node.ran = "runs", node.actor.wait.remote(_TURN), True
            case _:
                self._ended(node, found)

    def _placed(self, node: _RayNode, machine: str, address: str, port: int) -> None:
        node.stage, node.machine, node.address, node.ref = "stands", machine, address, None
        if node.rank == 0:
            self._endpoint = address_of(address, port)
            self._client = CoordinatorClient(self._endpoint, self._token, timeout=2.0)

    def _start(self, node: _RayNode) -> None:
        """Start regrow on a node: one of the gang begins the job, or returns to it; another joins it."""
        if node.rank is None:
            arguments = joining_arguments(self.job, node.name, self._endpoint, node.address)
        else:
            arguments = gang_arguments(self.job, node.rank, self._endpoint, node.address, again=self.number > 1)
        environment = {"REGROW_TOKEN": self._token, "REGROW_GIVEN_BACK_CODE": str(RUN_AGAIN)}
        if self.job.home:
            environment["REGROW_HOME"] = f"{self.job.home}/{node.name}.{self.number}.{self._next()}"
        node.stage = "starts"
        node.ref = node.actor.start.remote(arguments, {**self.job.environment, **environment}, self.job.folder)
        node.begun, node.leaves = True, False
        node.since = monotonic()
        self.news(NodeNews("starts", node.name, node.machine))

    def _lost(self, node: _RayNode) -> None:
        self.news(NodeNews("lost", node.name, node.machine))
        self._vacate(node, RUN_AGAIN)

    def _ended(self, node: _RayNode, code: int) -> None:
        self.news(NodeNews("ended", node.name, node.machine, code))
        if node.rank != 0 and code in _OF_THE_JOB:
            node.stage, node.ref = "over", None
        else:
            self._vacate(node, code)

    def _vacate(self, node: _RayNode, code: int) -> None:
        """Free a place. Node 0's end is the job's; another place is refilled, after growing pauses if it ends soon."""
        if node.rank == 0:
            self._over = code if node.begun else None
        self._clear(node)
        if node.rank is None:
            self.nodes.remove(node)
            return
        now = monotonic()
        quick = now - node.since < _MOST_PAUSE
        node.pause = min(_MOST_PAUSE, 2 * node.pause) if quick and node.begun else 1.0
        node.stage, node.since = "waits", now + (node.pause if node.begun else 0.0)

    def _clear(self, node: _RayNode) -> None:
        if node.actor is not None:
            self.cluster.end(node.actor)
        if node.rank is None:
            self.cluster.release(node.group)
        node.actor = node.ref = None

    def _grow(self) -> None:
        """Request one more machine at a time, once all present nodes run."""
        there = all(node.stage == "runs" for node in self.nodes)
        if there and len(self.nodes) < self.job.most:
            group = self.cluster.bundles(1)
            name = f"{self.job.name}-{self.number}-{self._next()}"
            self.nodes.append(_RayNode(name, group, 0, None, stage="room", ref=group.ready(), ran=True))

    def _see_going(self) -> None:
        self._going = self.cluster.going()

    def _let_go(self) -> None:
        going = self._going
        for node in self.nodes:
            if node.stage == "runs" and node.machine in going and not node.leaves:
                node.leaves = True
                node.actor.leave.remote()
                self.news(NodeNews("leaving", node.name, node.machine))

    def _see_off(self) -> None:
        """Wait for the other nodes, which end by themselves with the same code once node 0 reports the job's end."""
        until = monotonic() + self.job.grace + _END_MARGIN
        while (left := {node.ref: node for node in self.nodes if node.stage == "runs"}) and monotonic() < until:
            for ref in self.cluster.ready(list(left), _TURN):
                node = left[ref]
                try:
                    code = self.cluster.value(ref)
                except Exception:  # noqa: BLE001 - the job is over already, with its own code
                    code = RUN_AGAIN
                if code is None:
                    node.ref = node.actor.wait.remote(_TURN)
                else:
                    node.stage = "over"
                    self.news(NodeNews("ended", node.name, node.machine, code))

    def _figures(self) -> JobFigures | None:
        try:
            return None if self._client is None else self._client.figures()
        except RegrowError:
            return None

    def _next(self) -> int:
        self._serial += 1
        return self._serial
