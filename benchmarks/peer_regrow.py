"""regrow for `peers.py`: the same training, with each step a transaction."""

import peer_training
import workload
from torch.nn.parallel import DistributedDataParallel

import regrow


def main() -> None:
    """Train until `--steps`."""
    args = peer_training.parse(__doc__)
    session = regrow.init()
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    replica = DistributedDataParallel(model)
    session.protect(replica, optimizer)
    steps = peer_training.Steps(args.folder, session.rank)
    for step in session.steps(lambda number: workload.make_batch(number, session.rank), until=args.steps):
        with step as batch:
            workload.loss_of(replica, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            steps.finished(step.number)
    if session.rank == 0:
        peer_training.finish(args.folder, model)


if __name__ == "__main__":
    main()
