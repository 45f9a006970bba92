"""The plain side of `grpo.py`: TRL's own `GRPOTrainer` under torchrun, in a script without regrow.

Rank 0 writes the mean reward of each update as JSON. With `--alike` the generators are seeded at each update as by
regrow, so that both sides sample the same tokens.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from datasets import Dataset
from grpo_reward import even
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from regrow.data.seeding import seed_everything

MICRO = 8
"""Completions of a forward pass."""


class Seeded(TrainerCallback):  # type: ignore[misc]
    """Seeds the generators at each update as regrow does."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seed before the update generates."""
        seed_everything(args.seed, state.global_step, args.process_index * args.gradient_accumulation_steps)


def main() -> None:
    """Train, and write the rewards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="model and prompts")
    parser.add_argument("--out", type=Path, required=True, help="for the rewards")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True, help="completions of an update, in all ranks")
    parser.add_argument("--completion", type=int, required=True, help="tokens of one")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--alike", action="store_true")
    args = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    prompts = [json.loads(line) for line in (args.folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32),
        reward_funcs=even,
        args=GRPOConfig(
            output_dir=str(args.out.with_suffix(".trainer")),
            seed=args.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=args.steps,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=args.samples // MICRO // world,
            num_generations=8,
            max_completion_length=args.completion,
            beta=0.0,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        callbacks=[Seeded()] if args.alike else [],
    )
    trainer.train()
    if trainer.args.process_index == 0:
        rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
        args.out.write_text(json.dumps(rewards))


if __name__ == "__main__":
    main()
