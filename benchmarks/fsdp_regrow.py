"""The training of `buddy.py`: the model of `workload.py`, sharded over all ranks by FSDP2; no rank has a replica.

The process that computed a step is logged with it, so that the benchmark can run the sides in turns.
"""

import argparse

import workload
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import regrow


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    session = regrow.init()
    model = workload.prepare()
    mesh = init_device_mesh("cpu", (workload.WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = workload.make_optimizer(model)
    session.protect(model, optimizer)

    def batch_of(step: int) -> Tensor:
        return workload.make_batch(step, session.rank)

    for step in session.steps(batch_of, until=args.steps):
        with step as batch:
            loss = workload.loss_of(model, batch)
            step.log(loss=loss, pid=workload.own_pid())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
