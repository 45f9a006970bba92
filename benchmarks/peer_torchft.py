"""torchft's fault-tolerant DDP for `peers.py`: replica groups of one process, after the tool's own `train_ddp.py`."""

from datetime import timedelta
from typing import Any

import peer_training
import torchft
import workload


def main() -> None:
    """Train until `--steps`."""
    args = peer_training.parse(__doc__)
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"peer_{args.rank}_",
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
    )
    replica = torchft.DistributedDataParallel(manager, model)
    managed = torchft.Optimizer(manager, optimizer)
    steps = peer_training.Steps(args.folder, args.rank)
    while (step := manager.current_step()) < args.steps:
        managed.zero_grad()  # starts the quorum
        peer_training.loss_of(replica, step, args.rank).backward()  # type: ignore[no-untyped-call]
        taking_part = manager.is_participating()  # a recovering replica adds nothing to this step
        managed.step()
        if manager.current_step() > step and taking_part:
            steps.finished(manager.current_step() - 1)
    peer_training.finish(args.folder, model)
    manager.shutdown()


if __name__ == "__main__":
    main()
