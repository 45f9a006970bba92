"""Sums over all ranks' micro-batches in one fixed tree, whichever rank computed which (`regrow.step.dealing`).

Each element has an owner, which receives the partial nodes of all ranks, adds them along the tree, and sends the sum to
all: two rounds; the volume is that of a direct reduction, in the first round times the number of partial nodes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from regrow.comm.process_group import RegrowGroup
from regrow.comm.torch_private.internals import Work
from regrow.devices.accelerators import on_accelerator
from regrow.step.dealing import fold, partial_nodes_of_all

Nodes = Sequence[torch.Tensor]


def tree_reduce(nodes: Nodes, count: int, scale: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over all ranks of a group, times `scale`, in the memory of the first of `nodes`. A collective.

    Args:
        nodes: this rank's partial nodes in order: flat, contiguous, of one size and dtype; all are overwritten.
        count: micro-batches of the step, distributed over the group's ranks.
        scale: factor of the sum, applied once.
        group: its ranks are the replicas, in order; None: this process alone.

    Raises:
        RuntimeError: the generation was given up, or a peer was lost.
    """
    if group is None or group.size() == 1:
        return nodes[0].mul_(scale) if scale != 1.0 else nodes[0]
    work = start_tree_reduce(nodes, count, scale, group)
    if work is not None:
        work.wait()
    return nodes[0]


def start_tree_reduce(nodes: Nodes, count: int, scale: float, group: dist.ProcessGroup) -> Work | None:
    """As `tree_reduce`, without waiting if the group can do that: returns the work, or None if the sum is complete."""
    if isinstance(group, RegrowGroup) and not on_accelerator(nodes[0]):
        work: Work = group.forward("tree_reduce", (list(nodes), count, scale), {})
        return work
    _by_torch(nodes, count, scale, group)
    return None


def _by_torch(nodes: Nodes, count: int, scale: float, group: dist.ProcessGroup) -> None:
    """As `tree_reduce`, with functions that every backend has: one all-to-all and one all-gather."""
    size, rank = group.size(), group.rank()
    held = partial_nodes_of_all(count, size)
    each = -(-nodes[0].numel() // size)
    rows = torch.stack([torch.nn.functional.pad(node, (0, each * size - node.numel())) for node in nodes])
    # Parts by owner, then by node.
    out = rows.view(len(nodes), size, each).transpose(0, 1).contiguous().view(-1)
    arrived = out.new_empty(sum(map(len, held)) * each)
    dist.all_to_all_single(
        arrived,
        out,
        output_split_sizes=[len(spans) * each for spans in held],
        input_split_sizes=[len(held[rank]) * each] * size,
        group=group,
    )
    spans = [span for of_rank in held for span in of_rank]
    total = fold(count, dict(zip(spans, arrived.view(-1, each).unbind(), strict=True)), torch.Tensor.add_)
    if scale != 1.0:
        total.mul_(scale)
    whole = out.new_empty(size * each)
    dist.all_gather_into_tensor(whole, total, group=group)
    nodes[0].copy_(whole[: nodes[0].numel()])
