"""The regrow side of `recovery.py`: the same training, with each step a transaction.

Commits are recorded by regrow itself. The process that computed a step is logged with it, so that the benchmark knows
whom to kill.
"""

import argparse

import workload
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import regrow


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    session = regrow.init()
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    replica = DistributedDataParallel(model)
    session.protect(replica, optimizer)

    def batch_of(step: int) -> Tensor:
        return workload.make_batch(step, session.rank)

    for step in session.steps(batch_of, until=args.steps):
        with step as batch:
            loss = workload.loss_of(replica, batch)
            step.log(loss=loss, pid=workload.own_pid())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
