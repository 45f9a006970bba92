"""Conversion of HyperPod's recipes: their keys here are names alone, with values of our own."""

import copy
from pathlib import Path
from typing import Any

import pytest

from regrow.cli import main
from regrow.core.errors import UsageError
from regrow_recipes.recipes.hyperpod import Converted, convert
from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.schema import TrainingRecipe

FILLED = ['data.train=["chat.jsonl"]', 'model.path="model"']
TUNING: dict[str, Any] = {
    "version": "1",
    "run": {"name": "small", "model_type": "llm_finetuning_aws", "results_dir": "there"},
    "trainer": {"devices": 4, "num_nodes": 2},
    "training_config": {
        "mlflow": {"run_id": ""},
        "datasets": {"train_data": {"file_path": "chat.jsonl", "limit": None}, "train_val_split_ratio": 0.8},
        "model_config": {
            "model_name_or_path": "Qwen/Qwen3-0.6B",
            "attn_implementation": "sdpa",
            "peft_config": {"peft_type": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "use_dora": False},
        },
        "training_args": {
            "trainer_type": "sft",
            "learning_rate": 3e-4,
            "lr_scheduler": "linear",
            "lr_warmup_ratio": 0.2,
            "adam_betas": [0.9, 0.99],
            "weight_decay": 0.1,
            "gradient_clipping": True,
            "gradient_clipping_threshold": 0.5,
            "max_epochs": 2,
            "max_len": 512,
            "packing_samples": False,
            "seed": 3,
            "logging_steps": 5,
            "train_batch_size": 16,
            "micro_train_batch_size": 2,
            "gradient_checkpointing": True,
            "merge_weights": True,
            "aux_loss_coef": 0,
            "strategy": {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}},
            "max_ckpt_num": 3,
        },
    },
}
NEMO: dict[str, Any] = {
    "run": {"name": "large", "model_type": "hyperpod_checkpointless_nemo"},
    "display_name": "A Pre-Training",
    "trainer": {"devices": 8, "num_nodes": 16, "max_steps": 1000, "val_check_interval": 100},
    "data": {"global_batch_size": 512, "micro_batch_size": 1, "seq_length": 2048},
    "dataset": {"dataset_path": "text.parquet", "shuffle": False},
    "model": {"config": {"num_layers": 80, "recompute_granularity": "selective"}},
    "optim": {
        "config": {"optimizer": "adam", "lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1},
        "lr_scheduler": {"warmup_steps": 50, "min_lr": 3e-5},
    },
    "strategy": {"num_distributed_optimizer_instances": 2, "tensor_model_parallel_size": 8},
    "mmap": {"cache_dir": "/dev/shm/x", "prefetch_length": 10},
}


def changed(recipe: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(recipe)
    *above, last = path.split(".")
    inner = made
    for name in above:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return made


def ours(made: Converted, folder: Path) -> TrainingRecipe:
    assert made.unknown == []
    path = folder / "ours.toml"
    path.write_text(made.toml())
    return read_recipe(str(path), FILLED)


def test_what_a_fine_tuning_says_is_taken_key_by_key(tmp_path: Path) -> None:
    made = convert(TUNING)
    recipe = ours(made, tmp_path)
    assert (recipe.method, recipe.lora.rank, recipe.lora.alpha, recipe.lora.dropout) == ("lora", 8, 16.0, 0.1)
    assert (recipe.optim.lr, recipe.optim.schedule, recipe.optim.warmup, recipe.optim.clip) == (
        3e-4,
        "linear",
        0.2,
        0.5,
    )
    assert (recipe.optim.betas, recipe.optim.weight_decay) == ((0.9, 0.99), 0.1)
    assert (recipe.train.epochs, recipe.train.seed, recipe.train.log_every) == (2.0, 3, 5)
    assert (recipe.batch.samples, recipe.batch.micro, recipe.data.length, recipe.data.pack) == (16, 2, 512, False)
    assert (recipe.parallel.recompute, recipe.output.merge, recipe.output.dir) == (True, True, "out/small")
    assert made.settings["model"]["path"] == "Qwen/Qwen3-0.6B"
    assert made.flags == ["--nproc-per-node", "4", "--nnodes", "2"]
    assert any(
        note.startswith("training_config.datasets.train_val_split_ratio: nothing is split") for note in made.notes
    )
    assert sorted(key for keys in made.left_out.values() for key in keys) == sorted(
        [
            "version",
            "run.results_dir",
            "training_config.mlflow.run_id",
            "training_config.datasets.train_data.limit",
            "training_config.model_config.attn_implementation",
            "training_config.training_args.strategy.fsdp_config.sharding_strategy",
            "training_config.training_args.max_ckpt_num",
        ]
    )


def test_the_methods_are_told_apart(tmp_path: Path) -> None:
    kind = "training_config.training_args.trainer_type"
    whole = changed(TUNING, "training_config.model_config.peft_config", None)
    assert ours(convert(whole), tmp_path).method == "full"
    preferences = changed(changed(TUNING, kind, "dpo"), "training_config.training_args.beta", 0.2)
    recipe = ours(convert(preferences), tmp_path)
    assert (recipe.method, recipe.dpo.beta, recipe.data.pack) == ("dpo", 0.2, False)
    of_all = ours(convert(changed(whole, kind, "dpo")), tmp_path)
    assert (of_all.method, of_all.dpo.weights, of_all.adapts) == ("dpo", "all", False)
    with pytest.raises(UsageError, match="have no method for trainer_type 'grpo'"):
        convert(changed(TUNING, kind, "grpo"))


def test_an_adapter_that_only_the_name_tells_of_is_one_and_that_is_said(tmp_path: Path) -> None:
    made = convert(changed(NEMO, "display_name", "A LoRA on GPU"))
    assert ours(made, tmp_path).method == "lora"
    assert "the method lora comes from display_name: no key names the trained weights" in made.notes
    told = convert(changed(changed(NEMO, "display_name", "A LoRA on GPU"), "model.peft.peft_scheme", None))
    assert told.method == "full", "a key says so"


def test_a_checkpointless_pretraining_is_one_of_steps(tmp_path: Path) -> None:
    made = convert(NEMO)
    recipe = ours(made, tmp_path)
    assert (recipe.method, recipe.train.steps, recipe.optim.warmup, recipe.optim.betas) == (
        "pretrain",
        1000,
        0.05,
        (0.9, 0.95),
    )
    assert (recipe.batch.samples, recipe.data.length, recipe.parallel.recompute) == (512, 2048, True)
    assert recipe.train.eval_every == 0, "there is nothing to evaluate on"
    assert made.settings["data"]["train"] == ["text.parquet"]


def test_elastic_policies_are_flags_and_what_their_sizes_would_have_changed_is_told() -> None:
    policy = {
        "is_elastic": True,
        "min_nodes": 1,
        "max_nodes": 16,
        "graceful_shutdown_timeout": 600,
        "scaling_timeout": 9,
    }
    size = {
        "trainer": {"num_nodes": 8},
        "training_config": {"training_args": {"learning_rate": 4e-4, "train_batch_size": 128}},
    }
    made = convert({**TUNING, "elastic_policy": policy, "scale_config": {"8": size}})
    assert made.unknown == []
    assert made.flags == ["--nproc-per-node", "4", "--nnodes", "1:16", "--drain-grace", "600s"]
    assert [note for note in made.notes if note.startswith("scale_config")] == [
        "scale_config would have changed the learning rate from 0.0003 to 0.0004 with the number of nodes: here "
        "it stays 0.0003",
        "scale_config would have changed the global batch from 16 to 128 with the number of nodes: here it stays 16",
    ]


def test_a_key_that_trains_and_is_not_known_is_an_error() -> None:
    assert convert(changed(TUNING, "training_config.training_args.new_loss", 1)).unknown == [
        "training_config.training_args.new_loss"
    ]
    assert convert(changed(TUNING, "training_config.training_args.aux_loss_coef", 0.01)).unknown == [
        "training_config.training_args.aux_loss_coef = 0.01"
    ]


def test_what_is_none_of_their_recipes_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="not a recipe of HyperPod"):
        convert({"a": 1})
    with pytest.raises(UsageError, match="recipes do not train Llama 4"):
        convert(changed(TUNING, "training_config.model_config.model_name_or_path", "meta-llama/Llama-4-Scout"))


def test_the_command_prints_a_recipe_or_says_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(TUNING))
    assert main(["recipes", "from-hyperpod", str(path)]) == 0
    said = capsys.readouterr()
    assert 'extends = "lora"' in said.out
    assert "to start it: regrow train THIS.toml --nproc-per-node 4 --nnodes 2" in said.err
    path.write_text(yaml.safe_dump(changed(TUNING, "training_config.training_args.new_loss", 1)))
    assert main(["recipes", "from-hyperpod", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "new_loss is unknown" in said.err
    path.write_text("[1, 2]\n")
    assert main(["recipes", "from-hyperpod", str(path)]) == 2
    assert "is not a recipe" in capsys.readouterr().err
