"""The loss and the gradient of one batch, by recipes and by TRL's own trainers: the largest differences, as JSON."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from regrow_recipes.recipes.losses import BatchLosses

PROMPT, LENGTH, ROWS = 3, 9, 4
_VOCABULARY = {f"t{number}": number for number in range(64)}
words = Tokenizer(models.WordLevel(_VOCABULARY, "t2"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2")


def base() -> Any:
    """A tiny model."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def adapter() -> LoraConfig:
    """A new adapter: TRL takes the model without it for the reference of DPO, as recipes do."""
    return LoraConfig(r=2, target_modules="all-linear")


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    """All of them, in a row."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, trained)])


def compare(method: str, out: Path, *, adapts: bool = True) -> dict[str, float]:
    """One batch, by both."""
    kinds = {"lora": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}
    trainer_kind, config_kind = kinds[method]
    prompt_completion = {"prompt": ["t5 t6 "], "completion": ["t7 t8"]}
    preference = {"prompt": ["t5 t6"], "chosen": ["t7"], "rejected": ["t8"]}
    model = get_peft_model(base(), adapter()) if adapts else base()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or (not adapts and "proj" in name):
            torch.nn.init.normal_(parameter, std=0.2)
    options = {"output_dir": str(out / method), "gradient_checkpointing": False, "report_to": [], "disable_tqdm": True}
    trainer = trainer_kind(
        model=base(),
        **({"peft_config": adapter()} if adapts else {"ref_model": base()}),
        args=config_kind(use_cpu=True, bf16=False, **options),
        train_dataset=Dataset.from_dict(preference if method == "dpo" else prompt_completion),
        processing_class=tokenizer,
    )
    trainer.model.load_state_dict(model.state_dict())
    numbers = torch.Generator().manual_seed(5)
    shape = (ROWS, 2, LENGTH) if method == "dpo" else (ROWS, LENGTH)
    tokens = torch.randint(3, 64, shape, generator=numbers)
    if method == "dpo":
        tokens[:, 1, :PROMPT] = tokens[:, 0, :PROMPT]
    labels = tokens.clone()
    labels[..., :PROMPT] = -100
    labels[1, ..., -2:] = -100  # a shorter row
    positions = torch.arange(LENGTH).expand(shape)
    losses = BatchLosses(
        SimpleNamespace(method=method, dpo=SimpleNamespace(beta=0.1), parallel=SimpleNamespace(precision="fp32")),  # type: ignore[arg-type]
        model.config,
        torch.device("cpu"),
    )
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions.contiguous()}
    batch["row"] = torch.arange(ROWS).flip(0)
    reference = None if adapts else losses.likelihoods(base(), batch).flip(0)
    mine, _ = losses(model, batch, reference)
    if method == "dpo":
        rows = tokens.transpose(0, 1).flatten(0, 1)  # chosen ones first
        counts = (labels != -100).transpose(0, 1).flatten(0, 1).long()
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "completion_mask": counts}
    else:
        inputs = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    trainer.model.train()
    theirs = trainer.compute_loss(trainer.model, inputs)
    ours, others = gradients(model, mine), gradients(trainer.model, theirs)
    return {
        "loss": float(mine.detach()),
        "by": abs(float(mine.detach() - theirs.detach())),
        "gradient": float(ours.abs().max()),
        "gradient by": float((ours - others).abs().max()),
    }


told = {method: compare(method, Path(sys.argv[1])) for method in ("lora", "dpo")}
told["dpo of all weights"] = compare("dpo", Path(sys.argv[1]), adapts=False)
print(json.dumps(told))
