"""Loss of a batch, by method: the mean over the counted elements, and their number."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid

from regrow_recipes.recipes.building import forward_type, inner
from regrow_recipes.recipes.preparing import LEFT_OUT
from regrow_recipes.recipes.schema import TrainingRecipe

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, int]]


class BatchLosses:
    """Losses of one training's batches.

    Args:
        recipe: the training, with its method.
        config: the model's configuration, from transformers.
        device: of this rank.
    """

    def __init__(self, recipe: TrainingRecipe, config: Any, device: torch.device) -> None:
        self._recipe, self._config, self._device = recipe, config, device

    def __call__(
        self, model: nn.Module, batch: Batch, reference: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        """The mean loss of a batch, and the number of elements: counted tokens, or pairs.

        Args:
            model: the trained model.
            batch: of rows, as `batch_of` makes it.
            reference: for preferences that train all weights: the result of `likelihoods` for each row before training.
        """
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        if self._recipe.method == "dpo":
            return self._preference(model, batch, reference)
        return self._tokens(model, batch)

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Logits after each token: [rows, length, vocabulary]. Attention does not cross documents."""
        with forward_type(model, self._recipe, self._device):
            masks = packed_masks(self._config, batch["position_ids"])
            said: torch.Tensor = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=masks, use_cache=False
            ).logits
        return said.float()

    def _tokens(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        logits, labels = self.logits(model, batch)[:, :-1], batch["labels"][:, 1:]
        count = int((labels != LEFT_OUT).sum())
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=LEFT_OUT, reduction="sum")
        return total / max(count, 1), count

    def likelihoods(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The log-likelihood of both answers of each pair: [pairs, 2]. Without gradients."""
        batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        with torch.no_grad():
            return self._log_likelihoods(_without_reduction(model), batch)

    def _preference(self, model: nn.Module, batch: Batch, reference: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Direct preference optimization (Rafailov et al. 2023); an adapter's reference is the model without it."""
        if reference is None:
            with inner(model).disable_adapter():
                before = self.likelihoods(model, batch)
        else:
            before = reference[batch["row"]]
        chosen, rejected = (self._log_likelihoods(model, batch) - before).unbind(1)
        return -logsigmoid(self._recipe.dpo.beta * (chosen - rejected)).mean(), len(before)

    def _log_likelihoods(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        rows = {name: batch[name].flatten(0, 1) for name in ("input_ids", "labels", "position_ids")}
        logits, labels = self.logits(model, rows)[:, :-1], rows["labels"][:, 1:]
        cost = cross_entropy(logits.transpose(1, 2), labels, ignore_index=LEFT_OUT, reduction="none")
        return -cost.sum(1).reshape(-1, 2)


def _without_reduction(model: nn.Module) -> nn.Module:
    """The module without DDP, which would prepare a reduction at each forward; a reference pass has none."""
    bare: nn.Module = inner(model)
    return bare


def packed_masks(config: Any, positions: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The masks of packed rows, for models that do not derive them from `position_ids`; None: the model does.

    transformers 5.23 does not pass GPT-OSS's positions to its mask functions, so attention would cross documents.
    """
    if config.model_type != "gpt_oss":
        return None
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    like = torch.empty((*positions.shape, 0), dtype=torch.float32, device=positions.device)
    given = {
        "config": config,
        "inputs_embeds": like,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }
    return {
        "full_attention": create_causal_mask(**given),
        "sliding_attention": create_sliding_window_causal_mask(**given),
    }
