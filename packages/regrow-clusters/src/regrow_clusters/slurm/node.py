"""One node's task in a Slurm job: starts regrow, passes on Slurm's notice to leave, and holds a lease.

Slurm's SIGTERM before a time limit or a preemption is a planned leave. If Slurm signals only tasks (proctrack/cgroup,
pgid), the signal reaches this process alone; regrow is started in a session of its own.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from regrow.agent.workers.processes import die_with_parent
from regrow.core.errors import RegrowError, UsageError
from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.hosts import address_of, route_to
from regrow.core.ids import Seconds
from regrow.launch.addresses import endpoint_of
from regrow_clusters.slurm.client import SlurmClient, SlurmFailure
from regrow_clusters.slurm.ending import GangEnd
from regrow_clusters.slurm.following import FollowedCoordinator
from regrow_clusters.slurm.keeper import Keeper
from regrow_clusters.slurm.node_arguments import (
    DO_NOT_RESTART,
    GangNode,
    exit_code,
    gang_arguments,
    port_of,
    replica_arguments,
    run_name,
)
from regrow_clusters.slurm.notice import GangNotice
from regrow_clusters.slurm.reading import JobRequests
from regrow_clusters.slurm.requests import read_requests, requests_file
from regrow_clusters.slurm.scripts import JobPart

_LOOK_S: Final[Seconds] = 0.25
_LOOK_FOR_JOB_S: Final[Seconds] = 2.0
_ELECTED_S: Final[Seconds] = 60.0
"""Wait for another coordinator if this node's has ended unexpectedly: twice an election's time."""
_GONE_S: Final[Seconds] = 10.0
"""Silence after which a coordinator counts as gone, unless another has replaced it."""
_END_S: Final[Seconds] = 15.0
"""Time for regrow to end after the SIGTERM at the end of its lease."""


class NodeTask:
    """One node's task; it must run in the main thread of its process.

    Args:
        part: the Slurm job.
        gang_node: this node of it.
        environment: of this process; started processes inherit it.
        home: folder of records on this node.
        command: starts regrow, if the job's file gives no command.
    """

    def __init__(
        self, part: JobPart, gang_node: GangNode, environment: Mapping[str, str], home: Path, command: list[str]
    ) -> None:
        self._part, self._gang_node, self._home = part, gang_node, home
        self._environment = environment
        self._command = part.spec.command or command
        self._slurm = SlurmClient(environment)
        self._token = environment.get("REGROW_TOKEN", "")
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_to_leave = self._passed_on = False
        self._notice: GangNotice | None = None
        self._keeper: Keeper | None = None

    def run(self) -> int:
        """Run the task. Its exit code: 0 done, 75 retry later, 93 a retry would end the same way."""
        signal.signal(signal.SIGTERM, self._take_notice)
        if not self._token:
            raise UsageError(
                "a node of a Slurm job needs the job's secret in REGROW_TOKEN",
                hint="submit with regrow slurm submit, or export it in your own script, the same for all",
            )
        return self._run_gang() if self._part.place is None else self._run_replica()

    # --- the gang ----------------------------------------------------------------------------------------------

    def _run_gang(self) -> int:
        end = GangEnd(self._part, self._gang_node, self._slurm, self._requests, self._say)
        host = _resolved(self._slurm.address(self._gang_node.first_host))
        at = address_of(host, port_of(self._part, self._gang_node.job_id))
        first = self._gang_node.index == 0
        own = host if first else route_to(*endpoint_of("NodeAddr", at), flag="NodeAddr in slurm.conf")
        client = self._followed(at, self._gang_node.job_id)
        if self._part.spec.elect:
            self._notice = GangNotice(client, self._gang_node.host, self._part.spec.grace)
        if first or self._part.spec.elect:
            self._keeper = Keeper(
                self._part, self._gang_node, self._slurm, client, self._home, self._command, self._say
            )
        self._start(gang_arguments(self._part, self._gang_node, at, own))
        ended = self._attend(client, leased=not first)
        code = exit_code(ended, asked_to_leave=self._asked_to_leave)
        if self._part.spec.elect and (client.moved or (first and ended < 0 and self._is_followed(client))):
            self._try_ending(lambda: end.by_successor(self._end_of_job(client), client.at))
        elif first:
            self._end_first(end, code)
        elif code == RUN_AGAIN:
            self._try_ending(end.by_survivor)
        return code

    def _followed(self, at: str, gang: int) -> FollowedCoordinator:
        """Client of the job's coordinator; it follows elections if the job allows them."""
        records = self._home / "jobs" / run_name(self._part, gang)
        return FollowedCoordinator(at, self._token, records if self._part.spec.elect else None)

    def _is_followed(self, client: FollowedCoordinator) -> bool:
        """On the first node, after its launcher ended unexpectedly: True if another coordinator was elected."""
        until = time.monotonic() + _ELECTED_S
        while time.monotonic() < until and not self._asked_to_leave:
            if client.moved and client.answers():
                return True
            time.sleep(_LOOK_S)
        return False

    def _end_of_job(self, client: FollowedCoordinator) -> int:
        """Exit code of a job that went on without this node, which may have left it long before."""
        reached = time.monotonic()
        while client.over is None and time.monotonic() - reached < _GONE_S:
            if not self._asked_to_leave and client.answers():
                reached = time.monotonic()  # after Slurm's notice the job ends soon, or not at all
            time.sleep(_LOOK_FOR_JOB_S)
        return RUN_AGAIN if client.over is None else exit_code(client.over, asked_to_leave=self._asked_to_leave)

    def _requests(self) -> JobRequests:
        """Users' requests to the job, if they are stored on this node."""
        return read_requests(requests_file(self._home, run_name(self._part, self._gang_node.job_id)))

    def _end_first(self, end: GangEnd, code: int) -> None:
        bad = self._keeper.bad_nodes() if self._keeper is not None else ()
        self._try_ending(lambda: end.by_first(code, bad))
        if self._gang_node.result:
            with contextlib.suppress(FileNotFoundError):  # the batch script may have ended too, and removed it
                Path(self._gang_node.result, "code").write_text(f"{code}\n", encoding="ascii")

    def _try_ending(self, end: Callable[[], None]) -> None:
        try:
            end()
        except RegrowError as error:
            self._say(f"the end of Slurm job {self._gang_node.job_id}: {error}")

    # --- a replica beyond it -----------------------------------------------------------------------------------

    def _run_replica(self) -> int:
        at = self._find_job()
        if at and self._part.gang:
            at = self._elected(at)
        if at is None:
            return OK
        if not at:
            return RUN_AGAIN
        host, port = endpoint_of("the job's note", at)
        own = route_to(host, port, flag="the job's note")
        self._start(replica_arguments(self._part, self._gang_node, at, own))
        code = self._attend(self._followed(at, self._part.gang), leased=True)
        return exit_code(code, asked_to_leave=self._asked_to_leave)

    def _elected(self, at: str) -> str:
        """The present coordinator's address."""
        followed = self._followed(at, self._part.gang)
        return followed.at if followed.moved else at

    def _find_job(self) -> str | None:
        """The coordinator's address; empty: the node is not needed now; None: there is no gang any more."""
        spec = self._part.spec
        while not self._asked_to_leave:
            gangs = [job for job in self._slurm.queue(spec.name) if job.place is None and not job.done]
            if not gangs:
                self._say(f"job {spec.name} has no gang in the queue; there is nothing to join")
                return None
            running = [job for job in gangs if job.state == "RUNNING"]
            if not running:
                self._say(f"job {spec.name} waits for its gang, which asks for replicas when it runs")
                return ""
            if running[-1].job_id == self._part.gang and self._part.at:
                return self._part.at
            note = self._slurm.note(spec.rendezvous_dir, spec.name, running[-1])
            if note.at:
                return note.at
            time.sleep(_LOOK_FOR_JOB_S)
        return ""

    # --- both --------------------------------------------------------------------------------------------------

    def _start(self, arguments: list[str]) -> None:
        self._say(f"node {self._gang_node.host}: regrow {arguments[0]} " + " ".join(arguments[1:]))
        self._child = subprocess.Popen(
            [*self._command, *arguments],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in self._environment.items() if not name.startswith("REGROW_SLURM_")},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        if self._asked_to_leave and self._notice is None:
            self._pass_on()

    def _attend(self, coordinator: FollowedCoordinator, *, leased: bool) -> int:
        """Wait for the end of the started process; returns its exit code, or 75 if the lease has expired."""
        if self._child is None:
            return RUN_AGAIN
        lease = Lease(coordinator, self._part.spec.lease_in_seconds) if leased else None
        while True:
            try:
                code = self._child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            else:
                return code
            if self._asked_to_leave and not self._passed_on and (self._notice is None or self._notice.pass_on()):
                self._pass_on()
            if self._keeper is not None:
                self._keeper.turn()
            if lease is not None and lease.over():
                self._say(
                    f"node {self._gang_node.host} has not reached the coordinator for {lease.seconds:g} s: it stops"
                )
                return self._stop()

    def _stop(self) -> int:
        if self._child is not None:
            self._child.terminate()
            try:
                self._child.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        return RUN_AGAIN

    def _take_notice(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: Slurm takes the node back, or its time is up."""
        if not self._asked_to_leave:
            self._asked_to_leave = True
            if self._notice is None:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._passed_on = True
            self._child.send_signal(signal.SIGTERM)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"regrow: {text}\n")
        sys.stderr.flush()


class Lease:
    """Lease on the coordinator: it expires if the coordinator is not reached in time, and begins at the first reach."""

    def __init__(self, coordinator: FollowedCoordinator, seconds: Seconds) -> None:
        self._coordinator = coordinator
        self.seconds = seconds
        self._reached: Seconds | None = None
        self._asked: Seconds = -1e9

    def over(self) -> bool:
        """Ask the coordinator if a request is due; True if the lease has expired."""
        now = time.monotonic()
        if now - self._asked >= self.seconds / 4:
            self._asked = now
            try:
                self._coordinator.spec()
            except RegrowError:
                pass
            else:
                self._reached = time.monotonic()
        return self._reached is not None and time.monotonic() - self._reached > self.seconds


def _end_with_parent() -> None:
    die_with_parent(signal.SIGKILL)  # the agent notices, and ends the workers


def _resolved(host: str) -> str:
    """IP address of a host, so that all nodes bind and reach the same one."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise SlurmFailure(
            f"the node's address in Slurm, {host}, is unknown here: {error.strerror or error}",
            hint="NodeAddr in slurm.conf must be a name or an address that all nodes know",
        ) from error


def run_task(part: JobPart, gang_node: GangNode, environment: Mapping[str, str], home: Path, command: list[str]) -> int:
    """As `NodeTask.run`, but errors are printed: the code is 93 if a retry cannot help, else 75."""
    try:
        return NodeTask(part, gang_node, environment, home, command).run()
    except UsageError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return DO_NOT_RESTART
    except RegrowError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return RUN_AGAIN
