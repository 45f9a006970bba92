"""A real training in the pods of a TrainJob: its status is told, and the loss of pod 0 starts all anew."""

from pathlib import Path

import pytest
from tests.cluster.bed import bed
from tests.cluster.fake_jobset import from_train_job
from tests.cluster.fake_trainer import status_server
from tests.cluster.test_jobset_trains import WORDS, pod_of, set_of
from tests.cluster.trained import STEPS, TrainedJob
from tests.ports import held_port
from tests.process.elastic import final, fixed_run

from regrow_guests.pods.manifests import GuestJob, training_runtime

pytestmark = pytest.mark.full


async def test_a_trainjobs_status_is_told_and_the_loss_of_pod_0_starts_all_anew_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    port = held_port()
    runtime = training_runtime(GuestJob("regrow", "team/train:1", checkpoint_dir=str(tmp_path / "checkpoints")))
    args = ["--data-cache=off", "--checkpoint-every=1s", *WORDS]
    told = {"numNodes": 2, "numProcPerNode": 1, "args": args, "env": [{"name": "REGROW_GUEST_STEPS", "value": "200"}]}
    train_job = {"metadata": {"name": "job"}, "spec": {"trainer": told}, "port": port}
    with status_server(tmp_path) as (environment, heard):
        async with bed(tmp_path, {"n1": 4}, real=True) as cluster:
            job = TrainedJob(cluster, tmp_path)
            async with set_of(cluster, from_train_job(runtime, train_job, environment)) as found:
                await job.until_world(2)
                await cluster.until(lambda: heard and heard[-1]["progressPercentage"] > 0, "its progress is told")
                first = pod_of(cluster, 0)
                await cluster.until(lambda: "state@" in cluster.kubelet.output(first), "there is a checkpoint")
                cluster.kubelet.kill(first)
                await cluster.until(lambda: sorted(found.made) == [0, 0, 1, 1], "both are started anew")
                said = "goes on from the checkpoint of step"
                names = [f"job-node-0-0-{number}" for number in (3, 4)]
                await cluster.until(lambda: any(said in cluster.kubelet.output(each) for each in names), "they train")
                job.let_go()
                await cluster.until(lambda: found.condition, "the set has ended")
                assert (found.condition, found.restarts) == ("Completed", 0), found.message
            await cluster.until(lambda: not cluster.kubelet.running(), "its processes have ended")
    alone = tmp_path / "alone"
    alone.mkdir()
    fixed = fixed_run(alone, STEPS)
    finals = [final(tmp_path / f"job.{rank}.json") for rank in range(2)]
    assert finals == [{"digest": fixed["digest"], "parameters": fixed["parameters"]}] * 2
