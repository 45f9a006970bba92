"""A tiny language model under TRL's trainers that generate in their step, killed where a test says."""

import argparse
import copy
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pandas  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["grpo", "rloo"], default="grpo")
parser.add_argument("--iterations", type=int, default=1)
parser.add_argument("--per-generation", type=int, default=2)
parser.add_argument("--beta", type=float, default=0.0)
parser.add_argument("--sync", action="store_true", help="the reference model follows")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--reward-model", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--group", type=int, default=8, help="completions of a prompt: 8 are on both of two ranks")
parser.add_argument("--stock", action="store_true", help="TRL's own, and generation that both sides seed alike")
parser.add_argument("--alike", action="store_true", help="seed generation as --stock does")
parser.add_argument("--running", action="store_true", help="a reward that keeps a mean, in an object of its own")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--out", type=Path)
options = parser.parse_args()
if options.stock:
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
else:
    from regrow_recipes.adapters.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

WORDS = [f"w{number}" for number in range(60)]
words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
kills = options.out.with_suffix(".kills")
calls = 0


def die(place: str) -> None:
    """Once, where a file beside the output has asked for it: in lines `PLACE RANK STEP`."""
    where = f"{place} {os.environ.get('RANK', '0')} {trainer.state.global_step}"
    mark = kills.with_suffix(f".died-{where.replace(' ', '-')}")
    if kills.exists() and where in kills.read_text().splitlines() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def prompts(count: int, seed: int) -> Dataset:
    """Random words, of which each prompt has another number."""
    numbers = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (count, 6), generator=numbers).tolist()
    return Dataset.from_dict(
        {"prompt": [" ".join(WORDS[n] for n in row[: 2 + at % 4]) for at, row in enumerate(picks)]}
    )


def reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Even words are good; two counts of calls count too, and noise, unless two sides are compared."""
    global calls
    calls += 1
    vars(reward)["asked"] = vars(reward).get("asked", 0) + 1
    die("reward")
    log_extra("length", [len(text.split()) for text in completions])
    log_metric("asked", float(calls))
    noise = 0.0 if options.alike or options.stock else 0.1
    good = [sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in text.split()) for text in completions]
    return [number + noise * (random.random() + (calls + vars(reward)["asked"]) % 3) for number in good]


class Mean:
    """A mean so far."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def take(self, numbers: list[float]) -> float:
        """The mean of these and all before."""
        self.sum, self.count = self.sum + sum(numbers), self.count + len(numbers)
        return self.sum / self.count


class Running:
    """The same reward, counted from its own mean so far."""

    def __init__(self) -> None:
        self.mean = Mean()

    def score(self, completions: list[str], **more: Any) -> list[float]:
        """Distances from that mean."""
        good = reward(completions, **more)
        mean = self.mean.take(good)
        return [abs(number - mean) for number in good]


class Dying(TrainerCallback):  # type: ignore[misc]
    """Dies between two updates, where it is told to."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die("between")


torch.manual_seed(3)
sizes: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
judge: Any = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))
if options.beta:
    folder = options.out.with_suffix(f".model-{os.getpid()}")
    model.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
trainer_kind, config_kind = (GRPOTrainer, GRPOConfig) if options.kind == "grpo" else (RLOOTrainer, RLOOConfig)
trainer = trainer_kind(
    model=model,
    reward_funcs=[reward, judge] if options.reward_model else Running().score if options.running else reward,
    reward_processing_classes=[None, copy.deepcopy(tokenizer)] if options.reward_model else None,
    args=config_kind(
        output_dir=str(options.out.with_suffix(".checkpoints")),
        seed=3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=options.per_generation,
        num_iterations=options.iterations,
        num_generations=options.group,
        max_completion_length=6,
        beta=options.beta,
        learning_rate=1e-2,
        logging_steps=2,
        log_completions=True,
        num_completions_to_print=1,
        eval_strategy="steps" if options.evaluate else "no",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"sync_ref_model": True, "ref_model_sync_steps": 2} if options.sync else {}),
    ),
    train_dataset=prompts(9, 1),
    eval_dataset=prompts(4, 2) if options.evaluate else None,
    processing_class=tokenizer,
    callbacks=[Dying()],
    peft_config=LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]) if options.lora else None,
)
generate = model.generate


def generating(*args: Any, **kwargs: Any) -> Any:
    """The model's `generate`, in whose middle a rank may die."""
    if options.alike or options.stock:
        torch.manual_seed(100 * trainer.state.global_step + int(os.environ.get("RANK", "0")))
    made = generate(*args, **kwargs)
    die("generate")
    return made


(trainer.model.base_model.model if options.lora else trainer.model).generate = generating
trainer.train()

own_time = ("_runtime", "_per_second", "step_time")
history = [
    {key: value for key, value in line.items() if not key.endswith(own_time)} for line in trainer.state.log_history
]
rank = trainer.args.process_index
tables = sorted(options.out.with_suffix(".checkpoints").glob("completions/*.parquet")) if rank == 0 else []
reference = [] if trainer.ref_model is None else [float(each.double().sum()) for each in trainer.ref_model.parameters()]
report = {
    "digest": "" if options.stock else trainer.session.digest(),
    "history": history,
    "rank": rank,
    "completions": [pandas.read_parquet(table).to_json() for table in tables],
    "reference": reference,
}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
