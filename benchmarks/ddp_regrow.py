"""The regrow side of `recovery.py`: the same training, with each step a transaction.

regrow itself records the commits. The process that computed a step is logged with it, so that the benchmark knows which
one to kill.
"""

import argparse
import json
import time
from pathlib import Path

import workload
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages.replacements import ProveReplacement, ReplacementFact, ReplacementProven
from regrow.train.worker.replica_digests import Sampler
from regrow.train.worker.shadowing.shadow_proofs import ShadowProofs

_LOOK: Seconds = 0.05


class Looks:
    """Measures the time that this process spends on comparing replicas."""

    def __init__(self) -> None:
        self._spent = 0.0

    def watch(self) -> None:
        """Wrap the comparison with a timer."""
        tick = Sampler.tick

        def timed(sampler: Sampler, step: StepNo, *, last: bool) -> None:
            before, started = sampler._last, time.perf_counter()
            tick(sampler, step, last=last)
            if sampler._last != before:
                self._spent += time.perf_counter() - started

        Sampler.tick = timed  # type: ignore[assignment, method-assign]

    def taken(self) -> float:
        """Seconds since the last call; 0 if there was no comparison."""
        spent, self._spent = self._spent, 0.0
        return spent


class Proofs:
    """Repeats the first shadow proof of a standby.

    Args:
        every: shortest pause between two proofs; the pause is also at least twice the last proof's duration.
        path: file for one line a proof.
    """

    def __init__(self, every: Seconds, path: Path) -> None:
        self._every, self._path = every, path
        self._order: ProveReplacement | None = None
        self._began = self._took = 0.0

    def repeat(self) -> None:
        """Start to repeat proofs."""
        await_order, tell = ShadowProofs.await_order, ShadowProofs.report

        def again(proofs: ShadowProofs) -> ProveReplacement | None:
            due = time.monotonic() + max(self._every, 2 * self._took)
            while self._order is not None and not proofs.over and time.monotonic() < due:
                time.sleep(_LOOK)
            if self._order is None or proofs.over:
                self._order = await_order(proofs)
            self._began = time.monotonic()
            return self._order

        def told(proofs: ShadowProofs, fact: ReplacementFact) -> None:
            tell(proofs, fact)
            self._took = time.monotonic() - self._began
            if isinstance(fact, ReplacementProven):
                line = {"step": fact.step, "told": fact.held + fact.seconds}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line | {"began": self._began, "ended": time.monotonic()}) + "\n")

        ShadowProofs.await_order, ShadowProofs.report = again, told  # type: ignore[assignment, method-assign]


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--time-audit", action="store_true", help="log how long each look at the state took")
    parser.add_argument("--prove-every", type=float, help="seconds between two proofs of a standby")
    parser.add_argument("--costs", type=Path, help="where it writes what each has cost")
    args = parser.parse_args()
    if args.prove_every:
        Proofs(args.prove_every, args.costs).repeat()
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
