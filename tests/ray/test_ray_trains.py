"""A training on a local cluster of Ray: machines are killed, added, drained; no step is lost and no bit changes."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.elastic import HURRY, final, fixed_run, losses
from tests.process.training import SCRIPTS, redone

from regrow.observe.ledger import Ledger, read_records
from regrow_guests.ray import NodeNews, RayJob, train

ray = pytest.importorskip("ray", reason="make test-ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
STEPS = 600
PATIENCE = 300.0
NOTICE = 60.0
"""Of a machine that is drained."""
_STORE = 80 * 2**20


class RayTraining:
    """A job whose driver is a thread of this process. `folder`: where it runs, and has its records."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.folder = folder
        self.news: list[NodeNews] = []
        self.error: BaseException | None = None
        words = [str(SCRIPTS / "train_micro.py"), "--steps", str(STEPS), "--pace", "0.6", "--invariant"]
        self.job = RayJob(
            words=("--data-cache=off", *words, "--out", "job.out"),
            folder=str(folder),
            home=str(folder / "homes"),
            grace=20.0,
            **job,
        )
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self) -> None:
        try:
            train(self.job, self.news.append)
        except BaseException as error:  # noqa: BLE001  # the test says it
            self.error = error

    def ledger(self) -> Ledger:
        """Records of all nodes."""
        records = [each for path in (self.folder / "homes").glob("*/jobs/ray") for each in read_records(path)]
        return Ledger(sorted(records, key=lambda record: record.at))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for it."""
        began = time.monotonic()
        while not holds():
            assert self.error is None, self.error
            assert time.monotonic() - began < PATIENCE, (what, self.news, self.ledger().incidents)
            time.sleep(0.05)

    def until_world(self, ranks: int) -> None:
        """Wait until this number of ranks train, a step further."""
        before = max(self.ledger().commits, default=-1)

        def trains() -> bool:
            told = self.ledger()
            if not told.generations or len(told.generations[-1].workers) != ranks:
                return False
            return max((step for step, done in told.commits.items() if len(done) == ranks), default=-1) > before

        self.until(trains, f"{ranks} ranks train")

    def machine(self, node: str) -> str:
        """Ray's id of the machine that a node is on."""
        return next(each.machine for each in reversed(self.news) if (each.node, each.what) == (node, "starts"))

    def beyond_the_gang(self) -> str:
        """Ray's id of the machine by which the job has grown last."""
        return [each.machine for each in self.news if each.what == "starts" and each.node.startswith("ray-")][-1]

    def power_off(self, cluster: Any, machine: Any) -> None:
        """All that runs on a machine ends at once: the job's node, and what Ray has there."""
        (node,) = {each.node for each in self.news if each.machine == machine.node_id}
        mark = os.fsencode(f"REGROW_HOME={self.folder / 'homes' / node}.")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in [pid for pid in psutil.pids() if mark in environ_of(pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        cluster.remove_node(machine, allow_graceful=False)

    def finish(self, ranks: int) -> Ledger:
        """Let it go, and hold it to an undisturbed run."""
        (self.folder / HURRY).touch()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive() and self.error is None, self.error
        alone = self.folder / "alone"
        alone.mkdir()
        fixed = fixed_run(alone, STEPS)
        finals = [final(self.folder / f"job.{rank}.json") for rank in range(ranks)]
        assert finals == [{"digest": fixed["digest"], "parameters": fixed["parameters"]}] * ranks
        told = self.ledger()
        assert losses(told) == fixed["losses"]
        assert redone(told) == [] and told.open_incidents == {}
        assert [each.steps_lost for each in told.incidents] == [0] * len(told.incidents)
        marks = os.fsencode(f"REGROW_HOME={self.folder / 'homes'}/")
        self.until(lambda: not any(marks in environ_of(pid) for pid in psutil.pids()), "its processes have ended")
        return told


def environ_of(pid: int) -> bytes:
    """Environment of a process; nothing: it has gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for nodes of a job, in a process of its own, as a local cluster."""
    found = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": _STORE, "include_dashboard": False}
    )
    try:
        ray.init(address=found.address, logging_level="error")
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def test_a_killed_machine_an_added_one_and_a_drained_one_cost_no_step_and_no_bit(cluster: Any, tmp_path: Path) -> None:
    machines = [cluster.add_node(num_cpus=1, object_store_memory=_STORE) for _ in range(3)]
    by_id = {each.node_id: each for each in machines}
    training = RayTraining(tmp_path, nodes=2, max_nodes=3)
    training.until_world(3)
    training.power_off(cluster, by_id[training.machine("node1")])
    training.until_world(2)
    added = cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    training.until_world(3)
    assert training.machine("node1") == added.node_id, "the lost node comes back on the machine that was added"
    deadline = time.time() + NOTICE
    drain(added.node_id, deadline)
    training.until(lambda: any(each.what == "leaving" for each in training.news), "it leaves")
    training.until_world(2)
    assert time.time() < deadline, "nobody trains on the machine when it goes"
    told = training.finish(2)
    assert told.incidents, "what happened was told"


def test_machines_that_the_autoscaler_takes_with_and_without_notice_cost_no_step_and_no_bit(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    training = RayTraining(tmp_path, nodes=2, max_nodes=3)
    training.until_world(3)
    taken, deadline = training.beyond_the_gang(), time.time() + NOTICE
    drain(taken, deadline)
    training.until_world(2)
    training.until(lambda: not is_alive(taken), "Ray ends the machine, of which nothing is used")
    assert time.time() < deadline
    cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    training.until_world(3)
    taken = training.beyond_the_gang()
    stop(taken)
    training.until(lambda: not is_alive(taken), "Ray ends the machine")
    training.until_world(2)
    told = training.finish(2)
    assert told.incidents, "what happened was told"


def drain(machine: str, deadline: float) -> None:
    """Have a machine drained until a time, as `ray drain-node` does and who takes notice of a preemption."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = global_worker.gcs_client.drain_node(machine, reason, "a test", int(deadline * 1000))
    assert accepted, why


def stop(machine: str) -> None:
    """Have a machine end now, as both of Ray's autoscalers do with one that is too many, though it works."""
    from ray._private.worker import global_worker

    assert global_worker.gcs_client.drain_nodes([bytes.fromhex(machine)]), "it is none of the cluster's"


def is_alive(machine: str) -> bool:
    """True if Ray counts a machine among its own."""
    return any(each["NodeID"] == machine and each["Alive"] for each in ray.nodes())
