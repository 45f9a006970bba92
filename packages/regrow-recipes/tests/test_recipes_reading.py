"""Recipes are read whole or refused, with every error at once, its place and what to write instead."""

from pathlib import Path

import pytest

from regrow.core.errors import UsageError
from regrow_recipes.recipes.reading import METHODS, decode, method_text, read_recipe
from regrow_recipes.recipes.showing import lines, template

GOOD = ["model.path=/m", 'data.train=["x.jsonl"]', "output.dir=out"]
REWARD = ["reward.function=mine:good"]
"""Besides, where completions are judged."""

WRONG = [
    ("lora", ["optim.lrr=1"], "[optim] has no key lrr: did you mean lr? there are lr, schedule, warmup"),
    ("lora", ["batch.rank=3"], "[batch] has no key rank: rank belongs to [lora]; there are tokens, samples, micro"),
    ("lora", ["optm.lr=1"], "there is no table [optm]: did you mean optim? there are model, data, batch"),
    ("lora", ["optim.lr=fast"], 'optim.lr = "fast": give a number above 0'),
    ("lora", ["optim.lr=0"], "optim.lr = 0: give a number above 0"),
    ("lora", ["optim.lr=-1e-4"], "optim.lr = -0.0001: give a number above 0"),
    ("lora", ["optim.warmup=1"], "optim.warmup = 1: give a number from 0, below 1"),
    ("lora", ["optim.betas=[0.9]"], "optim.betas = [0.9]: give a list of 2, each a number from 0, below 1"),
    ("lora", ["optim.betas=[0.9, 1.0]"], "optim.betas = [0.9, 1.0]: give a list of 2, each a number from 0, below 1"),
    ("lora", ["optim.schedule=cosin"], 'optim.schedule = "cosin": give one of "cosine", "linear", "constant"'),
    ("lora", ["optim.clip=-1"], "optim.clip = -1: give a number from 0"),
    ("lora", ["train.steps=0.5"], "train.steps = 0.5: give a whole number from 0"),
    ("lora", ["train.log_every=0"], "train.log_every = 0: give a whole number from 1"),
    ("lora", ["data.length=long"], 'data.length = "long": give a whole number from 1'),
    ("lora", ["data.length=1"], "data.length = 1: a row needs a token to predict; give 2 or more"),
    ("lora", ["data.pack=maybe"], 'data.pack = "maybe": give true or false'),
    ("lora", ["data.train=x.jsonl"], 'data.train = "x.jsonl": give a list of strings in quotes'),
    ("lora", ["data.format=chat"], 'data.format = "chat": give one of "auto", "text", "messages"'),
    ("lora", ["data.format=preference"], 'data.format = "preference" is for dpo, and this is lora: extends = "dpo"'),
    ("dpo", ["data.format=text"], 'data.format = "text": dpo compares two answers, so its records are preferences'),
    (
        "dpo",
        ["data.pack=true"],
        "data.pack = true: dpo has pairs in its rows, which are not packed; write pack = false",
    ),
    ("pretrain", ["data.format=messages"], 'data.format = "messages": pretrain takes plain text'),
    ("lora", ["batch.micro=all"], 'batch.micro = "all": give a whole number from 1 or "auto"'),
    ("lora", ["batch.tokens=8192", "batch.samples=8"], "batch.tokens and batch.samples are both given"),
    ("pretrain", ["batch.tokens=100"], "batch.tokens = 100 is less than one row (data.length = 4096): give more"),
    ("lora", ["train.epochs=0"], "[train] needs epochs or steps: give one of them"),
    ("lora", ["train.eval_every=10"], "train.eval_every is given, but no data to evaluate on: give data.eval"),
    ("full", ["output.merge=true"], "output.merge = true: full trains all weights, there is no adapter to merge"),
    ("full", ['model.config={model_type="llama"}'], "model.config makes a model of random weights, which full cannot"),
    ("pretrain", ["model.config={}", "model.path=''"], "which model? Give model.path"),
    ("pretrain", ["model.config={hidden_size=8}"], "model.config has no model type: add model_type"),
    ("lora", ["elastic.replicas=3"], 'elastic.replicas = 3: give a string in quotes as "MIN:MAX"'),
    ("lora", ["elastic.replicas=4:2"], 'elastic.replicas = "4:2" is not a range: give MIN:MAX such as "1:8"'),
    ("lora", ["parallel.shard=0"], 'parallel.shard = 0: give a whole number from 1 or "auto"'),
    ("lora", ["lora.targets=3"], 'lora.targets = 3: give a list of strings in quotes or "auto"'),
    ("lora", ["lora=3"], "'lora=3' is not a setting (write section.key=value, for example optim.lr=2e-4)"),
    (
        "lorra",
        [],
        "there is no recipe lorra (did you mean lora? give a file, or one of pretrain, full, lora, dpo, grpo)",
    ),
]


@pytest.mark.parametrize(("method", "words", "sentence"), WRONG, ids=[" ".join(case[1]) or case[0] for case in WRONG])
def test_what_is_wrong_is_said_with_place_and_cure(method: str, words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_recipe(method, [*GOOD, *words])
    assert sentence in str(raised.value)


def test_all_errors_are_said_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        read_recipe("lora", ["optim.lrr=1", "data.pack=maybe", "optm.lr=1"])
    assert str(raised.value).startswith("lora has 3 errors:\n")
    with pytest.raises(UsageError) as raised:
        read_recipe("lora")
    sentences = str(raised.value).splitlines()[1:]
    assert [sentence.split("?")[0].strip() for sentence in sentences] == ["which model", "which data", "where to"]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_needs_model_data_and_out_alone(method: str) -> None:
    recipe = read_recipe(method, [*GOOD, *REWARD[: method == "grpo"]])
    assert (recipe.method, recipe.model.path, recipe.data.train, recipe.output.dir) == (
        method,
        "/m",
        ["x.jsonl"],
        "out",
    )


def test_a_word_is_what_toml_makes_of_it_and_else_a_text() -> None:
    recipe = read_recipe("lora", [*GOOD, "optim.lr=2e-4", 'lora.targets=["q_proj"]', "elastic.replicas=1:4"])
    assert (recipe.optim.lr, recipe.lora.targets, recipe.elastic.replicas) == (2e-4, ["q_proj"], "1:4")


def test_who_says_steps_does_not_mean_the_epochs_that_stand_below() -> None:
    recipe = read_recipe("lora", [*GOOD, "train.steps=7", "batch.tokens=16384"])
    assert (recipe.train.steps, recipe.train.epochs) == (7, 0)
    assert (recipe.batch.tokens, recipe.batch.samples) == (16384, 0)


def test_a_file_extends_a_method_or_one_other_file(tmp_path: Path) -> None:
    house = tmp_path / "house.toml"
    house.write_text('extends = "lora"\n[optim]\nlr = 3e-4\n[model]\npath = "/m"\n[output]\ndir = "o"\n')
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "house.toml"\n[data]\ntrain = ["x"]\n')
    recipe = read_recipe(str(mine))
    assert (recipe.method, recipe.optim.lr, recipe.optim.betas, recipe.data.train) == (
        "lora",
        3e-4,
        (0.9, 0.999),
        ["x"],
    )
    third = tmp_path / "third.toml"
    third.write_text('extends = "mine.toml"\n')
    with pytest.raises(UsageError, match="which extends house.toml"):
        read_recipe(str(third))


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("lr = \n")
    with pytest.raises(UsageError, match="broken.toml is not valid TOML"):
        read_recipe(str(broken))
    broken.write_text("[optim]\nlr = 1e-4\n")
    with pytest.raises(UsageError, match='no method is named: write extends = "lora" at the top'):
        read_recipe(str(broken))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_shown_of_a_method_is_what_it_does(method: str) -> None:
    import tomllib

    shown = tomllib.loads("\n".join(lines(method)))
    shown["model"] |= {"path": "/m"}
    shown["data"]["train"], shown["output"]["dir"] = ["x.jsonl"], "out"
    judged = REWARD[: method == "grpo"]
    shown["reward"] |= {"function": "mine:good"} if judged else {}
    assert decode({"method": method} | shown) == read_recipe(method, [*GOOD, *judged])
    assert template(method).startswith(method_text(method).splitlines()[0])
