"""Combination of the gradients of a step's micro-batches: the interface for `microbatches.py`, and its usual form."""

from typing import Protocol

from regrow.comm.torch_private import ddp, fsdp
from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow.step.dealing import MicroBatchRange
from regrow.train.gradients.wrappers import Modules
from regrow.train.state.protected import ProtectedState


class Gradients(Protocol):
    """Adds up over the micro-batches of a rank, and reduces over ranks once a step."""

    def divides_by(self, shares: int) -> int:
        """Divisor that the sum over all ranks already contains if data is dealt out to `shares` shares at a time."""
        ...

    def start(self, share: MicroBatchRange) -> None:
        """A step begins: no parameter has a gradient. `share`: the micro-batches to come."""
        ...

    def open(self, index: int, *, last: bool) -> None:
        """The forward of a micro-batch follows; `last`: none follows it."""
        ...

    def expect(self, scale: float) -> None:
        """The backward of the last one follows; what `finish` will be called with. Reductions may begin."""
        ...

    def close(self, index: int) -> None:
        """Its backward is done."""
        ...

    def finish(self, scale: float) -> None:
        """All are done: every parameter's `grad` becomes the sum over all ranks, times `scale`."""
        ...

    def abandon(self) -> None:
        """The step is over, done or not: leave nothing behind."""
        ...


class Averaged:
    """Gradients pile up in `grad`, and DDP or FSDP2 reduces them in the backward of the last micro-batch.

    The order of summation follows the world, so the last bits do too.
    """

    def __init__(self, state: ProtectedState, modules: Modules) -> None:
        self._state, self._modules = state, modules
        self._expected = False

    def divides_by(self, shares: int) -> int:
        """DDP and FSDP take the mean over all ranks that read data of their own."""
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
        """Drop what an earlier step may have left."""
        self._state.drop_gradients()

    def open(self, index: int, *, last: bool) -> None:
        """Reduce in the last backward alone."""
        self._expected = last
        self._synchronize(last)

    def expect(self, scale: float) -> None:
        """DDP and FSDP reduce by themselves."""

    def close(self, index: int) -> None:
        """The gradient is in `grad`."""

    def finish(self, scale: float) -> None:
        """They are reduced already; one pass over them, where `scale` is not 1."""
        self._expected = False
        if scale == 1.0:
            return
        for parameter in self._state.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(scale)

    def abandon(self) -> None:
        """Reduce again in every backward."""
        self._synchronize(True)
        if self._expected:
            self._expected = False
            self._modules.expect_nothing()

    def _synchronize(self, on: bool) -> None:
        ddp.synchronize(self._modules.replicated, on)
        fsdp.synchronize(self._modules.sharded, on)
