"""Ray Train for `peers.py`: its controller starts all workers again from the last checkpoint that was reported.

Ray is started for this run, on this machine alone. The workers load the newest checkpoint themselves.
"""

import tempfile
from pathlib import Path
from typing import Any

import peer_training
import ray
import ray.train
import ray.train.torch
import torch
import workload


def train(config: dict[str, Any]) -> None:
    """Train until `steps`, in a worker of Ray."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    first, found = 0, ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as kept:
            first = peer_training.load(Path(kept), model, optimizer)
    replica = ray.train.torch.prepare_model(model, move_to_device=False)
    steps = peer_training.Steps(folder, rank)
    for step in range(first, config["steps"]):
        peer_training.loss_of(replica, step, rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        steps.finished(step)
        if (step + 1) % config["checkpoint_every"] == 0:
            report(folder, step + 1, rank, model, optimizer)
    if rank == 0:
        peer_training.finish(folder, model)


def report(folder: Path, step: int, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Report a step, which all ranks do; rank 0 with a checkpoint, whose copy is made beside the training."""
    if rank != 0:
        ray.train.report({"step": step})
        return
    kept = Path(tempfile.mkdtemp(dir=folder))
    peer_training.save(kept, step, model, optimizer)
    ray.train.report(
        {"step": step},
        checkpoint=ray.train.Checkpoint.from_directory(str(kept)),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def main() -> None:
    """Start Ray, and a training on it."""
    args = peer_training.parse(__doc__)
    ray.init(
        num_cpus=workload.WORLD,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=True,
        _temp_dir=str(args.folder / "r"),
    )
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={
            "folder": str(args.folder),
            "steps": args.steps,
            "checkpoint_every": args.checkpoint_every,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=workload.WORLD),
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=10),
        run_config=ray.train.RunConfig(
            name="peers",
            storage_path=str(args.folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=10),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
