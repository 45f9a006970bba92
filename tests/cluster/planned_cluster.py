"""A cluster of names and times alone, in which planned actions are carried out: for the planner's laws."""

import random
from collections.abc import Callable

import msgspec

from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.observed import AvoidedNode, JobSeen, JobStage, ReplicaSeen, ReplicaStage
from regrow_clusters.cluster.planner import granted_after, next_look, plan
from regrow_clusters.cluster.sizes import ElasticSpec, allowed_sizes

R = ReplicaStage
Check = Callable[[ElasticSpec, JobSeen, list[PlannedAction]], None]
_LEASE = 15.0


class PlannedCluster:
    """Machines, replicas on them, and a clock that moves when nothing else does."""

    def __init__(self, spec: ElasticSpec, start: JobSeen, *, machines: int) -> None:
        self.spec = spec
        self.stage = start.stage
        self.replicas = {each.name: each for each in start.replicas}
        self.machines = machines
        self.now = 0.0
        self._granted = start.granted
        self._changed = start.changed_at
        self._retry = start.retry_at
        self._bad: dict[str, AvoidedNode] = {bad.node: bad for bad in start.bad_nodes}
        self._made = 0

    def observe(self) -> JobSeen:
        """Observation of an adapter."""
        return JobSeen(
            self.stage,
            tuple(self.replicas.values()),
            self._granted,
            self._changed,
            self._retry,
            tuple(self._bad.values()),
        )

    def settle(self, check: Check) -> None:
        """Go on until nothing is to be done any more, now or later."""
        for _ in range(400):
            if not self.round(check):
                later = next_look(self.spec, self.observe(), self.now)
                if later is None:
                    return
                self.now = later
        raise AssertionError(f"it does not come to rest: {self.observe()}")

    def round(self, check: Check) -> bool:
        """One turn of the planner and of the cluster; whether anything happened."""
        observed = self.observe()
        actions = plan(self.spec, observed, self.now)
        check(self.spec, observed, actions)
        for action in actions:
            self._do(action)
        self._granted = granted_after(self.spec, observed, actions)
        moved = self._move()
        if self.stage is JobStage.BROKEN and not self.replicas:
            self.stage, moved = JobStage.NEW, True
        gang = [each for each in self.replicas.values() if each.place < self.spec.replica_count]
        if self.stage is JobStage.NEW and sum(each.stage is R.RUNNING for each in gang) == self.spec.replica_count:
            self.stage, moved = JobStage.TRAINING, True
        return bool(actions) or moved

    def happen(self, chance: random.Random) -> None:
        """Something that nobody planned."""
        self.now += chance.choice([0.0, 0.5, 5.0, 40.0])
        victim = chance.choice(sorted(self.replicas)) if self.replicas else None
        event = chance.choice(["lose", "end", "preempt", "machines", "scale", "nothing", "break", "stick", "sicken"])
        if event == "machines":
            self.machines = chance.randint(0, self.spec.max_replica_count + 2)
        elif event == "scale":
            asked = chance.choice(allowed_sizes(self.spec))
            self.spec = msgspec.structs.replace(self.spec, replicas=asked)
        elif event == "break" and self.stage is JobStage.TRAINING and chance.random() < 0.3:
            self.stage = JobStage.BROKEN
        elif victim is not None and event == "sicken":
            found = [AvoidedNode(node, self.now + 600.0, "sick", leave=True) for node in self.replicas[victim].nodes]
            self._bad.update({each.node: each for each in found})
        elif victim is not None and event in ("lose", "end", "preempt", "stick"):
            self._strike(victim, event)

    def _strike(self, victim: str, event: str) -> None:
        each = self.replicas[victim]
        if not each.counts:
            return
        if event == "lose":
            self._set(victim, R.LOST, safe_at=self.now + _LEASE, to_blame=True)
        elif event == "end":
            self._set(victim, R.ENDED, safe_at=self.now)
        elif event == "stick" and each.stage is R.QUEUED:
            self._set(victim, R.STARTING)
        elif event == "preempt":
            self._set(victim, R.LEAVING, safe_at=self.now + _LEASE, leave_by=self.now + 5.0)
        self._changed = self.now

    def _do(self, action: PlannedAction) -> None:
        if isinstance(action, StartGang):
            for place in action.places:
                self._start(place, action.avoid)
        elif isinstance(action, StartReplica):
            self._start(action.place, action.avoid)
        elif isinstance(action, ReleaseReplica):
            del self.replicas[action.name]
        else:
            self._drain(action)
        if isinstance(action, ReleaseReplica | DrainReplica):
            self._bad.update({node: AvoidedNode(node, self.now + 600.0) for node in action.blame})

    def _drain(self, action: DrainReplica) -> None:
        by = self.now + action.within
        self._set(action.name, R.LEAVING, leave_by=by, safe_at=by + _LEASE)

    def _start(self, place: int, avoid: tuple[str, ...]) -> None:
        assert place not in {each.place for each in self.replicas.values()}, "two for one place"
        self._made += 1
        name = f"made{self._made}"
        self.replicas[name] = ReplicaSeen(name, place, R.QUEUED, self.now, avoids=avoid)

    def _move(self) -> bool:
        """Whoever waits is given a machine and runs; whoever leaves has left at its time."""
        moved = False
        for name, each in list(self.replicas.items()):
            free = self._free()
            if each.stage is R.QUEUED and (fit := [node for node in free if node not in each.avoids]):
                self._set(name, R.RUNNING, nodes=(fit[0],))
                self._changed, moved = self.now, True
            elif each.stage is R.LEAVING and (each.leave_by is None or each.leave_by <= self.now):
                del self.replicas[name]
                self._changed, moved = self.now if each.nodes else self._changed, True
            elif each.stage in (R.LOST, R.ENDED) and each.safe_at is None:
                self._set(name, each.stage, safe_at=self.now)
                moved = True
        return moved

    def _free(self) -> list[str]:
        """Machines on which nothing is."""
        holding = [each for each in self.replicas.values() if each.stage in (R.STARTING, R.RUNNING, R.LEAVING)]
        held = {node for each in holding for node in each.nodes}
        room = self.machines - sum(bool(each.nodes) for each in holding)
        return [node for node in (f"node{n}" for n in range(self.machines)) if node not in held][: max(room, 0)]

    def _set(self, name: str, stage: ReplicaStage, **fields: object) -> None:
        self.replicas[name] = msgspec.structs.replace(self.replicas[name], stage=stage, since=self.now, **fields)
