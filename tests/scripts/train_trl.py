"""A tiny language model under TRL's trainers: supervised fine-tuning or preferences, all weights or LoRA."""

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from regrow_recipes.adapters.trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["sft", "dpo"], default="sft")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", type=Path)
options = parser.parse_args()

WORDS = [f"w{number}" for number in range(60)]
words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(count: int, seed: int) -> list[str]:
    """Random words, of which each sentence has another number."""
    numbers = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, 10), generator=numbers).tolist()
    return [" ".join(WORDS[pick] for pick in row[: 4 + at % 6]) for at, row in enumerate(picks)]


def rows(count: int, seed: int) -> Dataset:
    """A data set of the kind that is trained on."""
    if options.kind == "sft":
        return Dataset.from_dict({"text": sentences(count, seed)})
    prompts, chosen, rejected = (sentences(count, seed + 10 * part) for part in range(3))
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


common: dict[str, Any] = {
    "output_dir": str(options.out.with_suffix(".checkpoints")),
    "seed": 3,
    "use_cpu": True,
    "bf16": False,
    "max_steps": options.steps,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=1,
)
kinds = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}
trainer_kind, config_kind = kinds[options.kind]
model = LlamaForCausalLM(config)
more = {"ref_model": copy.deepcopy(model)} if options.kind == "dpo" and not options.lora else {}
trainer = trainer_kind(
    model=model,
    args=config_kind(**common),
    train_dataset=rows(50, 1),
    eval_dataset=rows(11, 2),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear") if options.lora else None,
    **more,
)
trainer.train()

own_time = ("_runtime", "_per_second")
history = [
    {key: value for key, value in line.items() if not key.endswith(own_time)} for line in trainer.state.log_history
]
rank = trainer.session.rank
report = {"digest": trainer.session.digest(), "history": history, "rank": rank}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
