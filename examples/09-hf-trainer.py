"""Fine-tunes a small Llama with Hugging Face's `Trainer`, and continues when a rank dies.

    regrow run --nproc-per-node 2 examples/09-hf-trainer.py
    regrow kill --rank 0                                   # in another terminal, as often as you like

In a stock script the one marked line would be `from transformers import Trainer, TrainingArguments`.
"""

import argparse
import pydoc_data.topics

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from regrow_recipes.adapters.transformers import Trainer, TrainingArguments  # regrow

TEXT = torch.tensor(list("".join(pydoc_data.topics.topics.values()).encode()))
LENGTH = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of the bytes of Python's `help()` topics."""

    def __init__(self, text: torch.Tensor) -> None:
        self.rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="out")
    options = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=options.out,
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="steps",
        save_steps=100,
        report_to=[],
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Windows(TEXT[:-4096]),
        eval_dataset=Windows(TEXT[-4096:]),
    )
    trainer.train()
    print(f"rank {trainer.session.rank}: {trainer.state.global_step} steps, state {trainer.session.digest()}")


if __name__ == "__main__":
    main()
