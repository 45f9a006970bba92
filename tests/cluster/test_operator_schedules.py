"""Any order of events: never two for one place, never fewer than the gang by choice, no orphan; it comes to rest."""

import asyncio
from collections import Counter
from datetime import datetime

import pytest
from tests.cluster.fake_gang import GANGS
from tests.cluster.fake_nodes import kept_away
from tests.cluster.fake_store import Manifest
from tests.cluster.scheduled_cluster import FENCE, KEEPER, ScheduledCluster, runs
from tests.cluster.virtual_time import VirtualLoop, calls_while

from regrow_clusters.operator.objects import ATTEMPT_LABEL, JOB_LABEL, NODE_RANK, PLACE_LABEL, UID_LABEL

_MOST_CALLS = 6
"""A minute, for a job at which nothing happens."""
_IN_TEST = 12
_IN_MATRIX = 48
_IN_SOAK = 1000
_FOUND = (318, 1626, 20176, 30049, 40355, 7200228)
"""Seeds that have shown a defect."""
_GROUPS = 64


class Schedule(ScheduledCluster):
    """Its laws: at every moment, and when nothing happens any more."""

    async def event(self) -> None:
        """Something happens; the operators hear of it or not, and look at the job or not."""
        self.now += self.chance.choice([0.0, 0.1, 1.0, 10.0, 45.0])
        self.chance.choice(self.happenings())()
        self.losing, self.failing = (self.chance.random() < 0.3 for _ in range(2))
        parts = [self.nodes.turn, self.kubelets.turn, self.kueue.turn, self._collect]
        for part in self.chance.sample(parts, len(parts)):
            if self.chance.random() < 0.8:
                part()
        leader = self.operators[0]
        if self.chance.random() < 0.85:
            leader.hear(self.chance.choice([None, None, 1, 3]))
        await leader.look()
        if self.chance.random() < 0.1:  # a stale one that has not noticed that it does not lead
            before = self._groups()
            await self.operators[1].look()
            self.belated |= self._groups() - before
        self.check()

    def check(self) -> None:
        """Check the laws that hold at every moment."""
        alive = [each for each in self.kubelets.processes.values() if JOB_LABEL in each["metadata"]["labels"]]
        places = Counter(self._place(each) for each in alive)
        assert max(places.values(), default=0) <= 1, f"two for one place: {places}"
        known = [each for each in self.pods() if not self._is_gone(each)]
        places = Counter(self._place(each) for each in known)
        assert max(places.values(), default=0) <= 1, f"two pods for one place: {places}"
        assert all(place < self.high and index < self.each for _, place, index in places), "beyond the maximum"
        gangs = [
            (each["metadata"]["labels"][UID_LABEL], each["metadata"]["labels"][ATTEMPT_LABEL], each["metadata"])
            for each in known
        ]
        told = Counter((*gang, meta["annotations"][NODE_RANK]) for *gang, meta in gangs if _is_seated(meta))
        assert max(told.values(), default=0) <= 1, f"two pods are one node: {told}"

    def _is_gone(self, pod: Manifest) -> bool:
        """Nothing of it runs or will: a finalizer keeps the object."""
        meta = pod["metadata"]
        if "deletionTimestamp" in meta and not pod["spec"].get("nodeName"):
            return True
        if meta.get("deletionGracePeriodSeconds") == 0 and meta.get("finalizers"):
            asked = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
            return self.now >= asked + FENCE or pod["status"]["phase"] in ("Succeeded", "Failed")
        return pod["status"]["phase"] in ("Succeeded", "Failed")

    def _there(self) -> list[Manifest]:
        """Pods, without the objects of those that are gone and that a finalizer of somebody's keeps."""
        kept = [each for each in self.pods() if KEEPER in (each["metadata"].get("finalizers") or [])]
        gone = {each["metadata"]["name"] for each in kept if "deletionTimestamp" in each["metadata"]}
        return [each for each in self.pods() if each["metadata"]["name"] not in gone or not self._is_gone(each)]

    def _place(self, pod: Manifest) -> tuple[str, int, int]:
        labels, index = pod["metadata"]["labels"], pod["metadata"]["name"].rsplit("-", 1)[-1]
        return labels[UID_LABEL], int(labels[PLACE_LABEL]), int(index) if self.each > 1 else 0

    def _everybody_else(self) -> None:
        for part in (self.kueue.turn, self.nodes.turn, self.kubelets.turn, self._collect):
            part()

    def _mend_all(self) -> None:
        """There is room on one node alone, and in the queues as much as is wanted: for some seeds not one pod more."""
        self.losing = self.failing = self.forbidden = False
        self.kubelets.cut.clear()
        self.nodes.unfit.clear()
        self.nodes.nodes = {self._once_bad(): (self.high + 2) * self.each}
        for each in self.store.all_of("pods"):
            if JOB_LABEL not in (each["metadata"].get("labels") or {}):
                self.store.delete("pods", each["metadata"]["namespace"], each["metadata"]["name"], grace=0)

    async def rest(self, rounds: int = 400) -> None:
        """Nothing happens any more, and in the end all that is wanted runs."""
        self._mend_all()
        for _ in range(rounds):
            before = self.store.version
            self.kueue.quota = dict.fromkeys(self.kueue.quota, self._quota())
            self._everybody_else()
            self.operators[0].hear()
            await self.operators[0].look()
            self.check()
            if self.store.version == before:
                if self.settled():
                    self.check_groups()
                    return
                self.now += 35.0
        raise AssertionError(f"it does not come to rest: {self.store.all_of('trainingjobs')} {self.pods()}")

    def check_groups(self) -> None:
        """PodGroups are of the attempt that runs; a job that is suspended has none."""
        allowed = set[str]()
        for job in self.store.all_of("trainingjobs"):
            if not job["spec"].get("suspend") or job["status"].get("over"):
                name = f"job-{job['metadata']['uid'][:8]}-{job['status']['attempt']}"
                allowed |= {name, f"{name}-more"}
        left = self._groups() - allowed - self.belated
        assert left == set(), f"groups of what is over: {left}"

    def _groups(self) -> set[str]:
        found = [*self.store.all_of("podgroups"), *self.store.all_of(GANGS)]
        return {each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]}

    def _quota(self) -> int:
        if self.roomy:
            return (4 * self.high + 8) * self.each
        return max((self._wanted(each) for each in self.store.all_of("trainingjobs")), default=0)

    def _wanted(self, job: Manifest) -> int:
        return int((job.get("status") or {}).get("desiredReplicas", self.high)) * self.each

    def _once_bad(self) -> str:
        """A node against which something was known, the first of those that pods who wait are kept away from."""
        jobs = self.store.all_of("trainingjobs")
        avoided = {each["name"] for job in jobs for each in (job.get("status") or {}).get("badNodes", [])}
        by_pods = {node for pod in self.pods() if not pod["spec"].get("nodeName") for node in kept_away(pod)}
        return min(by_pods & self.nodes.nodes.keys() or avoided & self.nodes.nodes.keys() or self.nodes.nodes)

    def settled(self) -> bool:
        """All that is wanted runs, and holds quota, or the job is over and nothing trains."""
        there = self._there()
        running = [each for each in there if runs(each)]
        jobs = self.store.all_of("trainingjobs")
        if any(each["status"].get("over") for each in jobs):
            return not running and all(each["status"]["phase"] != "Pending" or self._is_gone(each) for each in there)
        wanted = sum(self._wanted(each) for each in jobs)
        held = sum(map(self.kueue.used, self.kueue.quota))
        lasting = sum(each["status"]["phase"] not in ("Succeeded", "Failed") for each in there)
        if held not in (0, wanted) and lasting == wanted:
            return (
                False  # a lost replica of the gang is yet to be replaced, after a pause, and has its quota until then
            )
        return len(running) == wanted == len(there)

    async def stay_at_rest(self, minutes: int = 5) -> None:
        """Wait until nobody is on a bad node any more; then little is asked, and little written."""
        quiet = 0
        for _ in range(600):
            before = self.store.version
            self.now += 5.0
            self._everybody_else()
            self.operators[0].hear()
            await self.operators[0].look()
            self.check()
            quiet = 0 if self.store.version > before else quiet + 1
            if quiet == 72:  # longer than any back-off
                break
        before = self.store.version
        calls = await calls_while(self.store, self._everybody_else, minutes=minutes)
        self.now += 60.0 * (minutes + 1)
        assert self.store.version - before <= 3, "it writes though no more than times have run out"
        assert calls <= _MOST_CALLS * minutes, f"a hot loop: {calls} calls in {minutes} minutes"

    async def end(self) -> None:
        """The script ends, with or without an error, and the containers beside it as they like."""
        if self.leader() is None:
            return  # the job is suspended, over, or deleted
        code = self.finish()
        self.operators[0].hear()
        await self.operators[0].look()
        (job,) = self.store.all_of("trainingjobs")
        assert job["status"]["phase"] == ("Failed" if code else "Succeeded"), f"it ended with {code}"

    async def vanish(self) -> None:
        """The job is deleted: nothing of it stays."""
        self._mend_all()
        self.let_go()
        for each in self.store.all_of("trainingjobs"):
            self.store.delete("trainingjobs", "team", each["metadata"]["name"])
        for _ in range(10):
            self._everybody_else()
            self.operators[0].hear()
            await self.operators[0].look()
            self.now += 1.0
        # Events belong to nobody: the API server forgets them after an hour.
        left = [key for key in self.store.objects if key[0] not in ("priorityclasses", "queues", "events")]
        assert left == [], f"orphans: {left}"
        assert self.kubelets.processes == {}

    async def lose_beside_pod_0(self) -> None:
        """Another pod of replica 0 goes, in each way that there is: pod 0 and its gang stay."""
        for lose in (self._delete, self._force, self._give_up, self._fail):
            before = self._replica_0()
            if self.leader() is None or 0 not in before or self.each == 1:
                return  # the job is suspended or over, or replica 0 has no other pod
            lost = self.chance.randint(1, self.each - 1)
            lose(before[lost])
            await self.rest()
            after = self._replica_0()
            assert {at for at in after if after[at]["metadata"]["uid"] != before[at]["metadata"]["uid"]} == {lost}
            attempts = {each["metadata"]["labels"][ATTEMPT_LABEL] for each in (*before.values(), *self._there())}
            assert len(attempts) == 1, "the gang has started anew"

    def _replica_0(self) -> dict[int, Manifest]:
        return {index: pod for pod in self._there() for _, place, index in [self._place(pod)] if place == 0}


def _is_seated(meta: Manifest) -> bool:
    return bool(meta["annotations"].get(NODE_RANK))


async def _play(seed: int, events: int) -> None:
    schedule = Schedule(seed)
    for _ in range(events):
        await schedule.event()
    if not schedule.abrupt:
        await schedule.rest()
        await schedule.stay_at_rest()
        await schedule.lose_beside_pod_0()
        await schedule.end()
    await schedule.vanish()


def _run(seed: int) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(_play(seed, events=40))


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(each, marks=[pytest.mark.full] * (each >= _IN_TEST)) for each in range(_IN_MATRIX)),
        *_FOUND,
    ],
)
def test_operators_keep_the_laws_through_any_events(seed: int) -> None:
    _run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("group", range(_GROUPS))
def test_operators_keep_the_laws_through_any_events_many_times(group: int) -> None:
    for seed in range(_IN_MATRIX + group, _IN_SOAK, _GROUPS):
        try:
            _run(seed)
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
