"""Writes the result as Hugging Face folders: the whole model, an adapter, or the model with its adapter merged."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from regrow_recipes.recipes.building import inner, model_config, with_adapter
from regrow_recipes.recipes.schema import Run

Weights = dict[str, torch.Tensor]

_OF_A_TOKENIZER = ("tokenizer*", "special_tokens*", "chat_template*", "vocab*", "merges*", "added_tokens*")


def gathered(run: Run, model: nn.Module) -> Weights:
    """All weights, unsharded, on rank 0; only the adapter's if they suffice. A collective of all ranks."""
    adapter_alone = run.recipe.adapts and not run.recipe.output.merge
    if isinstance(model, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter_alone)
        return dict(cast(Weights, get_model_state_dict(model, options=options)))
    trained = {name for name, each in inner(model).named_parameters() if each.requires_grad}
    return {
        name: tensor.detach().cpu()
        for name, tensor in inner(model).state_dict().items()
        if name in trained or not adapter_alone
    }


def export(run: Run, model: nn.Module, weights: Weights, folder: Path) -> list[Path]:
    """Write the result on rank 0. Existing folders are replaced once the new ones are complete.

    Returns:
        The folders: `model`, or `adapter`, or both.
    """
    made: list[Path] = []
    if run.recipe.adapts:
        with _written(folder / "adapter") as making:
            adapter = {name: tensor for name, tensor in weights.items() if "lora_" in name}
            inner(model).save_pretrained(making, state_dict=adapter)
        made.append(folder / "adapter")
    if not run.recipe.adapts or run.recipe.output.merge:
        with _written(folder / "model") as making:
            _whole(run, weights).save_pretrained(making)
            _copy_tokenizer(run, making)
        made.append(folder / "model")
    return made


def _whole(run: Run, weights: Weights) -> Any:
    """A model of these weights, in its original data type, with its adapter merged."""
    config = model_config(run)
    config.use_cache = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if run.recipe.adapts:
            model = with_adapter(run, model)
    # Merging adds to the weights, which may be the training's own tensors.
    copies = {name: tensor.to(torch.float32, copy=run.recipe.adapts) for name, tensor in weights.items()}
    model.load_state_dict(copies, assign=True)
    if run.recipe.adapts:
        model = model.merge_and_unload()
    model.tie_weights()
    named = run.model_config.get("dtype") or run.model_config.get("torch_dtype") or "float32"
    return model.to(getattr(torch, str(named)))


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield making
        making.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
            os.replace(folder, old)
            os.replace(making, folder)
            shutil.rmtree(old)
        else:
            os.replace(making, folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _copy_tokenizer(run: Run, folder: Path) -> None:
    for pattern in _OF_A_TOKENIZER:
        for path in Path(run.recipe.tokenizer).glob(pattern):
            if path.is_file():
                shutil.copy(path, folder / path.name)
