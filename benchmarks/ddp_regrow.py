"""The regrow side of `recovery.py`: the same training, with each step a transaction.

Commits are recorded by regrow itself. The process that computed a step is logged with it, so that the benchmark knows
whom to kill.
"""

import argparse
import time

import workload
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.core.ids import StepNo
from regrow.train.worker.replica_digests import Sampler


class Looks:
    """How long this process has looked for replicas that differ, since it was asked last."""

    def __init__(self) -> None:
        self._spent = 0.0

    def watch(self) -> None:
        """Put a clock around it."""
        tick = Sampler.tick

        def timed(sampler: Sampler, step: StepNo, *, last: bool) -> None:
            before, started = sampler._last, time.perf_counter()
            tick(sampler, step, last=last)
            if sampler._last != before:
                self._spent += time.perf_counter() - started

        Sampler.tick = timed  # type: ignore[assignment, method-assign]

    def taken(self) -> float:
        """In seconds; 0 if it has not."""
        spent, self._spent = self._spent, 0.0
        return spent


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--time-audit", action="store_true", help="log how long each look at the state took")
    args = parser.parse_args()
    looks = Looks()
    if args.time_audit:
        looks.watch()
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
            step.log(loss=loss, pid=workload.own_pid(), looked=looks.taken())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
