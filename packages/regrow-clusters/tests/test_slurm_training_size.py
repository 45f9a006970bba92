"""Number of replicas that train in a Slurm job with spares: a scale-down counts those, not the nodes."""

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from test_slurm_draining import Cluster, Coordinator
from test_slurm_draining import view as seen
from tests.unit.membership.elastic_job import candidates, comes, drain, lose, scale, stop
from tests.unit.membership.membership_job import Job

from regrow.core.ids import NO_STATE, Generation, NodeId, StepNo
from regrow.core.messages import orders
from regrow.core.messages.observations import WorkerAlive
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import ScaleRequest
from regrow.membership.view import JobView
from regrow_clusters.cluster.sizes import wanted_size
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.keeper import Keeper
from regrow_clusters.slurm.node_arguments import GangNode
from regrow_clusters.slurm.reading import JobRequests
from regrow_clusters.slurm.scripts import JobPart
from regrow_clusters.slurm.training_size import fewer_to_train


def spec(**more: Any) -> SlurmJobSpec:
    return SlurmJobSpec("gpt", ["train.py"], **{"replica_count": 2, "max_replica_count": 3, "spares": 1, **more})


def view(wanted: int) -> JobView:
    return JobView("gpt-1", "training", Generation(1), StepNo(7), 0, 0, [], [], wanted=wanted)


@given(st.integers(1, 5), st.integers(0, 5), st.integers(0, 3), st.none() | st.integers(1, 12), st.integers(1, 12))
def test_it_is_asked_for_what_is_wanted_never_below_the_gang_and_once(
    low: int, more: int, spares: int, replicas: int | None, wants: int
) -> None:
    job = spec(replica_count=low, max_replica_count=low + more, spares=spares)
    requests = JobRequests(replicas=replicas)
    asked = fewer_to_train(job, requests, view(wants))
    after = wants if asked is None else asked
    assert asked is None or low <= asked < wants
    assert fewer_to_train(job, requests, view(after)) is None, "what was done is not asked for again"
    assert not spares or after <= wanted_size(job.elastic_spec(replicas=replicas))
    assert spares or asked is None, "who is given back is one replica fewer"


def three_of_three() -> Job:
    """One rank a node: a gang of two and a spare, and one that came later; three train, by which it does not matter."""
    job = Job(3, nodes=3, spares=1, min_replicas=2, max_replicas=3, most_nodes=4).trained(4)
    comes(job, "r3")
    return changed(job)


def changed(job: Job) -> Job:
    """The world has the size that is wanted, and all have committed a step in it."""
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    stop(job)
    return job.joined().stepped(job.machine.step)


def size(job: Job, wanted: int) -> int | None:
    return fewer_to_train(spec(), JobRequests(replicas=wanted), job.machine.snapshot())


def test_scaled_down_one_fewer_trains_though_the_node_that_is_given_back_has_no_ranks() -> None:
    job = three_of_three()
    assert job.machine.world == 3 and not job.machine.roster.nodes[NodeId("r3")].placed, "the spare trains in its place"
    assert size(job, 3) is None
    asked = size(job, 2)
    assert asked == 2 and scale(job, asked).accepted
    changed(job)
    drain(job, "r3")
    assert [order.node for order in job.all(orders.StopNode)] == ["r3"]
    assert job.machine.world == 2 and not candidates(job), "it does not grow onto the spare again"
    assert size(job, 2) is None


def test_scaled_down_after_a_loss_one_fewer_trains_before_and_after_the_lost_node_is_replaced() -> None:
    job = three_of_three()
    lose(job, "n1")
    for rank in (0, 2):
        job.halted(rank, job.machine.step)
    job.ready(job.of(1), NO_STATE)
    for worker in job.machine.roster.placed():
        job.tell(WorkerAlive(worker.worker))
    job.joined().stepped(job.machine.step)
    assert job.machine.world == 3, "the node without ranks has taken those of the lost one"
    asked = size(job, 2)
    assert asked == 2 and scale(job, asked).accepted
    changed(job)
    assert job.machine.world == 2 and size(job, 2) is None
    comes(job, "r1")
    assert size(job, 2) == 2, "a node that comes is the wish to grow"
    assert scale(job, 2).accepted and not candidates(job)
    assert job.machine.world == 2 and size(job, 2) is None


class SizedCoordinator(Coordinator):
    """It is asked for sizes, and refuses them where there is a `refusal`."""

    refusal = ""

    def __init__(self, wanted: int) -> None:
        super().__init__(msgspec.structs.replace(seen("node0", "node1", "node2", "r3-6"), wanted=wanted))
        self.sizes: list[int | None] = []

    def scale(self, scaling: ScaleRequest) -> AnswerScale:
        self.sizes.append(scaling.replicas)
        return AnswerScale(not self.refusal, self.refusal)


def test_the_job_is_asked_to_train_with_fewer_and_a_refusal_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    job = SizedCoordinator(wanted=3)
    job.refusal = "the script has no session.steps"
    part = JobPart(spec(replicas=2))
    keeper = Keeper(part, GangNode(5, 0, "host0", "host[0-2]"), Cluster(seen()), job, tmp_path, ["regrow"], said.append)
    for _ in range(3):
        keeper.turn()
    assert job.sizes == [2]
    assert said[0] == "the job cannot train with 2 replicas: the script has no session.steps"
    job.refusal = ""
    job.seen = msgspec.structs.replace(seen("node0", "node1", "node2", "r3-6", "r4-7"), wanted=3)
    keeper.turn()
    assert job.sizes == [2, 2], "the job is another"
