"""Reading of a job from Slurm's queue and its coordinator, in the planner's terms. Pure.

The coordinator knows at once whether a node trains, leaves or is lost; Slurm knows which jobs wait, and where each one
runs. A node that the coordinator has given up is fenced: its lease is over, and it commits no step any more.
"""

from typing import Final

import msgspec

from regrow.core.ids import Instant, NodeId, Seconds
from regrow.membership.view import JobView, NodeView
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartReplica
from regrow_clusters.cluster.observed import AvoidedNode, JobSeen, JobStage, ReplicaSeen, ReplicaStage
from regrow_clusters.cluster.planner import granted_after, plan
from regrow_clusters.cluster.sizes import ElasticSpec
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.reading import JobRequests, SlurmJob

GANG: Final = "gang:"
"""Prefix, before the place, of the name of a replica of the gang."""
_KILL_S: Final[Seconds] = 30.0
"""Time, after the grace, in which Slurm ends a job: its default KillWait."""
_ASKED: Final = "asked for"
"""Reason for avoiding a node that a user has drained."""
_FIRST_PAUSE_S: Final[Seconds] = 5.0
_LONGEST_PAUSE_S: Final[Seconds] = 300.0
_MOST_BACKUPS: Final = 16
_LOST_STATES: Final = frozenset({"NODE_FAIL", "BOOT_FAIL"})


def planned_sizes(spec: SlurmJobSpec, requests: JobRequests) -> ElasticSpec:
    """Sizes for the planner. Spares that form whole replicas count as places: they are replaced too."""
    more = spec.spares // spec.nodes_per_replica
    sizes = spec.elastic_spec(replicas=requests.replicas)
    wanted = sizes.max_replica_count if sizes.replicas is None else sizes.replicas
    return msgspec.structs.replace(
        sizes,
        replica_count=sizes.replica_count + more,
        max_replica_count=sizes.max_replica_count + more,
        replicas=wanted + more,
        replica_discrete_values=tuple(size + more for size in sizes.replica_discrete_values),
    )


def node_of_gang(index: int) -> NodeId:
    """Regrow's name of a node of the gang."""
    return NodeId(f"node{index}")


def backups(nodes: int) -> list[int]:
    """Nodes that can manage the gang after the loss of the first: a few, spread evenly, so that not all query Slurm."""
    if nodes - 1 <= _MOST_BACKUPS:
        return list(range(1, nodes))
    return sorted({1 + turn * (nodes - 2) // (_MOST_BACKUPS - 1) for turn in range(_MOST_BACKUPS)})


def looks_after(view: JobView, index: int, nodes: int) -> bool:
    """True if this node of the gang manages the job: it is the first remaining one of node 0 and its backups."""
    line = [0, *backups(nodes)]
    before = {node_of_gang(other) for other in line if other < index}
    return index in line and not any(each.node in before and not each.away for each in view.nodes)


def nodes_of_replica(spec: SlurmJobSpec, place: int, job_id: int) -> list[NodeId]:
    """Regrow's names of the nodes of a replica beyond the gang, or of one that replaces a replica of the gang.

    In a job of a single size, a replacement must have the name of the lost node.
    """
    count = spec.nodes_per_replica
    if spec.most == spec.replica_count:
        return [node_of_gang(place * count + index) for index in range(count)]
    return [NodeId(f"r{place}-{job_id}" if count == 1 else f"r{place}-{job_id}-{index}") for index in range(count)]


class Overview:
    """Observed state of one job while its gang runs; `look` plans the next actions.

    Args:
        spec: of the job.
        hosts: Slurm's names of the gang's nodes, in the order of their ranks.
        avoid: nodes that the gang itself excluded.
        now: time of the start.
    """

    def __init__(self, spec: SlurmJobSpec, hosts: tuple[str, ...], avoid: tuple[str, ...], now: Instant) -> None:
        self._spec = spec
        self._hosts = hosts
        self._began = now
        self._granted = 0
        self._running: frozenset[str] = frozenset()
        self._changed_at: Instant | None = None
        self._bad = {node: AvoidedNode(node, now + spec.bad_node_time_in_seconds, "lost before") for node in avoid}
        self._kept_from: dict[str, Instant] = {}
        """Nodes that pending jobs exclude for a reason unknown here, and the time until which that is accepted."""
        self._first: dict[tuple[int, str], Instant] = {}
        """Time when a Slurm job was first seen in a state."""
        self._joined: set[int] = set()
        self._counted: set[int] = set()
        self._asked: dict[int, Instant] = {}
        """Slurm jobs that were asked to leave, and their deadlines."""
        self._gone: set[int] = set()
        """Slurm jobs that were released: their places are free, whatever Slurm still shows."""
        self._failures = 0
        self._failed_at: Instant = 0.0

    def look(self, view: JobView, queue: list[SlurmJob], requests: JobRequests, now: Instant) -> list[PlannedAction]:
        """Plan for the job as it is now. Times in `requests` are on the clock of `now`."""
        spec = planned_sizes(self._spec, requests)
        self._blame_asked(requests, now)
        nodes = {each.node: each for each in view.nodes}
        self._blame_quarantined(nodes, queue, now)
        replicas = self._gang(nodes, queue, now)
        for job in queue:
            if job.place is not None and job.job_id not in self._gone:
                replicas.extend(self._replica(job, job.place, nodes, now))
        running = frozenset(each.name for each in replicas if each.stage is ReplicaStage.RUNNING)
        if running != self._running:
            self._changed_at = now if self._running else None
            self._running = running
        seen = JobSeen(
            JobStage.TRAINING,
            tuple(replicas),
            granted=self._granted,
            changed_at=self._changed_at,
            retry_at=self._retry_at(),
            bad_nodes=tuple(self._bad.values()),
        )
        actions = plan(spec, seen, now)
        self._granted = granted_after(spec, seen, actions)
        for action in actions:
            if isinstance(action, DrainReplica | ReleaseReplica):
                for node in action.blame:
                    self._blame(node, action.reason, now)
                self._ask_without(action.name, replicas, now)
        return actions

    def bad_nodes(self, now: Instant) -> tuple[str, ...]:
        """Nodes that are excluded now."""
        return tuple(sorted(bad.node for bad in self._bad.values() if bad.until > now))

    def bad_nodes_by_reason(self, now: Instant) -> list[tuple[str, str]]:
        """Nodes that are excluded now, each with the reason."""
        return sorted((bad.node, bad.reason) for bad in self._bad.values() if bad.until > now)

    def asked(self, job_id: int, within: Seconds, now: Instant) -> None:
        """Record that a Slurm job was asked to leave."""
        self._asked.setdefault(job_id, now + within)

    def given_back(self, job_id: int) -> None:
        """Record that a Slurm job was released: none of its processes counts any more."""
        self._gone.add(job_id)

    def failed(self, now: Instant) -> None:
        """Record a replica that could not be submitted or ended before it joined: the pause before the next grows."""
        self._failures += 1
        self._failed_at = now

    def _retry_at(self) -> Instant:
        if not self._failures:
            return 0.0
        return self._failed_at + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10))

    def _avoids(self, job: SlurmJob, now: Instant) -> tuple[str, ...]:
        """Nodes that a pending job need not exclude any longer.

        An excluded node that is not blamed here was bad for the job's former keeper, or a user's own script always
        excludes it: it is retried no more often than a bad node.
        """
        for node in job.excluded:
            if node not in self._bad:
                self._kept_from.setdefault(node, now + self._spec.bad_node_time_in_seconds)
        return tuple(node for node in job.excluded if self._kept_from.get(node, now) <= now)

    def _ask_without(self, name: str, replicas: list[ReplicaSeen], now: Instant) -> None:
        bad = self.bad_nodes(now)
        avoided = (node for each in replicas if each.name == name for node in each.avoids if node not in bad)
        self._kept_from.update(dict.fromkeys(avoided, now + self._spec.bad_node_time_in_seconds))

    def _blame(self, node: str, reason: str, now: Instant) -> None:
        known = self._bad.get(node)
        if known is None or known.until <= now:
            self._bad[node] = AvoidedNode(node, now + self._spec.bad_node_time_in_seconds, reason)

    def _blame_asked(self, requests: JobRequests, now: Instant) -> None:
        """Avoid the nodes that users have excluded, exactly as long as they request it."""
        for node, bad in list(self._bad.items()):
            if bad.reason == _ASKED and node not in requests.avoid:
                del self._bad[node]
        for node, until in requests.avoid.items():
            known = self._bad.get(node)
            if known is None or known.until < until:
                self._bad[node] = AvoidedNode(node, until, _ASKED)

    def _blame_quarantined(self, nodes: dict[NodeId, NodeView], queue: list[SlurmJob], now: Instant) -> None:
        """Exclude nodes that failed the job's own examinations twice; replicas that run there stay."""
        hosts = {node_of_gang(index): host for index, host in enumerate(self._hosts)}
        for job in queue:
            if job.place is not None and not job.done:
                hosts |= dict(zip(nodes_of_replica(self._spec, job.place, job.job_id), job.nodes, strict=False))
        for name, each in nodes.items():
            if each.quarantined and not each.away and name in hosts:
                self._blame(hosts[name], each.quarantined, now)

    def _gang(self, nodes: dict[NodeId, NodeView], queue: list[SlurmJob], now: Instant) -> list[ReplicaSeen]:
        """The gang's whole replicas; spares first replace lost nodes."""
        count = self._spec.nodes_per_replica
        away = []
        for index, host in enumerate(self._hosts):
            seen = nodes.get(node_of_gang(index))
            away.append(seen is not None and seen.away)
            if seen is not None and seen.away and not seen.left:
                self._blame(host, "it was lost", now)
        places = len(self._hosts) // count
        whole = min(places, (len(self._hosts) - sum(away)) // count)
        by_losses = sorted(range(places), key=lambda place: (-sum(away[place * count : (place + 1) * count]), -place))
        missing = set(by_losses[: places - whole])
        if self._spec.most == self._spec.replica_count:
            # The replacement has the same node names: it is listed as a replica of its own.
            missing |= {job.place for job in queue if job.place is not None and not job.done}
        return [
            ReplicaSeen(
                f"{GANG}{place}",
                place,
                ReplicaStage.RUNNING,
                self._began,
                self._hosts[place * count : (place + 1) * count],
            )
            for place in range(places)
            if place not in missing
        ]

    def _replica(self, job: SlurmJob, place: int, nodes: dict[NodeId, NodeView], now: Instant) -> list[ReplicaSeen]:
        """A replica beyond the gang; an empty list if it has ended."""
        mine = [nodes[name] for name in nodes_of_replica(self._spec, place, job.job_id) if name in nodes]
        known = [each for each in mine if job.job_id in self._joined or not each.away]
        lost = [each for each in known if each.away and not each.left]
        here = [each for each in known if not each.away]
        if len(here) == self._spec.nodes_per_replica:
            self._joined.add(job.job_id)
            self._failures = 0
        if job.done or (job.state == "COMPLETING" and not here):
            self._count_end(job, now)
            return []
        since = self._first.setdefault((job.job_id, job.state), now)

        def seen(stage: ReplicaStage, **more: object) -> list[ReplicaSeen]:
            replica = ReplicaSeen(str(job.job_id), place, stage, since, job.nodes)
            return [msgspec.structs.replace(replica, **more)]

        if lost:
            return seen(ReplicaStage.LOST, safe_at=now, to_blame=True)
        if job.job_id in self._asked:
            until = self._asked[job.job_id]
            return seen(ReplicaStage.LEAVING, leave_by=until, safe_at=until + _KILL_S)
        if job.state == "PENDING":
            return seen(ReplicaStage.QUEUED, avoids=self._avoids(job, now))
        if job.job_id in self._joined:
            if len(here) < len(known) or job.state == "COMPLETING" or any(each.draining for each in here):
                return seen(ReplicaStage.LEAVING)
            return seen(ReplicaStage.RUNNING)
        return seen(ReplicaStage.STARTING)

    def _count_end(self, job: SlurmJob, now: Instant) -> None:
        """Count a job that ended without having joined as a failure, once; a node that failed is avoided."""
        if job.job_id in self._counted:
            return
        self._counted.add(job.job_id)
        if job.state in _LOST_STATES:
            for node in job.nodes:
                self._blame(node, "Slurm lost it", now)
        ran = any(number == job.job_id and state != "PENDING" for number, state in self._first)
        if job.job_id not in self._joined and (ran or job.state == "FAILED"):
            self.failed(now)


def replacement_text(action: StartReplica) -> str:
    """Reason for requesting a replica, for people."""
    what = "a lost replica is replaced" if action.replacement else "the job may grow"
    avoided = f", without {', '.join(action.avoid)}" if action.avoid else ""
    return f"{what}: place {action.place}{avoided}"
