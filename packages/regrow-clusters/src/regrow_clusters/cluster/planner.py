"""Planner of a job's replicas: `plan(spec, observed, now)`. Pure, and the same for every kind of cluster.

Laws (`packages/regrow-clusters/tests/test_cluster_planner.py`):
from any observed state the plan reaches the wanted size and is then empty;
never two replicas for one place; never more than the maximum; never fewer than the gang by its own choice; and no
running replica is drained while at most the wanted number run, however many wait.
"""

from regrow.core.ids import Instant
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartGang, StartReplica
from regrow_clusters.cluster.observed import JobSeen, JobStage, ReplicaSeen, ReplicaStage
from regrow_clusters.cluster.sizes import ElasticSpec, next_size, wanted_size


def plan(spec: ElasticSpec, observed: JobSeen, now: Instant) -> list[PlannedAction]:
    """Plan the actions for a job as it is now; an empty list if nothing is to be done yet.

    `next_look` gives the time of the next call. `spec` must have no `problems`. The caller does the actions in their
    order; no action of one call depends on the result of another.
    """
    work = _Work(spec, observed, now)
    work.release_gone()
    if observed.stage in (JobStage.OVER, JobStage.STOPPED, JobStage.BROKEN):
        work.drain_all(f"the job is {observed.stage}")
        return work.actions
    work.drain_doubles()
    if observed.stage is JobStage.NEW:
        work.give_up_gang()
        work.ask_anew()
        work.start_gang()
        return work.actions
    work.drain_surplus()
    work.give_up_stuck()
    work.move_from_bad()
    work.ask_anew()
    work.start()
    return work.actions


def granted_after(spec: ElasticSpec, observed: JobSeen, actions: list[PlannedAction]) -> int:
    """Value of `JobSeen.granted` after these actions."""
    if observed.stage in (JobStage.NEW, JobStage.BROKEN):
        return spec.replica_count
    present = len({each.place for each in observed.replicas if each.counts})
    known = max(observed.granted, present, spec.replica_count)
    growth = sum(isinstance(each, StartReplica) and not each.replacement for each in actions)
    return min(known + growth, wanted_size(spec))


def next_look(spec: ElasticSpec, observed: JobSeen, now: Instant) -> Instant | None:
    """Time at which the plan may change by itself; None: only new observations can change it."""
    times = [observed.retry_at]
    if observed.changed_at is not None:
        times.append(observed.changed_at + spec.scale_up_snooze_time_in_seconds)
    for each in observed.replicas:
        times.extend(at for at in (each.safe_at, each.leave_by) if at is not None)
        if each.stage is ReplicaStage.STARTING or observed.stage is JobStage.NEW:
            times.append(each.since + spec.scaling_timeout_in_seconds)
        if each.stage is ReplicaStage.QUEUED:
            times.extend(bad.until for bad in observed.bad_nodes if bad.node in each.avoids)
    return min((at for at in times if at > now), default=None)


class _Work:
    """One call of `plan`: collects the actions."""

    def __init__(self, spec: ElasticSpec, observed: JobSeen, now: Instant) -> None:
        self._spec = spec
        self._seen = observed
        self._now = now
        self._blamed = [bad.node for bad in observed.bad_nodes if bad.until > now]
        for each in observed.replicas:
            if each.to_blame:
                self._blamed.extend(each.nodes)
        self._leaving: set[str] = set()
        """Replicas that do not count any more."""
        self._anew: list[ReplicaSeen] = []
        """Replicas that leave only to be requested again, and count as if they stayed."""
        self._freed: set[str] = set()
        """Replicas whose places can be filled at once: certainly none of their processes runs."""
        self.actions: list[PlannedAction] = []

    # --- replicas that leave -----------------------------------------------------------------------------------

    def release_gone(self) -> None:
        """Release replicas that have ended, are lost and fenced, or missed their leave deadline and are fenced."""
        for each in self._seen.replicas:
            if each.safe_at is None or each.safe_at > self._now:
                continue
            if each.stage is ReplicaStage.ENDED and self._seen.stage is JobStage.OVER and each.nodes:
                continue  # it holds no resources, and its output can still be read
            if each.stage in (ReplicaStage.LOST, ReplicaStage.ENDED):
                self._release(each, each.stage.value)
            elif each.stage is ReplicaStage.LEAVING:
                self._release(each, "it has not left in its time")

    def drain_all(self, reason: str) -> None:
        """Drain all replicas."""
        for each in self._present():
            self._drain(each, reason)

    def drain_doubles(self) -> None:
        """Keep the most advanced of several replicas at one place, and drain the others at once."""
        for place in sorted({each.place for each in self._present()}):
            first, *others = sorted((each for each in self._present() if each.place == place), key=_seniority)
            for each in others:
                self._drain(each, f"{first.name} has its place")

    def drain_surplus(self) -> None:
        """Drain replicas beyond the wanted size: those that wait first, then the highest places."""
        counted = self._present()
        wanted = wanted_size(self._spec)
        surplus = len(counted) - wanted
        if surplus <= 0:
            return
        elastic = [each for each in counted if each.place >= self._spec.replica_count]
        order = sorted(elastic, key=lambda each: (not each.waits, -each.place))
        running = sum(each.stage is ReplicaStage.RUNNING for each in counted)
        for each in order[:surplus]:
            if each.stage is ReplicaStage.RUNNING:
                if running <= wanted:
                    continue  # some of the gang do not run yet: the replicas that train take their part
                running -= 1
            self._drain(each, "fewer replicas are wanted")

    def give_up_stuck(self) -> None:
        """Release the machines of a replica that does not start in time; another is started on other machines.

        If replicas fail to start on two machines for the same reason (an image, say), only the first is avoided.
        """
        limit = self._spec.scaling_timeout_in_seconds
        for each in self._present():
            if each.stage is ReplicaStage.STARTING and self._now >= each.since + limit:  # computed as in `next_look`
                reason = f"it did not run within {limit:g} s" + (f": {each.says}" if each.says else "")
                again = any(bad.reason == reason and bad.until > self._now for bad in self._seen.bad_nodes)
                self._drain(each, reason, blame=() if each.says and again else each.nodes)

    def move_from_bad(self) -> None:
        """Move replicas off bad machines: one at a time, only above the gang's size, and never the coordinator's.

        No replica moves while another is starting: a wrong report about all machines costs one replica at most.
        """
        bad = {each.node: each for each in self._seen.bad_nodes if each.leave and each.until > self._now}
        here = [each for each in self._seen.replicas if each.stage is ReplicaStage.RUNNING]
        settled = len(here) == len(self._seen.replicas) and not self.actions and not self._snoozes()
        if not bad or not settled or self._seen.retry_at > self._now or len(here) <= self._spec.replica_count:
            return
        for each in sorted(here, key=lambda replica: -replica.place):
            reports = [bad[node] for node in each.nodes if node in bad]
            if reports and each.place > 0:
                self._drain(each, f"{reports[0].node} is bad: {reports[0].reason}")
                return

    def ask_anew(self) -> None:
        """Request a waiting replica again if it excludes a machine that is not bad any more.

        It leaves the queue first, and its place is filled afterwards: it may just have been given machines.
        """
        if self._seen.retry_at > self._now:
            return
        bad = set(self._blamed)
        for each in self._present():
            if each.stage is ReplicaStage.QUEUED and (good := sorted(set(each.avoids) - bad)):
                self._drain(each, f"it waits, and avoids {good[0]}, which is healthy again")
                self._anew.append(each)

    def give_up_gang(self) -> None:
        """Release the machines of a gang that got only some of them: another job may need them."""
        limit = self._spec.scaling_timeout_in_seconds
        gang = [each for each in self._present() if each.place < self._spec.replica_count]
        placed = [each.since for each in gang if each.stage is not ReplicaStage.QUEUED]
        whole = sum(each.stage is ReplicaStage.RUNNING for each in gang) >= self._spec.replica_count
        if placed and not whole and self._now >= min(placed) + limit:
            for each in gang:
                self._drain(each, f"the gang did not run as a whole within {limit:g} s")

    def _release(self, each: ReplicaSeen, reason: str) -> None:
        blame = each.nodes if each.to_blame else ()
        self._leaving.add(each.name)
        self._freed.add(each.name)
        self.actions.append(ReleaseReplica(each.name, reason, blame))

    def _drain(self, each: ReplicaSeen, reason: str, *, blame: tuple[str, ...] = ()) -> None:
        """Drain a replica. It keeps its place until it is seen to have left."""
        self._blamed.extend(blame)
        self._leaving.add(each.name)
        within = self._spec.graceful_shutdown_timeout_in_seconds if each.stage is ReplicaStage.RUNNING else 0.0
        self.actions.append(DrainReplica(each.name, within, reason, blame))

    # --- replicas that start -----------------------------------------------------------------------------------

    def start_gang(self) -> None:
        """Start the missing part of the gang, unless some of its replicas are leaving."""
        leaving = any(isinstance(each, DrainReplica) for each in self.actions)
        missing = tuple(place for place in self._free() if place < self._spec.replica_count)
        if missing and not leaving and self._seen.retry_at <= self._now:
            self.actions.append(StartGang(missing, self._avoid()))

    def start(self) -> None:
        """Start the missing part of the gang and of the granted size, and then one more increment."""
        if self._seen.retry_at > self._now:
            return
        present, wanted = [*self._present(), *self._anew], wanted_size(self._spec)
        granted = min(max(self._seen.granted, self._spec.replica_count), wanted)
        count = len(present)
        waiting = sum(each.waits and each.place >= self._spec.replica_count for each in present)
        there = count - waiting
        for place in self._free():
            replacement = True
            if place >= self._spec.replica_count:
                replacement = count < granted
                if count >= wanted or waiting >= self._most_waiting(there):
                    return
                if not replacement and (self._snoozes() or count >= self._increment(there)):
                    return
                waiting += 1
            self.actions.append(StartReplica(place, replacement, self._avoid()))
            count += 1

    def _most_waiting(self, there: int) -> int:
        """Most replicas that may wait: as many as the job allows, but at least as the smallest increment needs."""
        return max(self._spec.max_pending_replicas, next_size(self._spec, there) - there)

    def _increment(self, there: int) -> int:
        """Size at which this growth ends: the largest within the limit of waiting replicas, at least the next one."""
        end = next_size(self._spec, there)
        while (more := next_size(self._spec, end)) > end and more - there <= self._spec.max_pending_replicas:
            end = more
        return end

    def _snoozes(self) -> bool:
        """True if the replicas changed so recently that the job must not grow yet."""
        changed = self._seen.changed_at
        # Computed as in `next_look`: a difference would be rounded otherwise, and nobody would look again.
        return changed is not None and self._now < changed + self._spec.scale_up_snooze_time_in_seconds

    def _present(self) -> list[ReplicaSeen]:
        return [each for each in self._seen.replicas if each.counts and each.name not in self._leaving]

    def _free(self) -> list[int]:
        """Places without a replica: one that leaves or is lost holds its place until it is released."""
        held = {each.place for each in self._seen.replicas if each.name not in self._freed}
        return [place for place in range(self._spec.max_replica_count) if place not in held]

    def _avoid(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._blamed)))


def _seniority(each: ReplicaSeen) -> tuple[int, Instant, str]:
    order = {ReplicaStage.RUNNING: 0, ReplicaStage.STARTING: 1}
    return order.get(each.stage, 2), each.since, each.name
