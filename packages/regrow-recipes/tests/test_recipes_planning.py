"""The planner: the smallest shard that fits, then replicas; what a step has; what it all costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from regrow.core.errors import UsageError
from regrow_recipes.recipes.facts import model_facts
from regrow_recipes.recipes.planning import PlanWorld, RecipePlan, plan, recovery_costs, steps_of
from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.schema import TrainingRecipe

REAL: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recipe_configs.json").read_text())
H100 = 80_000_000_000


def recipe(method: str, *words: str) -> TrainingRecipe:
    return read_recipe(method, ["model.path=/m", 'data.train=["x"]', "output.dir=o", *words])


def planned(name: str, method: str, ranks: int, *words: str, memory: int | None = H100) -> RecipePlan:
    return plan(model_facts(REAL[name]["config"]), recipe(method, *words), PlanWorld(ranks, memory, half=True))


@pytest.mark.parametrize(
    ("name", "method", "ranks", "shard", "replicas"),
    [
        ("llama-3.2-1b", "full", 8, 1, 8),
        ("llama-3.1-8b", "full", 8, 4, 2),
        ("llama-3.1-8b", "lora", 8, 1, 8),
        ("llama-3.1-70b", "lora", 8, 4, 2),
        ("llama-3.1-70b", "full", 64, 32, 2),
    ],
)
def test_the_smallest_shard_that_fits_and_then_replicas(
    name: str, method: str, ranks: int, shard: int, replicas: int
) -> None:
    made = planned(name, method, ranks, f"batch.samples={ranks * 4}", f"elastic.replicas=1:{replicas}")
    assert (made.shard, made.replicas) == (shard, replicas)
    assert made.memory.total <= 0.9 * H100


def test_what_fits_nowhere_is_told_with_how_much_it_lacks() -> None:
    with pytest.raises(UsageError, match=r"does not fit: over 8 ranks each needs 163\.4 GB of 80\.0 GB"):
        planned("llama-3.1-70b", "full", 8, "batch.samples=64")


def test_one_replica_has_copies_and_says_so() -> None:
    made = planned("llama-3.1-8b", "full", 4)
    assert (made.shard, made.replicas, made.buddy_every) == (4, 1, 10)
    assert "--buddy-every 10" in made.notes[0]
    assert planned("llama-3.1-8b", "full", 8).buddy_every == 0


def test_a_step_has_the_rows_that_were_asked_for_in_any_world() -> None:
    made = planned("llama-3.2-1b", "pretrain", 8)
    assert made.rows == made.microbatches * made.micro * made.shard == 524288 // 4096
    odd = planned("llama-3.2-1b", "full", 2, "batch.samples=7", "batch.micro=2")
    assert odd.rows == 8
    assert odd.notes == ["a step has 8 rows instead of 7: whole micro-batches of 2"]


@pytest.mark.parametrize(
    ("rows", "ranks", "elastic", "micro", "microbatches"),
    [
        (64, 1, "", 8, 8),
        (8, 2, "", 4, 2),
        (24, 4, "", 6, 4),  # 8 would give three of four replicas work
        (12, 1, "", 6, 2),  # 8 would make 16 rows of 12
        (7, 1, "", 7, 1),
        (64, 2, "1:16", 4, 16),  # the largest world has one for each replica
    ],
)
@pytest.mark.parametrize("memory", [None, H100])
def test_the_largest_micro_batch_that_leaves_rows_and_balance_as_they_are(
    memory: int | None, rows: int, ranks: int, elastic: str, micro: int, microbatches: int
) -> None:
    """Also if the memory is not known: a tiny model's forward takes little of any."""
    tiny = REAL["llama-3.2-1b"]["config"] | {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    words = [f"batch.samples={rows}", f'elastic.replicas="{elastic}"', "data.length=128"]
    made = plan(model_facts(tiny), recipe("full", *words), PlanWorld(ranks, memory))
    assert (made.micro, made.microbatches, made.rows, made.notes) == (micro, microbatches, rows, [])


def test_without_a_known_memory_a_micro_batch_takes_a_gigabyte_at_most() -> None:
    short, long = (planned("llama-3.2-1b", "lora", 1, f"data.length={length}", memory=None) for length in (256, 4096))
    assert long.micro == 1, "a row alone takes more"
    assert 1 < short.micro <= 8
    assert short.memory.activations + short.memory.logits <= 1e9


def test_a_micro_batch_that_was_said_is_not_judged_where_no_memory_is_known() -> None:
    made = planned("llama-3.2-1b", "lora", 2, "batch.micro=8", memory=None)
    assert (made.shard, made.micro) == (1, 8)


def test_there_must_be_a_row_for_each_rank_of_the_largest_world() -> None:
    with pytest.raises(UsageError, match="a step has 4 rows for 8 replicas of 1 ranks .give batch.samples=8 or more"):
        planned("llama-3.2-1b", "full", 8, "batch.samples=4")
    with pytest.raises(UsageError, match="a step has 4 rows for 16 replicas"):
        planned("llama-3.2-1b", "full", 2, "batch.samples=4", "elastic.replicas=1:16")
    with pytest.raises(UsageError, match="batch.micro = 8, but a step has only 2 rows for each rank"):
        planned("llama-3.2-1b", "full", 2, "batch.samples=4", "batch.micro=8")
    with pytest.raises(UsageError, match="parallel.shard = 3 does not divide 8 ranks"):
        planned("llama-3.2-1b", "full", 8, "parallel.shard=3")


def test_an_adapters_memory_is_its_frozen_weights_and_little_more() -> None:
    facts = model_facts(REAL["llama-3.1-8b"]["config"])
    made = planned("llama-3.1-8b", "lora", 1)
    assert made.memory.weights == 2 * facts.parameters
    assert made.memory.training < 0.05 * made.memory.weights


def test_preferences_take_an_adapters_memory_or_that_of_all_weights() -> None:
    adapter, whole = (
        planned("llama-3.2-1b", "dpo", 1, f"dpo.weights={weights}", "batch.micro=1") for weights in ("adapter", "all")
    )
    full = planned("llama-3.2-1b", "full", 1, "data.length=2048", "batch.micro=1")
    assert adapter.memory.training < 0.05 * whole.memory.training
    assert (whole.memory.weights, whole.memory.training) == (0, full.memory.training)
    assert whole.memory.logits == 2 * full.memory.logits, "two answers a row"


def test_what_recovery_costs_is_told_by_flag() -> None:
    flags = [flag for flag, _ in recovery_costs(planned("llama-3.1-8b", "full", 8))]
    assert flags == ["replicas", "--standby 1", "--digest-every N", "--buddy-every K", "--checkpoint-dir DIR"]


def test_steps_come_from_epochs_or_are_said() -> None:
    assert steps_of(recipe("full", "train.epochs=2"), 100, 8) == 25
    assert steps_of(recipe("full", "train.steps=3"), 100, 8) == 3
    assert steps_of(recipe("full", "train.epochs=1"), 3, 8) == 1
    with pytest.raises(UsageError, match="there is no row to train on"):
        steps_of(recipe("full"), 0, 8)
