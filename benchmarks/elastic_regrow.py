"""The regrow side of `elastic.py`: trainings in micro-batches, with a world size that may change at any step.

`train`: the model of `workload.py`. `swap`: the same, with the gradients of every other block of steps summed in
world-invariant mode. `sleep`: a model with micro-batches of a fixed duration on any machine.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator

import torch
import workload
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.train.gradients.tree_summed import TreeSummed
from regrow.train.step import Step

SLEEP_S = 0.04
TOKENS = workload.SAMPLES_PER_RANK * workload.CONTEXT


def train(session: regrow.Session, args: argparse.Namespace) -> None:
    """Train the 25M model."""
    _train(session, args, lambda step: 0.0)


def swap(session: regrow.Session, args: argparse.Namespace) -> None:
    """Train it in turns: a block of steps in the default mode, a block in world-invariant mode."""
    # Does by hand what session.steps() does for invariant=True, so that both modes are in one job.
    summed: list[TreeSummed] = []

    def take_turn(step: Step) -> float:
        dealer, state = session._context.dealer, session._context.state
        if dealer is None or state is None:
            raise SystemExit("the session has no micro-batches")
        if not summed:
            usual.append(dealer.gradients)
            summed.append(TreeSummed(state, session._loop.modules, count=args.microbatches, shard_size=1))
        invariant = step.number // args.block % 2
        dealer.gradients = summed[0] if invariant else usual[0]  # type: ignore[assignment]
        return float(invariant)

    usual: list[object] = []
    _train(session, args, take_turn)


def _train(session: regrow.Session, args: argparse.Namespace, mode_of: Callable[[Step], float]) -> None:
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    replica = DistributedDataParallel(model)
    session.protect(replica, optimizer)
    for step in _steps(session, args, lambda step, share: workload.make_batch(step, share)):
        mode = mode_of(step)
        with step as microbatches:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            step.log(pid=workload.own_pid(), tokens=len(microbatches) * TOKENS, invariant=mode, peak=peak)
            for micro in microbatches:
                loss = workload.loss_of(replica, micro.batch)
                micro.log(loss=loss)
                micro.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def sleep(session: regrow.Session, args: argparse.Namespace) -> None:
    """Sleep for each micro-batch."""
    torch.set_num_threads(1)
    replica = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    session.protect(replica, optimizer)
    for step in _steps(session, args, lambda step, share: torch.full((1, 4), float(step + share) % 7)):
        with step as microbatches:
            step.log(pid=workload.own_pid(), tokens=float(len(microbatches)))
            for micro in microbatches:
                time.sleep(SLEEP_S)
                micro.backward(mse_loss(replica(micro.batch), micro.batch))
            optimizer.step()
            optimizer.zero_grad()


def _steps(session: regrow.Session, args: argparse.Namespace, batch_of: Callable[[int, int], Tensor]) -> Iterator[Step]:
    return session.steps(batch_of, until=args.steps, microbatches=args.microbatches)


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["train", "swap", "sleep"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--block", type=int, default=1, help="steps of a mode in turn, for `swap`")
    args = parser.parse_args()
    {"train": train, "swap": swap, "sleep": sleep}[args.mode](regrow.init(), args)


if __name__ == "__main__":
    main()
