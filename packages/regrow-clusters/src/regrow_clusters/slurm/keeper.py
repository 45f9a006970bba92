"""Manages a job from its gang's first node: starts, drains and replaces its replicas.

It is a part of the job: with its host the coordinator is lost too, and the gang is resubmitted (`ending.py`). If
coordinators are elected, each node of the gang has a keeper, and only that of the first remaining node acts.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from regrow.core.errors import CoordinatorGone, RegrowError, UsageError
from regrow.core.ids import Instant, NodeId, Seconds
from regrow.membership.server.requests import DrainRequest, ScaleRequest
from regrow.membership.view import JobView
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.node_health import may_mark, read_table, slurm_facts
from regrow_clusters.slurm.client import SlurmClient
from regrow_clusters.slurm.following import FollowedCoordinator
from regrow_clusters.slurm.node_arguments import GangNode, run_name
from regrow_clusters.slurm.observing import (
    GANG,
    Overview,
    looks_after,
    node_of_gang,
    nodes_of_replica,
    replacement_text,
)
from regrow_clusters.slurm.reading import JobNote, JobRequests, SlurmJob, host_list
from regrow_clusters.slurm.requests import read_requests, requests_file
from regrow_clusters.slurm.room import too_few_without
from regrow_clusters.slurm.scripts import JobPart, script_again, script_of
from regrow_clusters.slurm.training_size import fewer_to_train

_NODES_EVERY_S: Final[Seconds] = 30.0
"""Shortest interval between two calls of sinfo, the most expensive of the commands."""
_STAND_BY_S: Final[Seconds] = 2.0
Say = Callable[[str], None]


class Keeper:
    """Manages one job's replicas beyond the gang.

    Args:
        part: the gang.
        gang_node: this node of the gang.
        slurm: the cluster.
        coordinator: the job's coordinator.
        home: folder of the job's records on this node.
        command: starts regrow, if the job's file gives no command.
        say: prints a line for the user.
    """

    def __init__(
        self,
        part: JobPart,
        gang_node: GangNode,
        slurm: SlurmClient,
        coordinator: FollowedCoordinator,
        home: Path,
        command: list[str],
        say: Say,
    ) -> None:
        self._part, self._gang_node, self._home = part, gang_node, home
        self._slurm, self._coordinator = slurm, coordinator
        self._command, self._say, self._clock, self._wall = command, say, time.monotonic, time.time
        self._hosts = host_list(gang_node.hosts)
        self._overview = Overview(part.spec, self._hosts, part.avoid, time.monotonic())
        self._asked_at: Instant = -1e9
        self._nodes_at: Instant = time.monotonic()
        self._shape: tuple[object, ...] = ()
        self._queue: list[SlurmJob] = []
        self._left: set[str] = set()
        """Hosts that the job has left because Slurm drains them."""
        self._drained: set[str] = set()
        self._said: set[str] = set()
        self._refused_size: tuple[int | None, int, int] | None = None
        """The last refused size, with the job's wanted size and node count then: no retry until one changes."""
        self._trouble = ""
        self._requests_file = requests_file(home, run_name(part, gang_node.job_id))
        self._noted_at = ""
        self._stands_by, self._viewed_at = gang_node.index > 0, -1e9
        self._requests = JobRequests()
        self._table = read_table()

    def bad_nodes(self) -> tuple[str, ...]:
        """Nodes that new replicas exclude now."""
        return self._overview.bad_nodes(self._clock())

    def turn(self) -> None:
        """Observe the job once, and act. A failure is reported once, and retried at the next turn."""
        try:
            self._turn()
        except RegrowError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                self._say(f"looking after the job: {error}")
        else:
            self._trouble = ""

    def _turn(self) -> None:
        if self._stands_by and self._clock() - self._viewed_at < _STAND_BY_S:
            return
        self._viewed_at = self._clock()
        try:
            view = self._coordinator.status()
        except CoordinatorGone:
            return  # it has not started yet, or is about to end
        self._stands_by = not looks_after(view, self._gang_node.index, len(self._hosts))
        if self._stands_by:
            return
        self._note()
        if view.phase in ("gathering", "ended"):
            return
        if view.phase == "building" and not any(each.away for each in view.nodes):
            return  # no replica is requested before the script has reached its first step
        now = self._clock()
        self._requests = read_requests(self._requests_file).on_clock(now, self._wall())
        self._train_fewer(view)
        shape = (self._requests, *((each.node, each.away, each.draining, each.left) for each in view.nodes))
        if shape == self._shape and now - self._asked_at < self._part.spec.poll_in_seconds:
            return
        self._shape, self._asked_at = shape, now
        self._queue = self._slurm.queue(self._part.spec.name)
        if self._requests.over:
            return
        for action in self._overview.look(view, self._queue, self._requests, now):
            self._carry_out(action, now)
            self._asked_at = -1e9  # observe the result in the next turn
        self._leave_drained(view, now)
        self._drain_bad(now)

    def _train_fewer(self, view: JobView) -> None:
        """Reduce the coordinator's size before replicas are drained, so that the ranks move only once."""
        size = fewer_to_train(self._part.spec, self._requests, view)
        asked = (size, view.wanted, len(view.nodes))
        if size is None or asked == self._refused_size:
            return
        answer = self._coordinator.scale(ScaleRequest(size, reason=f"{size} replicas are wanted"))
        if not answer.accepted:
            self._refused_size = asked
            self._say_once(f"the job cannot train with {size} replicas: {answer.reason}")

    def _note(self) -> None:
        """Write the coordinator's address into the note. For an elected one that may fail: scripts of replicas have it.

        Without accounting, Slurm 22.05 changes no comment of a job that has lost a node.
        """
        at = self._coordinator.at
        if self._noted_at == at:
            return
        try:
            self._slurm.write_note(self._part.spec, self._gang_node.job_id, JobNote(at, str(self._home)))
        except RegrowError as error:
            if not self._coordinator.moved:
                raise
            self._say_once(f"that {at} has the coordinator could not be written down: {error}")
        self._noted_at = at

    def _carry_out(self, action: PlannedAction, now: Instant) -> None:
        match action:
            case StartReplica():
                self._submit(action, now)
            case DrainReplica() if not action.name.startswith(GANG):
                self._say(f"Slurm job {action.name} is given back: {action.reason}")
                job_id = int(action.name)
                waits = any(job.job_id == job_id and job.state == "PENDING" for job in self._queue)
                self._overview.asked(job_id, action.within, now)
                if waits:
                    self._slurm.cancel(job_id)
                else:
                    self._slurm.leave(job_id)
            case ReleaseReplica():
                self._overview.given_back(int(action.name))
                self._slurm.cancel(int(action.name))
            case DrainReplica() | StartGang():
                pass  # the gang is one Slurm job: this process would end with it

    def _submit(self, action: StartReplica, now: Instant) -> None:
        part = JobPart(
            self._part.spec,
            action.place,
            self._part.attempt,
            action.avoid,
            gang=self._gang_node.job_id,
            at=self._coordinator.at,
        )
        try:
            job_id = self._slurm.submit(replica_script(part, self._command))
        except RegrowError:
            self._overview.failed(now)
            raise
        self._say(f"{replacement_text(action)}: Slurm job {job_id}")

    def _leave_drained(self, view: JobView, now: Instant) -> None:
        """Leave the nodes that Slurm drains, before they are taken away."""
        spec = self._part.spec
        if not spec.leave_states or now - self._nodes_at < max(_NODES_EVERY_S, spec.poll_in_seconds):
            return
        self._nodes_at = now
        running = [job for job in self._queue if job.place is not None and job.state == "RUNNING"]
        hosts = {*self._hosts, *(node for job in running for node in job.nodes)}
        leaving: list[NodeId] = []
        for found in self._slurm.nodes(sorted(hosts)):
            if found.state not in spec.leave_states or found.node in self._left:
                continue
            verdicts = self._table.verdicts(found.node, slurm_facts(found.state, found.reason))
            why = f"Slurm: {verdicts[0].text if verdicts else found.state}"
            own = [job for job in running if found.node in job.nodes]
            here = [node for job in own for node in nodes_of_replica(spec, job.place or 0, job.job_id)]
            if found.node in self._hosts:
                here.append(node_of_gang(self._hosts.index(found.node)))
            if few := too_few_without(view, leaving + here):
                self._say_once(f"{found.node} is not left yet ({why}): without it {few}")
                continue  # checked again later
            self._left.add(found.node)
            leaving += here
            for job in own:
                self._overview.asked(job.job_id, spec.grace, now)
                self._slurm.leave(job.job_id)
                self._say(f"Slurm job {job.job_id} leaves {found.node}; {why}")
            if found.node in self._hosts:
                self._drain(view, self._hosts.index(found.node), why)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _drain(self, view: JobView, index: int, why: str) -> None:
        node = node_of_gang(index)
        if any(each.node == NodeId(node) and not each.away for each in view.nodes):
            answer = self._coordinator.drain(DrainRequest(node, self._part.spec.grace, why))
            self._say(answer.reason if answer.accepted else f"{node} stays: {answer.reason}")

    def _drain_bad(self, now: Instant) -> None:
        """Drain lost nodes in Slurm, if the job asks for it; this needs an operator's rights."""
        if not self._part.spec.drain_bad_nodes:
            return
        for node, reason in self._overview.bad_nodes_by_reason(now):
            if node in self._drained or node in self._requests.avoid or node in self._part.avoid:
                continue
            self._drained.add(node)
            every, out = self._slurm.node_count()
            if not may_mark(out, every):
                self._say(f"{node} is not drained: {out} of {every} nodes are out already")
                continue
            self._slurm.drain_node(
                node, f"regrow: job {self._part.spec.name} ({self._gang_node.job_id}): {reason}"[:200]
            )
            self._say(f"{node} is drained")


def replica_script(part: JobPart, command: list[str]) -> str:
    """Batch script of a replica beyond the gang: regrow's, or the user's own. Raises `UsageError`."""
    if not part.spec.elastic.script:
        return script_of(part, command)
    try:
        own = Path(part.spec.elastic.script).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"elastic.script {part.spec.elastic.script} cannot be read: {error.strerror}") from error
    return script_again(own, part)
