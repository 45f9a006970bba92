"""Builds a recipe's model: loads it, or only allocates it for a newcomer; adds an adapter; shards or replicates it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow_recipes.recipes.facts import model_facts
from regrow_recipes.recipes.schema import Run, TrainingRecipe


def half(recipe: TrainingRecipe, device: torch.device) -> bool:
    """True if the forward pass is in bf16."""
    return recipe.parallel.precision == "bf16" or (recipe.parallel.precision == "auto" and device.type != "cpu")


def model_config(run: Run) -> Any:
    """The model's configuration, from transformers."""
    values = dict(run.model_config)
    family = values.pop("model_type")
    config = CONFIG_MAPPING[family](**values)
    wanted = run.recipe.model.attention
    config._attn_implementation = ("eager" if family == "gpt_oss" else "sdpa") if wanted == "auto" else wanted  # noqa: SLF001
    config.use_cache = False
    return config


def build(run: Run, device: torch.device, *, world: int, load: bool) -> nn.Module:
    """The model on its device, wrapped for the world; trained parameters require gradients.

    Args:
        run: the recipe, with the resolved values.
        device: of this rank.
        world: ranks.
        load: read or initialize the weights; else no weights are read, and they are zero.
    """
    model = _read_or_shaped(run, device, load=load)
    if run.recipe.adapts:
        model = with_adapter(run, model)
    if run.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not load:
        _give_memory(model)
    model.train()
    wrapped = _sharded(run, model, device, world) if run.shard > 1 else _replicated(model, device)
    if not load:
        for tensor in wrapped.parameters():
            local(tensor.detach()).zero_()
    return wrapped


def bare(run: Run, device: torch.device, *, load: bool) -> Any:
    """The model of a recipe without an adapter or a wrapper; zeros if no weights are to be read."""
    model = _read_or_shaped(run, device, load=load)
    if not load:
        _give_memory(model)
        for tensor in model.parameters():
            tensor.detach().zero_()
    return model


def _read_or_shaped(run: Run, device: torch.device, *, load: bool) -> Any:
    config = model_config(run)
    if load:
        return _loaded(run, config, device)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=_dtype(run, device))


def _dtype(run: Run, device: torch.device) -> torch.dtype:
    """Data type of the weights: frozen ones have the type of the forward pass, trained ones float32."""
    return torch.bfloat16 if run.recipe.adapts and half(run.recipe, device) else torch.float32


def _loaded(run: Run, config: Any, device: torch.device) -> Any:
    if run.recipe.model.config:
        return AutoModelForCausalLM.from_config(config, dtype=_dtype(run, device))
    path = str(Path(run.recipe.model.path).absolute())
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=_dtype(run, device), local_files_only=True)


def with_adapter(run: Run, model: Any) -> Any:
    """The model with an adapter, of which only the adapter is trained."""
    from peft import get_peft_model

    # peft asks the model for its path, which a model that was not loaded does not know.
    model.name_or_path = run.recipe.model.path
    return get_peft_model(model, adapter_config(run), autocast_adapter_dtype=True)


def adapter_config(run: Run) -> Any:
    """The adapter of a recipe as a peft configuration."""
    from peft import LoraConfig

    lora = run.recipe.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=model_facts(run.model_config).targets(lora.targets),
        task_type="CAUSAL_LM",
    )


def _give_memory(model: nn.Module) -> None:
    """Allocate memory for a model on the meta device. Tied tensors stay tied; buffers are computed, not read."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        own = dict(module.named_buffers(recurse=False))
        if "inv_freq" in own:
            again = type(module)(module.config)
            for name, buffer in again.named_buffers(recurse=False):
                setattr(module, name, buffer)
            continue
        for name, buffer in own.items():
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers that FSDP gathers one by one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rsplit(".", 1)[-1] == "layers":
            return module
    raise UsageError("the model has no list of decoder layers", hint="give parallel.shard=1")


def _sharded(run: Run, model: nn.Module, device: torch.device, world: int) -> nn.Module:
    mesh = init_device_mesh(device.type, (world // run.shard, run.shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    mixed = MixedPrecisionPolicy()
    if half(run.recipe, device):
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return model


def _replicated(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model.to(device))


def inner(model: nn.Module) -> Any:
    """The model without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def forward_type(model: nn.Module, recipe: TrainingRecipe, device: torch.device) -> Iterator[None]:
    """Run the forward pass in the recipe's precision. FSDP sets the precision by itself."""
    with torch.autocast(
        device.type, torch.bfloat16, enabled=half(recipe, device) and not isinstance(model, FSDPModule)
    ):
        yield
