"""Cost of the Kubernetes operator: full resync of many jobs, reaction to a lost pod, check of the nodes, memory.

    python benchmarks/operator_cost.py --json out.json        # 200 jobs of 50 pods
    python benchmarks/operator_cost.py --quick
    python benchmarks/operator_cost.py --capacity --json out.json

The API server is the test bed's, in another process; the operator's time is its own CPU time. `nodes_s` is a check of
all nodes, which happens every 30 s. `rss_mib` is the process's peak memory, the test bed's modules included.

`--capacity` measures one job of small steps on a bed with real processes: other work occupies the place of its second
replica and is then removed. `capacity_whole_s` is the time from then to the first step of two replicas, `own_start_s`
that of the same script in plain Python to the end of its first step, while the other replica trains, `capacity_s` the
difference. Each is the median of the rounds.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightkube import KubeConfig
from own_start import beyond, own_start
from targets import tell, warn_if_busy
from tests.cluster.bed import bed
from tests.cluster.fake_api import FakeApi, serve
from tests.cluster.fake_kubelet import kubeconfig
from tests.cluster.fake_store import FakeStore
from tests.cluster.jobs import training_job
from tests.cluster.trained import TrainedJob, micro_job

from regrow_clusters.cluster.node_health import read_table
from regrow_clusters.operator.api import ApiKind
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.crd import crd
from regrow_clusters.operator.lightkube_api import LightkubeApi
from regrow_clusters.operator.observed.node_watch import NodeWatch

NODES = 1000
KEY = b"0123456789abcdef0123456789abcdef"


def _serve(pipe: Connection, jobs: int, pods: int) -> None:
    """Run the cluster: pods run as soon as they are created; each message on the pipe makes one fail."""
    store = FakeStore(time.time)
    store.install(crd())

    def run(change: object) -> None:
        plural, what, new = (getattr(change, name) for name in ("plural", "what", "new"))
        if plural == "pods" and what == "ADDED":
            found = store.objects[("pods", new["metadata"]["namespace"], new["metadata"]["name"])]
            found["spec"]["nodeName"] = "n1"
            state = [{"state": {"running": {"startedAt": store.stamp()}}}]
            found["status"] = {"phase": "Running", "containerStatuses": state}

    for number in range(NODES):
        store.create("nodes", "", _node(f"n{number}"))
    store.listeners.append(run)
    for number in range(jobs):
        store.create("trainingjobs", "team", training_job(f"job{number}", replicaCount=pods, maxReplicaCount=pods))

    async def live() -> None:
        async with serve(FakeApi(store)) as address:
            pipe.send(address)
            while True:
                word = await asyncio.to_thread(pipe.recv)
                if word == "end":
                    return
                if word == "count":
                    pipe.send(len(store.all_of("pods")))
                    continue
                lost = next(name for plural, _, name in sorted(store.objects) if plural == "pods" and "-7-" in name)
                made: list[float] = []
                store.listeners.append(
                    lambda change: made.append(time.monotonic()) if change.what == "ADDED" else None  # noqa: B023
                )
                began = time.monotonic()
                store.delete("pods", "team", lost, grace=0)
                while not made:
                    await asyncio.sleep(0.001)
                store.listeners.pop()
                pipe.send(made[0] - began)

    asyncio.run(live())


async def _measure(pipe: Connection, address: str, jobs: int, pods: int) -> dict[str, float]:
    async with LightkubeApi(KubeConfig.from_dict(json.loads(kubeconfig(address))).get()) as api:
        controller = Controller(api, KEY, resync_every=1e6)
        running = asyncio.create_task(controller.run())
        while True:
            await asyncio.sleep(0.5)
            pipe.send("count")
            if await asyncio.to_thread(pipe.recv) == jobs * pods:
                break
        await asyncio.sleep(3.0)  # the last statuses are written
        reactions = []
        for _ in range(10):
            pipe.send("lose")
            reactions.append(await asyncio.to_thread(pipe.recv))
        running.cancel()
        await asyncio.wait({running})
        began = time.process_time()
        for kind in (ApiKind.JOBS, ApiKind.PODS):
            items, _ = await api.list(kind)
            controller.cache.replace(kind, items)
            del items
        for key in controller.cache.jobs():
            await controller.reconcile(key)
        resync = time.process_time() - began
        watch = NodeWatch(api, read_table(), mark=False)
        began = time.process_time()
        await watch.turn({}, time.time())
        nodes = time.process_time() - began
        assert len(watch.verdicts) == NODES // 100, len(watch.verdicts)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "resync_s": resync,
        "reaction_s": sorted(reactions)[len(reactions) // 2],
        "nodes_s": nodes,
        "rss_mib": rss,
    }


async def _measure_capacity(folder: Path, rounds: int) -> dict[str, float]:
    """Measure the time until a waiting replica has a place, runs, and trains with the others."""
    chat = {"name": "chat", "image": "chat", "command": ["http.server", "0", "--bind=127.0.0.1"]}
    spec = {"priorityClassName": "chat", "containers": [chat]}
    whole, own = [], []
    async with bed(folder, {"n1": 2}, real=True) as cluster:
        for name, value in (("train", 1000), ("chat", 100), ("rest", -100)):
            body = {"metadata": {"name": name, "uid": name}, "value": value}
            cluster.store.objects[("priorityclasses", "", name)] = body
        job = TrainedJob(cluster, folder)
        classes = {"priorityClassName": "train", "elasticPriorityClassName": "rest"}
        wanted = micro_job(steps=10_000, pace=0.05, replicaCount=1, maxReplicaCount=2, **classes)
        cluster.store.create("trainingjobs", "team", wanted)
        async with cluster.operator():
            await job.until_world(2)
            for number in range(rounds):
                name = f"chat{number}"
                cluster.store.create("pods", "team", {"metadata": {"name": name, "labels": {}}, "spec": spec})
                await job.until_world(1)
                await cluster.until(lambda: len(cluster.pods("Pending")) == 1, "a replica waits")
                own.append(await asyncio.to_thread(own_start, folder))
                cluster.store.delete("pods", "team", name, grace=0)
                whole.append(await job.until_world(2))
    return beyond("capacity", whole, own)


def _node(name: str) -> dict[str, Any]:
    """A node object as large as in a cloud: 40 images, 30 labels, 8 conditions; every hundredth has an Xid."""
    kinds = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "KernelDeadlock", "ReadonlyFilesystem")
    conditions = [
        {"type": each, "status": "True" if each == "Ready" else "False", "message": "m" * 80} for each in kinds
    ]
    sick = "True" if int(name[1:]) % 100 == 7 else "False"
    conditions += [{"type": "SysLogsXIDError", "status": sick}, {"type": "GpuMemWatch", "status": "False"}]
    images = [
        {"names": [f"registry.example/team/image{number}@sha256:{'0' * 64}"], "sizeBytes": 1} for number in range(40)
    ]
    labels = {f"example.com/label{number}": f"value{number}" for number in range(30)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"conditions": conditions, "images": images},
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="20 jobs of 10 pods; of --capacity, one round")
    parser.add_argument(
        "--capacity", action="store_true", help="instead: how soon capacity that falls free is trained on"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    if args.capacity:
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(_measure_capacity(Path(folder), 1 if args.quick else 5))
    else:
        figures = _cost(*((20, 10) if args.quick else (args.jobs, args.pods)))
    print(", ".join(f"{name}: {value:.3g}" for name, value in figures.items()))
    tell("operator", figures, args.json)


def _cost(jobs: int, pods: int) -> dict[str, float]:
    here, there = multiprocessing.Pipe()
    cluster = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, jobs, pods), daemon=True)
    cluster.start()
    figures = asyncio.run(_measure(here, here.recv(), jobs, pods))
    here.send("end")
    cluster.join(10)
    return figures | {"jobs": jobs, "pods": pods}


if __name__ == "__main__":
    main()
