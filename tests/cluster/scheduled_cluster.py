"""One cluster with one job and two operators, and all that may happen in it."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.cluster.fake_kueue import FakeKueue
from tests.cluster.fake_nodes import SaidToRun
from tests.cluster.fake_store import Change, FakeStore, Manifest, Refused
from tests.cluster.fake_volcano import FakeVolcano
from tests.cluster.jobs import training_job
from tests.cluster.scheduled_operator import ScheduledOperator

from regrow_clusters.operator.api import ApiFailure, ApiKind
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.objects import JOB_LABEL, LEADER_LABEL, UID_LABEL

LEASE = 15.0
FENCE = 60.0
KEEPER = "example.com/keeper"
"""Somebody's finalizer."""


class ScheduledCluster:
    """As the seed says. `now`: seconds since the epoch."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1_800_000_000.0
        self.store = FakeStore(lambda: self.now, seed=seed)
        self.store.install(crd())
        self.store.listeners.append(self._note)
        self.losing = self.failing = self.forbidden = False
        self.belated = set[str]()
        """PodGroups that an operator has made again that had not heard that their attempt was over."""
        self.ended: dict[str, set[int]] = defaultdict(set)
        """By the jobs' uids: codes with which pod 0's script has ended by itself."""
        self.told: dict[str, str] = {}
        """By the jobs' uids: the outcome that was told last."""
        low = self.chance.randint(1, 3)
        self.low, self.high = low, low + self.chance.randint(0, 3)
        self.each = self.chance.choice([1, 1, 2, 3])
        """Pods of a replica."""
        self.kueue = FakeKueue(self.store, {"queue": 0, "queue2": 0}, {"high": 10, "low": 1})
        self.store.refuse = self._admit
        backend = self.chance.choice(["none", "kueue"])
        self.nodes = FakeVolcano(
            self.store, {f"n{n}": self.chance.randint(1, 2) for n in range(self.high * self.each + 2)}
        )
        self.kubelets = SaidToRun(self.store, lease=LEASE)
        self.operators = [self._operator(), self._operator()]
        for name, value in (("gang", 10), ("elastic", -100), ("other", 100)):
            body = {"metadata": {"name": name, "uid": name}, "value": value}
            self.store.objects[("priorityclasses", "", name)] = body
        more: dict[str, Any] = {}
        if backend == "kueue":
            more = {"backend": "kueue", "kueue": {"queueName": "queue", "priorityClass": "high"}}
        elif seed % 8 in (4, 5, 7):
            more = {"backend": "volcano" if seed % 16 < 8 else "gang"}
        self.beside = self.chance.choice(["", "", "a-log", "z-log"])
        """Another container of each pod."""
        self.injected = bool(self.beside) and seed % 2 == 0
        """It is put before the one that trains, by who admits the pod."""
        names = ["train", *([self.beside] if self.beside and not self.injected else [])]
        containers = [{"name": name, "image": "team/train:1"} for name in names]
        self.job = training_job(
            template={"spec": {"containers": containers}},
            fenceTimeoutInSeconds=FENCE,
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
            **more,
        )
        self.kueue.quota["queue"] = sum(self.nodes.nodes.values())
        self.store.create("trainingjobs", "team", self.job)
        self.others = 0
        self.roomy = self.chance.random() < 0.5
        """In the end there is more quota than is wanted."""
        self.abrupt = self.chance.random() < 0.25
        """It ends by its deletion, in the midst of everything."""

    def happenings(self) -> list[Callable[[], None]]:
        """All that may happen."""
        return [
            *(self._kill_pod, self._end_pod, self._cut, self._mend, self._scale, self._other, self._compact),
            *(self._restart, self._sicken, self._keep, self.let_go, self._edit, self._forbid, self._finish),
            self._make_again,
        ]

    def _operator(self) -> ScheduledOperator:
        made = ScheduledOperator(self.store, lambda: self.losing and self.chance.random() < 0.15, self._before)
        made.relist()
        return made

    def _before(self, verb: str, kind: ApiKind, namespace: str, name: str) -> None:
        """An answer that it is not done, or somebody who writes the same object just before."""
        if not self.failing:
            return
        if self.chance.random() < 0.15:
            code = self.chance.choice([0, 429, 500, 503, 504])
            raise ApiFailure(code, "", f"{verb} of {kind} {name}: it is not done")
        if verb == "update" and self.chance.random() < 0.2:
            with contextlib.suppress(Refused):
                note = {"example.com/note": str(self.store.version)}
                self.store.patch(kind, namespace, name, {"metadata": {"annotations": note}})

    def _admit(self, verb: str, plural: str, body: Manifest) -> Refused | None:
        if (verb, plural) != ("create", "pods"):
            return self.nodes.admit(verb, plural, body)
        if self.forbidden and JOB_LABEL in (body["metadata"].get("labels") or {}) and self.chance.random() < 0.5:
            return Refused(403, "Forbidden", f'pods "{body["metadata"]["name"]}" is forbidden: exceeded quota: team')
        if self.injected and JOB_LABEL in (body["metadata"].get("labels") or {}):
            body["spec"]["containers"].insert(0, {"name": self.beside, "image": "mesh/proxy:1"})
        self.kueue.admit_pod(body)
        return None

    def _note(self, change: Change) -> None:
        """Note how pod 0's script has ended, and hold what is said of the job against it."""
        meta, status = change.new["metadata"], change.new.get("status") or {}
        labels = meta.get("labels") or {}
        if change.plural == "pods" and labels.get(LEADER_LABEL) == "true" and "deletionTimestamp" not in meta:
            states = {each["name"]: each["state"] for each in status.get("containerStatuses", [])}
            if ended := states.get("train", {}).get("terminated"):
                self.ended[labels[UID_LABEL]].add(ended["exitCode"])
        if change.plural == "trainingjobs" and change.what != "DELETED":
            over, codes = status.get("over", ""), self.ended[meta["uid"]]
            assert over != "Succeeded" or 0 in codes, f"it is said to have succeeded: {codes}"
            assert over != "Failed" or codes & {1, 2}, f"it is said to have failed: {codes}"
            before, begun = self.told.get(meta["uid"], over), status.get("startedAttempt", 0) > 0
            assert before in (over, "", "Mended") or (before == "Failed" and not begun), (
                f"it was {before}, and is {over}"
            )
            complete = [each["status"] for each in status.get("conditions", []) if each["type"] == "Complete"]
            assert (complete == ["True"]) == (over == "Succeeded"), f"{over}: {complete}"
            self.told[meta["uid"]] = over

    def pods(self) -> list[Manifest]:
        """Those of jobs."""
        return [each for each in self.store.all_of("pods") if JOB_LABEL in (each["metadata"].get("labels") or {})]

    def leader(self) -> Manifest | None:
        """Pod 0 of the newest gang, if its script runs."""
        found = [
            each
            for each in self.pods()
            if each["metadata"]["labels"].get(LEADER_LABEL) == "true"
            and "deletionTimestamp" not in each["metadata"]
            and runs(each)
        ]
        return found[-1] if found else None

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
            kept = [*(pod["metadata"].get("finalizers") or []), KEEPER]
            self.store.patch("pods", "team", pod["metadata"]["name"], {"metadata": {"finalizers": kept}})

    def let_go(self) -> None:
        """Nobody's finalizer is on a pod any more."""
        for pod in self.pods():
            kept = pod["metadata"].get("finalizers") or []
            if KEEPER in kept:
                rest = [each for each in kept if each != KEEPER]
                self.store.patch("pods", "team", pod["metadata"]["name"], {"metadata": {"finalizers": rest}})

    def _edit(self) -> None:
        """Sizes, a flag, the port: what a running gang can follow, and what it cannot."""
        low = self.chance.randint(1, self.high)
        edit: dict[str, Any] = self.chance.choice(
            [
                {"replicaCount": low, "maxReplicaCount": self.chance.randint(low, self.high)},
                {"maxReplicaCount": self.high},
                {"port": self.chance.randint(29000, 29009)},
                {"ranksPerPod": self.chance.randint(1, 2)},
                {"kueue": {"queueName": self.chance.choice(["queue", "queue2"]), "priorityClass": "high"}},
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
        for queue in self.kueue.quota:
            self.kueue.quota[queue] = self.chance.randint(0, 2 * self.high * self.each)
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
            bad = {
                "name": pod["spec"]["nodeName"],
                "untilTime": self.store.stamp(self.now + 300.0),
                "reason": "xid 79",
                "quarantined": True,
            }
            kept = [*(each.get("status") or {}).get("badNodes", []), bad]
            where = ("trainingjobs", "team", each["metadata"]["name"])
            self.store.patch(*where, {"status": {"badNodes": kept}}, part="status")

    def _compact(self) -> None:
        self.store.compact()

    def _restart(self) -> None:
        """The operator is killed; the other one leads, and has listed everything."""
        self.operators = [self._operator(), self.operators[0]]

    def _forbid(self) -> None:
        """A quota of the namespace refuses some of the pods, or does not any more."""
        self.forbidden = not self.forbidden

    def _finish(self) -> None:
        """The script ends, with or without an error; seldom, for then the job is over."""
        leader = self.leader()
        if leader is None or leader["spec"]["nodeName"] in self.kubelets.cut or self.chance.random() < 0.8:
            return
        self.finish()

    def finish(self) -> int:
        """The script ends; its code."""
        leader = self.leader()
        assert leader is not None
        code = self.chance.choice([0, 1, 2])
        self.kubelets.end_container(leader, "train", code)
        if self.beside and self.chance.random() < 0.7:
            at = self.store.get("pods", "team", leader["metadata"]["name"])
            self.kubelets.end_container(at, self.beside, self.chance.choice([0, 3]))
        return code

    def _collect(self) -> None:
        """The garbage collector's turn."""
        self.store.collect()

    def _make_again(self) -> None:
        """The job is deleted; another one of its name is made at once, or later."""
        jobs = self.store.all_of("trainingjobs")
        if jobs and self.chance.random() < 0.3:
            self.store.delete("trainingjobs", "team", "job")
        if (not jobs or self.chance.random() < 0.5) and ("trainingjobs", "team", "job") not in self.store.objects:
            self.store.create("trainingjobs", "team", self.job)


def runs(pod: Manifest) -> bool:
    """Its script has begun and not ended."""
    states = {each["name"]: each["state"] for each in pod["status"].get("containerStatuses", [])}
    return pod["status"]["phase"] == "Running" and "running" in states.get("train", {})
