"""A tiny language model under Hugging Face's trainers: evaluation, saving, a schedule and a callback of one's own."""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--die-in-evaluation", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
parser.add_argument("--after", default=None, metavar="RANK@PLACE,...", help="evaluate and predict at the end too")
parser.add_argument("--invariant", action="store_true")
parser.add_argument("--microbatches", type=int, default=None)
parser.add_argument("--in-order", action="store_true", help="no shuffling, no dropout")
parser.add_argument("--no-evaluation", action="store_true", help="its loss depends on the number of ranks")
parser.add_argument("--pace", type=float, default=0.0, help="see pacing.py")
parser.add_argument("--stock", action="store_true", help="the Trainer of transformers itself")
options = parser.parse_args()
if options.stock:
    from transformers import Trainer, TrainingArguments
else:
    from regrow_recipes.adapters.transformers import Trainer, TrainingArguments
VOCABULARY, LENGTH = 64, 12


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, of which each row masks another number."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: index % 7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts what it hears, by step; and dies once where it is told to."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}
        self.place = ""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.setdefault("begin", []).append(state.global_step)
        pause(options.pace, state.global_step, options.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.setdefault("end", []).append(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.setdefault("evaluate", []).append(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        die(self.place)
        rank, step = options.die_in_evaluation
        mark = options.out.with_suffix(".died")
        if (args.process_index, state.global_step) == (rank, step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def die(place: str) -> None:
    """Once, where it was asked for."""
    rank = os.environ.get("RANK", "0")
    if place and f"{rank}@{place}" in (options.after or "").split(","):
        mark = options.out.with_suffix(f".died-{rank}-{place}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if options.invariant or options.microbatches:
    import regrow

    regrow.init(seed=3, invariant=options.invariant)
arguments = TrainingArguments(
    output_dir=str(options.out.with_suffix(".checkpoints")),
    seed=3,
    use_cpu=True,
    max_steps=options.steps,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    logging_steps=2,
    eval_strategy="no" if options.no_evaluation else "steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=6,
    train_sampling_strategy="sequential" if options.in_order else "random",
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    attention_dropout=0.0 if options.in_order else 0.1,
)
counting = Counting()
more = {} if options.microbatches is None else {"microbatches": options.microbatches}
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Rows(48 if options.in_order else 50, 1),
    eval_dataset=Rows(11, 2),
    callbacks=[counting],
    **more,
)
trainer.train()

found: list[Any] = []
if options.after is not None:
    counting.place = "evaluate"
    found.append(trainer.evaluate(metric_key_prefix="final")["final_loss"])
    counting.place = "predict"
    predicted = trainer.predict(Rows(9, 4))
    found += [predicted.metrics["test_loss"], predicted.predictions.shape, float(predicted.predictions.sum())]
    counting.place = ""
    die("save")
    trainer.save_model(str(options.out.with_suffix(".model")))

own_time = ("_runtime", "_per_second")
history = [
    {key: value for key, value in line.items() if not key.endswith(own_time)} for line in trainer.state.log_history
]
rank = arguments.process_index
digest = "" if options.stock else trainer.session.digest()
report = {"digest": digest, "history": history, "rank": rank, "heard": counting.heard, "found": found}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
