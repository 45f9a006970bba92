"""Log-likelihoods before training, for preferences that train all weights: computed once, then protected.

So no second model is needed, and a newcomer receives these numbers from its peers together with the weights.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from regrow.comm.groups import unnoted
from regrow_recipes.recipes.losses import BatchLosses
from regrow_recipes.recipes.rows import Rows, batch_of


class Reference(nn.Module):
    """Log-likelihoods of both answers of each row, the chosen and the rejected: [rows, 2] in float32.

    Args:
        trained: number of training rows.
        evaluated: number of evaluation rows.
        device: of this rank.
    """

    trained: torch.Tensor
    evaluated: torch.Tensor

    def __init__(self, trained: int, evaluated: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("trained", torch.zeros(trained, 2, device=device))
        self.register_buffer("evaluated", torch.zeros(evaluated, 2, device=device))


@torch.no_grad()
def fill(found: torch.Tensor, losses: BatchLosses, model: nn.Module, rows: Rows) -> None:
    """Fill in the model's log-likelihoods of these rows. A collective: each rank computes an equal part."""
    with unnoted():  # newcomers skip it: they receive the result from their peers
        world, place = dist.get_world_size(), dist.get_rank()
        model.eval()
        for turn in range(math.ceil(len(rows) / world)):
            # One row at a time, so that its numbers have the same bits in a world of any size.
            at = turn * world + place
            pair = losses.likelihoods(model, batch_of([rows[at % len(rows)]]))
            if at < len(rows):
                found[at] = pair[0]
        model.train()
        if world > 1:
            dist.all_reduce(found)
