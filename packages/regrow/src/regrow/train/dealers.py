"""Construction of the dealer of a script's micro-batches."""

from collections.abc import Mapping

from torch import nn

from regrow.comm.torch_private import fsdp
from regrow.core.errors import UsageError
from regrow.data.loader import Caching
from regrow.train.gradients.averaged import Averaged, Gradients
from regrow.train.gradients.tree_summed import TreeSummed
from regrow.train.gradients.wrappers import Modules
from regrow.train.microbatches import Dealer
from regrow.train.state.protected import ProtectedState


def dealer(
    loader: object,
    state: ProtectedState,
    modules: Modules,
    *,
    seed: int,
    count: int | Mapping[int, int],
    invariant: bool,
    recorded: bool = True,
    cache: Caching | None = None,
) -> Dealer:
    """Make the dealer that gives the micro-batches of a step to the replicas.

    Args:
        loader: the loader that the script gave to `session.steps`.
        state: the protected state.
        modules: the protected modules.
        seed: seed of the session.
        count: micro-batches of a step, or a table of their number by replicas.
        invariant: whether the result must not depend on the number of replicas.
        recorded: whether the digests of the reads are wanted.
        cache: the node's cache, for a loader that may be cached; None: micro-batches are made in this process.

    Raises:
        UsageError: the loader or the model does not support micro-batches, or invariant mode.
    """
    unit = fsdp.shard_size(modules.sharded)
    gradients: Gradients = Averaged(state, modules)
    if invariant:
        if not isinstance(count, int):
            raise UsageError(
                f"microbatches={dict(count)} follows the number of replicas, and so would every gradient's last bits",
                hint="give one number of micro-batches, or leave invariant mode",
            )
        gradients = TreeSummed(state, modules, count=count, shard_size=unit)
    even = _talks_in_forward(modules)
    made = Dealer(
        loader, seed=seed, count=count, unit=unit, gradients=gradients, even=even, recorded=recorded, cache=cache
    )
    made.reseed = state.reseed
    return made


def _talks_in_forward(modules: Modules) -> str | None:
    """Reason why all replicas need equally many micro-batches: a module communicates in each forward. Else None."""
    roots: list[nn.Module] = [*modules.replicated, *modules.plain]
    for root in roots:
        for name, module in root.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                return f"{name} reduces over all of them in every forward"
    return None
