"""Combines the gradients of a step's micro-batches: the interface that `microbatches.py` uses, and its usual form."""

from typing import Protocol

from regrow.comm.torch_private import ddp, fsdp
from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow.step.dealing import MicroBatchRange
from regrow.train.gradients.wrappers import Modules
from regrow.train.state.protected import ProtectedState


class Gradients(Protocol):
    """Adds up gradients over the micro-batches of a rank, and reduces them over ranks once a step."""

    def divides_by(self, shares: int) -> int:
        """Divisor that the reduction over ranks already applies if data is dealt out to `shares` shares at a time."""
        ...

    def start(self, share: MicroBatchRange) -> None:
        """Begin a step, without any gradients. `share`: the micro-batches to come."""
        ...

    def open(self, index: int, *, last: bool) -> None:
        """Prepare for the forward of a micro-batch; `last`: it is the last one."""
        ...

    def expect(self, scale: float) -> None:
        """Prepare for the backward of the last micro-batch, in which reductions may begin. `scale`: as for `finish`."""
        ...

    def close(self, index: int) -> None:
        """Take the gradients after the backward of a micro-batch."""
        ...

    def finish(self, scale: float) -> None:
        """End the last micro-batch: every parameter's `grad` becomes the sum over all ranks, times `scale`."""
        ...

    def abandon(self) -> None:
        """Clean up when the step is over, complete or not."""
        ...


class Averaged:
    """Accumulates gradients in `grad`; DDP or FSDP2 reduces them in the backward of the last micro-batch.

    The order of summation depends on the world, and so do the last bits.
    """

    def __init__(self, state: ProtectedState, modules: Modules) -> None:
        self._state, self._modules = state, modules
        self._expected = False

    def divides_by(self, shares: int) -> int:
        """Returns `shares`, as DDP and FSDP take the mean over all ranks that read data of their own."""
        group = ddp.group_of(self._modules.replicated)
        wrapped = group is not None or self._modules.sharded
        if shares > 1 and not wrapped:
            raise UsageError(
                f"the data is dealt out to {shares} ranks, but nothing reduces their gradients",
                hint="wrap the model in DistributedDataParallel or fully_shard, and protect the wrapped one",
            )
        if group is not None and group.size() != shares:
            raise UsageError(
                f"DDP reduces over {group.size()} ranks, but the data is dealt out to {shares}",
                hint="give session.steps data= the mesh of the ranks that DDP reduces over",
            )
        return shares

    def start(self, share: MicroBatchRange) -> None:
        """Drop gradients that an earlier step may have left."""
        self._state.drop_gradients()

    def open(self, index: int, *, last: bool) -> None:
        """Let DDP and FSDP reduce in the last backward only."""
        self._expected = last
        self._synchronize(last)

    def expect(self, scale: float) -> None:
        """Do nothing, as DDP and FSDP reduce by themselves."""

    def close(self, index: int) -> None:
        """Do nothing, as the gradient is in `grad`."""

    def finish(self, scale: float) -> None:
        """Scale the gradients, which are reduced already, if `scale` is not 1."""
        self._expected = False
        if scale == 1.0:
            return
        for parameter in self._state.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)

    def abandon(self) -> None:
        """Let DDP and FSDP reduce in every backward again."""
        self._synchronize(True)
        if self._expected:
            self._expected = False
            self._modules.expect_nothing()

    def _synchronize(self, on: bool) -> None:
        ddp.synchronize(self._modules.replicated, on)
        fsdp.synchronize(self._modules.sharded, on)
