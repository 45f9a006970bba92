"""Training by rewards: TRL's GRPO on regrow. Every worker of such a job runs this, newcomers too."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import regrow
from regrow.devices import accelerators
from regrow.train.session import Session
from regrow_recipes.recipes.building import adapter_config, bare, half
from regrow_recipes.recipes.exporting import export, gathered
from regrow_recipes.recipes.prompts import read_prompts
from regrow_recipes.recipes.rewards import reward_of
from regrow_recipes.recipes.schema import Run
from regrow_recipes.recipes.training import say

_SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "linear": {"lr_scheduler_type": "linear"},
    "constant": {"lr_scheduler_type": "constant_with_warmup"},
}


def train(run: Run) -> Session:
    """Train a recipe to its end; returns the session with the final state."""
    recipe = run.recipe
    session = regrow.init(seed=recipe.train.seed)
    from regrow_recipes.adapters.trl import GRPOConfig, GRPOTrainer

    device = accelerators.choose(session.local_rank)
    model = bare(run, device, load=not session.newcomer)
    # TRL loads the reference model of `grpo.beta` from the model's own path.
    model.config._name_or_path = recipe.model.path  # noqa: SLF001
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_of(recipe.reward),
        args=GRPOConfig(**settings(run, world=session.world_size, device=device)),
        train_dataset=Dataset.from_list(read_prompts(run.data)),
        eval_dataset=Dataset.from_list(read_prompts(run.eval_data)) if run.eval_data else None,
        processing_class=AutoTokenizer.from_pretrained(recipe.tokenizer, local_files_only=True),
        peft_config=adapter_config(run) if recipe.adapts else None,
        callbacks=[_Lines()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    save(run, trainer.model, session)
    return session


def settings(run: Run, *, world: int, device: torch.device) -> dict[str, Any]:
    """TRL's arguments for a recipe, in a world of this size."""
    recipe, grpo, optim = run.recipe, run.recipe.grpo, run.recipe.optim
    return {
        "output_dir": recipe.output.dir,
        "seed": recipe.train.seed,
        "use_cpu": device.type == "cpu",
        "bf16": half(recipe, device),
        "gradient_checkpointing": run.recompute,
        "max_steps": run.steps,
        "per_device_train_batch_size": run.micro,
        "per_device_eval_batch_size": grpo.generations,
        "gradient_accumulation_steps": run.microbatches // world,
        "num_generations": grpo.generations,
        "num_iterations": grpo.iterations,
        "max_completion_length": grpo.completion,
        "temperature": grpo.temperature,
        "beta": grpo.beta,
        "learning_rate": optim.lr,
        "warmup_steps": round(optim.warmup * run.steps),
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip,
        "logging_steps": recipe.train.log_every,
        "eval_strategy": "steps" if run.eval_data else "no",
        "eval_steps": recipe.train.eval_every or run.steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **_SCHEDULES[optim.schedule],
    }


class _Lines(TrainerCallback):  # type: ignore[misc]
    """Prints a progress line each time the trainer logs, on rank 0."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Print the main figures of a log line."""
        kind = "eval_" if "eval_reward" in logs else ""
        if not state.is_world_process_zero or f"{kind}loss" not in logs:
            return
        shown = ["reward", "reward_std", "completions/mean_length", "kl", "loss", "grad_norm"]
        numbers = [
            f"{name.rpartition('/')[2]} {logs[kind + name]:.4g}" for name in shown if logs.get(kind + name) is not None
        ]
        place = "evaluated after" if kind else "step"
        say(f"{place} {state.global_step}/{state.max_steps}: {', '.join(numbers)}")


@regrow.restartable
def save(run: Run, model: torch.nn.Module, session: Session) -> None:
    """Write the result on rank 0."""
    weights = gathered(run, model)
    if session.is_main:
        for folder in export(run, model, weights, Path(run.recipe.output.dir)):
            say(f"written: {folder}")
