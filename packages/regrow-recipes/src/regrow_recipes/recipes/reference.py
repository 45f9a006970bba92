"""Logits before training, for preferences that train all weights: worked out once, and protected.

So no second model is held, and a newcomer gets these numbers from its peers as it gets the weights.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from regrow.comm.groups import unnoted
from regrow_recipes.recipes.losses import BatchLosses
from regrow_recipes.recipes.rows import Rows, batch_of


class Reference(nn.Module):
    """Log-likelihoods of both answers of each row, chosen and rejected: [rows, 2] in float32.

    Args:
        trained: number of rows that are trained on.
        evaluated: number of those that are evaluated.
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
    """Write what the model says of these rows now. A collective: every rank goes through its part, as many as each."""
    with unnoted():  # newcomers skip it: they get what it fills from their peers
        world, place = dist.get_world_size(), dist.get_rank()
        model.eval()
        for turn in range(math.ceil(len(rows) / world)):
            # A row by itself, so that its numbers are the same bits in any world.
            at = turn * world + place
            pair = losses.likelihoods(model, batch_of([rows[at % len(rows)]]))
            if at < len(rows):
                found[at] = pair[0]
        model.train()
        if world > 1:
            dist.all_reduce(found)
