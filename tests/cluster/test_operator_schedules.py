"""Any order of events: never two for one place, never fewer than the gang by choice, no orphan; it comes to rest."""

import asyncio
import contextlib
import random
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from tests.cluster.fake_kueue import FakeKueue
from tests.cluster.fake_nodes import FakeScheduler, SaidToRun, kept_away
from tests.cluster.fake_store import FakeStore, Manifest, Refused
from tests.cluster.jobs import training_job
from tests.cluster.scheduled_operator import ScheduledOperator

from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.objects import ATTEMPT_LABEL, JOB_LABEL, NODE_RANK, PLACE_LABEL, UID_LABEL

_LEASE = 15.0
_FENCE = 60.0
_KEEPER = "example.com/keeper"
"""Somebody's finalizer."""
_MOST_CALLS = 6
"""A minute, for a job at which nothing happens."""
_IN_TEST = 12
_IN_MATRIX = 48
_IN_SOAK = 1000
_GROUPS = 64


class Schedule:
    """One cluster with one job, two operators, and whatever the seed brings."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1_800_000_000.0
        self.store = FakeStore(lambda: self.now, seed=seed)
        self.store.install(crd())
        self.losing = False
        low = self.chance.randint(1, 3)
        self.low, self.high = low, low + self.chance.randint(0, 3)
        self.each = self.chance.choice([1, 1, 2, 3])
        """Pods of a replica."""
        self.kueue = FakeKueue(self.store, {"queue": 0}, {"high": 10, "low": 1})
        backend = self.chance.choice(["none", "none", "kueue"])
        self.nodes = FakeScheduler(
            self.store, {f"n{n}": self.chance.randint(1, 2) for n in range(self.high * self.each + 2)}
        )
        self.kubelets = SaidToRun(self.store, lease=_LEASE)
        self.operators = [self._operator(), self._operator()]
        for name, value in (("gang", 10), ("elastic", -100), ("other", 100)):
            body = {"metadata": {"name": name, "uid": name}, "value": value}
            self.store.objects[("priorityclasses", "", name)] = body
        more: dict[str, Any] = {"backend": "kueue", "kueue": {"queueName": "queue", "priorityClass": "high"}}
        self.beside = self.chance.choice(["", "", "a-log", "z-log"])
        """Another container of each pod."""
        names = ["train", *([self.beside] if self.beside else [])]
        containers = [{"name": name, "image": "team/train:1"} for name in names]
        job = training_job(
            template={"spec": {"containers": containers}},
            fenceTimeoutInSeconds=_FENCE,
            replicaCount=low,
            maxReplicaCount=self.high,
            podsPerReplica=self.each,
            maxPendingReplicas=self.chance.randint(1, 2),
            scaleUpSnoozeTimeInSeconds=self.chance.choice([0, 30]),
            gracefulShutdownTimeoutInSeconds=5,
            priorityClassName="gang",
            elasticPriorityClassName="elastic",
            maxRestarts=1000,
            topologyLabels=["example.com/rack"] if seed % 3 == 0 else [],
            **(more if backend == "kueue" else {}),
        )
        self.kueue.quota["queue"] = sum(self.nodes.nodes.values())
        self.store.create("trainingjobs", "team", job)
        self.others = 0

    def _operator(self) -> ScheduledOperator:
        made = ScheduledOperator(self.store, lambda: self.losing and self.chance.random() < 0.15)
        made.relist()
        return made

    def pods(self) -> list[Manifest]:
        return [each for each in self.store.all_of("pods") if JOB_LABEL in (each["metadata"].get("labels") or {})]

    async def event(self) -> None:
        """Something happens; the operators hear of it or not, and look at the job or not."""
        self.now += self.chance.choice([0.0, 0.1, 1.0, 10.0, 45.0])
        happening = self.chance.choice(
            [
                self._kill_pod,
                self._end_pod,
                self._cut,
                self._mend,
                self._scale,
                self._other,
                self._compact,
                self._restart,
                self._sicken,
                self._keep,
                self._let_go,
                self._edit,
            ]
        )
        happening()
        self.losing = self.chance.random() < 0.3
        for part in self.chance.sample([self.nodes.turn, self.kubelets.turn, self.kueue.turn], 3):
            if self.chance.random() < 0.8:
                part()
        leader = self.operators[0]
        if self.chance.random() < 0.85:
            leader.hear(self.chance.choice([None, None, 1, 3]))
        await leader.look()
        if self.chance.random() < 0.1:  # a stale one that has not noticed that it does not lead
            await self.operators[1].look()
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
        notes = [(each["metadata"]["labels"][ATTEMPT_LABEL], each["metadata"]["annotations"]) for each in known]
        told = Counter((attempt, said[NODE_RANK]) for attempt, said in notes if said.get(NODE_RANK))
        assert max(told.values(), default=0) <= 1, f"two pods are one node: {told}"

    def _is_gone(self, pod: Manifest) -> bool:
        """Nothing of it runs or will: a finalizer keeps the object."""
        meta = pod["metadata"]
        if "deletionTimestamp" in meta and not pod["spec"].get("nodeName"):
            return True
        if meta.get("deletionGracePeriodSeconds") == 0 and meta.get("finalizers"):
            asked = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
            return self.now >= asked + _FENCE or pod["status"]["phase"] in ("Succeeded", "Failed")
        return pod["status"]["phase"] in ("Succeeded", "Failed")

    def _there(self) -> list[Manifest]:
        """Pods, without the objects of those that are gone and that a finalizer of somebody's keeps."""
        kept = [each for each in self.pods() if _KEEPER in (each["metadata"].get("finalizers") or [])]
        gone = {each["metadata"]["name"] for each in kept if "deletionTimestamp" in each["metadata"]}
        return [each for each in self.pods() if each["metadata"]["name"] not in gone or not self._is_gone(each)]

    def _place(self, pod: Manifest) -> tuple[str, int, int]:
        labels, index = pod["metadata"]["labels"], pod["metadata"]["name"].rsplit("-", 1)[-1]
        return labels[UID_LABEL], int(labels[PLACE_LABEL]), int(index) if self.each > 1 else 0

    async def rest(self, rounds: int = 400) -> None:
        """Nothing happens any more, and there is room on one node alone; in the end all that is wanted runs there."""
        self.losing = False
        self.kubelets.cut.clear()
        self.nodes.unfit.clear()
        self.nodes.nodes = {self._once_bad(): (self.high + 2) * self.each}
        self.kueue.quota["queue"] = (4 * self.high + 8) * self.each
        for each in self.store.all_of("pods"):
            if JOB_LABEL not in (each["metadata"].get("labels") or {}):
                self.store.delete("pods", each["metadata"]["namespace"], each["metadata"]["name"], grace=0)
        for _ in range(rounds):
            before = self.store.version
            for part in (self.kueue.turn, self.nodes.turn, self.kubelets.turn, self.operators[0].hear):
                part()
            await self.operators[0].look()
            self.store.collect()
            self.check()
            if self.store.version == before:
                if self.settled():
                    return
                self.now += 35.0
        raise AssertionError(f"it does not come to rest: {self.store.all_of('trainingjobs')} {self.pods()}")

    def _once_bad(self) -> str:
        """A node against which something was known, the first of those that pods who wait are kept away from."""
        jobs = self.store.all_of("trainingjobs")
        avoided = {each["name"] for job in jobs for each in (job.get("status") or {}).get("avoidedNodes", [])}
        by_pods = {node for pod in self.pods() if not pod["spec"].get("nodeName") for node in kept_away(pod)}
        return min(by_pods & self.nodes.nodes.keys() or avoided & self.nodes.nodes.keys() or self.nodes.nodes)

    def settled(self) -> bool:
        jobs = self.store.all_of("trainingjobs")
        running = [each for each in self._there() if each["status"]["phase"] == "Running"]
        wanted = sum(each["status"]["desiredReplicas"] for each in jobs)
        return bool(len(running) == wanted * self.each == len(self._there()))

    async def stay_at_rest(self, minutes: int = 5) -> None:
        """Whoever is on a bad node has moved, one after the other; then little is asked, and little written."""
        quiet = 0
        for _ in range(600):
            before = self.store.version
            await self._five_seconds()
            quiet = 0 if self.store.version > before else quiet + 1
            if quiet == 72:  # longer than any back-off
                break
        before, calls = self.store.version, self.operators[0].api.calls
        for _ in range(12 * minutes):
            await self._five_seconds()
        assert self.store.version - before <= 3, "it writes though no more than times have run out"
        assert self.operators[0].api.calls - calls <= _MOST_CALLS * minutes, "a hot loop"

    async def _five_seconds(self) -> None:
        self.now += 5.0
        for part in (self.kueue.turn, self.nodes.turn, self.kubelets.turn, self.operators[0].hear):
            part()
        await self.operators[0].look()
        self.check()

    async def end(self) -> None:
        """The script ends, with or without an error, and the containers beside it as they like."""
        leader = next((pod for index, pod in self._replica_0().items() if index == 0), None)
        if leader is None:
            return  # the job is suspended
        code = self.chance.choice([0, 1, 2])
        self.kubelets.end_container(leader, "train", code)
        if self.beside and self.chance.random() < 0.7:
            at = self.store.get("pods", "team", leader["metadata"]["name"])
            self.kubelets.end_container(at, self.beside, self.chance.choice([0, 3]))
        self.operators[0].hear()
        await self.operators[0].look()
        (job,) = self.store.all_of("trainingjobs")
        assert job["status"]["phase"] == ("Failed" if code else "Succeeded"), f"it ended with {code}"

    async def lose_beside_pod_0(self) -> None:
        """Another pod of replica 0 goes, in each way that there is: pod 0 and its gang stay."""
        for lose in (self._delete, self._force, self._give_up, self._fail):
            before = self._replica_0()
            if 0 not in before or self.each == 1:
                return  # the job is suspended, or replica 0 has no other pod
            lost = self.chance.randint(1, self.each - 1)
            lose(before[lost])
            await self.rest()
            after = self._replica_0()
            assert {at for at in after if after[at]["metadata"]["uid"] != before[at]["metadata"]["uid"]} == {lost}
            attempts = {each["metadata"]["labels"][ATTEMPT_LABEL] for each in (*before.values(), *self._there())}
            assert len(attempts) == 1, "the gang has started anew"

    def _replica_0(self) -> dict[int, Manifest]:
        return {index: pod for pod in self._there() for _, place, index in [self._place(pod)] if place == 0}

    # --- events ------------------------------------------------------------------------------------------------

    def _some(self, phase: str | None = None) -> Manifest | None:
        found = [each for each in self.pods() if phase in (None, each["status"]["phase"])]
        return self.chance.choice(found) if found else None

    def _kill_pod(self) -> None:
        if pod := self._some():
            self.store.delete("pods", "team", pod["metadata"]["name"])

    def _delete(self, pod: Manifest) -> None:
        self.store.delete("pods", "team", pod["metadata"]["name"])

    def _force(self, pod: Manifest) -> None:
        self.store.delete("pods", "team", pod["metadata"]["name"], grace=0)

    def _give_up(self, pod: Manifest) -> None:
        self.kubelets.end(pod, 75)

    def _fail(self, pod: Manifest) -> None:
        self.kubelets.end(pod, 137)

    def _end_pod(self) -> None:
        pod = self._some("Running")
        if pod is not None and pod["spec"]["nodeName"] not in self.kubelets.cut:
            code = self.chance.choice([75, 137])
            if self.beside and self.chance.random() < 0.5:
                self.kubelets.end_container(pod, "train", code)
            else:
                self.kubelets.end(pod, code)

    def _keep(self) -> None:
        """Somebody's finalizer is on a pod: it stays when it has ended."""
        pod = self._some()
        if pod is not None and "deletionTimestamp" not in pod["metadata"]:
            kept = [*(pod["metadata"].get("finalizers") or []), _KEEPER]
            self.store.patch("pods", "team", pod["metadata"]["name"], {"metadata": {"finalizers": kept}})

    def _let_go(self) -> None:
        for pod in self.pods():
            kept = pod["metadata"].get("finalizers") or []
            if _KEEPER in kept:
                rest = [each for each in kept if each != _KEEPER]
                self.store.patch("pods", "team", pod["metadata"]["name"], {"metadata": {"finalizers": rest}})

    def _edit(self) -> None:
        """Sizes, a flag, the port: what a running gang can follow, and what it cannot."""
        low = self.chance.randint(1, self.high)
        edit: dict[str, Any] = self.chance.choice(
            [
                {"replicaCount": low, "maxReplicaCount": self.chance.randint(low, self.high)},
                {"maxReplicaCount": self.high},
                {"port": self.chance.randint(29000, 29009)},
                {"runFlags": ["--quiet"]},
            ]
        )
        for each in self.store.all_of("trainingjobs"):
            if edit.get("maxReplicaCount", self.high) >= edit.get("replicaCount", each["spec"]["replicaCount"]):
                self.store.patch("trainingjobs", "team", each["metadata"]["name"], {"spec": edit})

    def _cut(self) -> None:
        node = self.chance.choice(sorted(self.nodes.nodes))
        self.kubelets.cut.setdefault(node, self.now)
        self.nodes.unfit.add(node)

    def _mend(self) -> None:
        for node in list(self.kubelets.cut)[:1]:
            del self.kubelets.cut[node]
            self.nodes.unfit.discard(node)

    def _scale(self) -> None:
        field, value = self.chance.choice(
            [
                ("replicas", self.chance.randint(self.low, self.high)),
                ("replicas", 1),
                ("suspend", self.chance.random() < 0.2),
            ]
        )
        for each in self.store.all_of("trainingjobs"):
            self.store.patch("trainingjobs", "team", each["metadata"]["name"], {"spec": {field: value}})

    def _other(self) -> None:
        """Work of higher priority comes or goes, and quota with it."""
        self.kueue.quota["queue"] = self.chance.randint(0, 2 * self.high)
        if self.others and self.chance.random() < 0.5:
            with contextlib.suppress(Refused):
                self.store.delete("pods", "team", f"other{self.others}", grace=0)
        self.others += 1
        spec = {"containers": [{"name": "x", "image": "x"}], "priorityClassName": "other"}
        self.store.create("pods", "team", {"metadata": {"name": f"other{self.others}", "labels": {}}, "spec": spec})

    def _sicken(self) -> None:
        """A node fails the job's examinations for the second time."""
        if (pod := self._some("Running")) is None:
            return
        for each in self.store.all_of("trainingjobs"):
            bad = {"name": pod["spec"]["nodeName"], "until": self.now + 300.0, "reason": "xid 79", "quarantined": True}
            kept = [*(each.get("status") or {}).get("avoidedNodes", []), bad]
            where = ("trainingjobs", "team", each["metadata"]["name"])
            self.store.patch(*where, {"status": {"avoidedNodes": kept}}, part="status")

    def _compact(self) -> None:
        self.store.compact()

    def _restart(self) -> None:
        """The operator is killed; the other one leads, and has listed everything."""
        self.operators = [self._operator(), self.operators[0]]


async def _play(seed: int, events: int) -> None:
    schedule = Schedule(seed)
    schedule.store.refuse = lambda verb, plural, body: (
        schedule.kueue.admit_pod(body) if verb == "create" and plural == "pods" else None
    )
    for _ in range(events):
        await schedule.event()
    await schedule.rest()
    assert schedule.settled()
    await schedule.stay_at_rest()
    await schedule.lose_beside_pod_0()
    await schedule.end()
    schedule._let_go()
    for each in schedule.store.all_of("trainingjobs"):
        schedule.store.delete("trainingjobs", "team", each["metadata"]["name"])
    for _ in range(5):
        schedule.store.collect()
        schedule.kubelets.turn()
        schedule.kueue.turn()
        schedule.operators[0].hear()
        await schedule.operators[0].look()
    # Events belong to nobody: the API server forgets them after an hour.
    left = [key for key in schedule.store.objects if key[0] not in ("priorityclasses", "events")]
    assert left == [], f"orphans: {left}"
    assert schedule.kubelets.processes == {}


@pytest.mark.parametrize(
    "seed", [pytest.param(each, marks=[pytest.mark.full] * (each >= _IN_TEST)) for each in range(_IN_MATRIX)]
)
def test_operators_keep_the_laws_through_any_events(seed: int) -> None:
    asyncio.run(_play(seed, events=40))


@pytest.mark.soak
@pytest.mark.parametrize("group", range(_GROUPS))
def test_operators_keep_the_laws_through_any_events_many_times(group: int) -> None:
    for seed in range(_IN_MATRIX + group, _IN_SOAK, _GROUPS):
        try:
            asyncio.run(_play(seed, events=40))
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong
