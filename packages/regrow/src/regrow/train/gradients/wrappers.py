"""Handles data-parallel wrappers around a step: DDP's buckets and buffers, FSDP2's state of an iteration."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from regrow.comm.torch_private import ddp, fsdp, pipeline
from regrow.comm.torch_private.ddp_hooks import HookStates


class Modules:
    """The wrapped modules among a script's protected objects.

    Args:
        objects: the protected objects.
        recovers: whether a step may be given up and run again here.

    Raises:
        UsageError: a module is wrapped in a way that does not allow a step to run again.
    """

    def __init__(self, objects: Sequence[object] = (), *, recovers: bool = False) -> None:
        self._objects, self._recovers = list[object](), recovers
        self._replicas: list[DistributedDataParallel] = []
        self._sharded: list[FSDPModule] = []
        self._plain: list[nn.Module] = []
        self._buffered: list[DistributedDataParallel] = []
        self._unsettled: list[DistributedDataParallel] = []
        self._hooks = HookStates((), ())
        self.add(objects)

    def add(self, objects: Sequence[object]) -> None:
        """Add protected objects. Raises `UsageError` for wrappers that cannot run a step again."""
        if self._recovers:
            fsdp.refuse_first_form(objects)
        known = {id(each) for each in self._objects}
        new = [each for each in objects if id(each) not in known]
        self._objects += new
        self._sharded = fsdp.roots(self._objects)
        if self._recovers:
            fsdp.refuse_what_cannot_run_again(self._sharded)
        self._plain += [
            item for item in new if isinstance(item, nn.Module) and not isinstance(item, DistributedDataParallel)
        ]
        wrapped = {id(each) for each in self._replicas}
        self._take([each for each in ddp.replicas(self._objects) if id(each) not in wrapped])

    def _take(self, replicas: list[DistributedDataParallel]) -> None:
        self._replicas += replicas
        if self._recovers:
            ddp.refuse_what_cannot_run_again(replicas)
            self._buffered += ddp.take_over_buffers(replicas)

    def complete(self) -> None:
        """As the loop begins, find the DDP modules that were made around protected parameters later, or elsewhere.

        Raises `UsageError` for one that cannot run a step again.
        """
        self._take(ddp.made_elsewhere(self._objects, self._replicas))
        if self._recovers:
            self._hooks = HookStates(self._replicas, self._objects)

    def check_hooks(self) -> None:
        """Check after the rehearsal. Raises `UsageError` for communication hooks whose state is not protected."""
        self._hooks.refuse_changed()

    @property
    def replicated(self) -> list[DistributedDataParallel]:
        """The modules that DDP wraps."""
        return list(self._replicas)

    @property
    def plain(self) -> list[nn.Module]:
        """The modules that DDP does not wrap; FSDP2 may shard parts of them."""
        return list(self._plain)

    @property
    def sharded(self) -> list[FSDPModule]:
        """The outermost modules of FSDP2."""
        return list(self._sharded)

    @property
    def spanning(self) -> list[object]:
        """The process groups of corresponding ranks of all replicas."""
        return [module.process_group for module in self._replicas]

    def buckets(self) -> str:
        """The layout of gradients in buckets as text, to be compared between workers."""
        return ddp.buckets(self._replicas)

    @property
    def buffered(self) -> list[DistributedDataParallel]:
        """The modules whose buffers are the same on all ranks between two steps."""
        return list(self._buffered)

    def share_buffers(self) -> None:
        """Give all ranks the buffers that DDP would broadcast. It is a collective, and raises what these raise."""
        ddp.share_buffers(self._buffered)

    @property
    def unsettled(self) -> bool:
        """True if some module's buckets must be laid out before the next forward; call `settle` then."""
        return bool(self._unsettled)

    def settle(self, *, all_of_them: bool = False) -> None:
        """Give buckets their final layout; to be called while collectives are answered locally."""
        self._unsettled = ddp.settle_buckets(self._replicas if all_of_them else self._unsettled)
        if all_of_them:
            self._unsettled = []

    def reset(self, error: BaseException) -> None:
        """Prepare for the next step after `error` ended one."""
        pipeline.reset_unfinished(error)
        self._unsettle(ddp.reset_unfinished(self._replicas))
        fsdp.reset_unfinished(self._sharded)

    def expect_nothing(self) -> None:
        """Reset DDP after a body that ended before an expected reduction of gradients was complete."""
        self._unsettle(ddp.reset_all(self._replicas))

    def _unsettle(self, reset: list[DistributedDataParallel]) -> None:
        self._unsettled += [module for module in reset if module not in self._unsettled]

    def overwritten(self) -> None:
        """Drop FSDP's gathered copies of parameters, as the state may have been written by other means."""
        fsdp.reshard(self._sharded)
