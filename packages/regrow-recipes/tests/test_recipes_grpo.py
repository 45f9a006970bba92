"""Recipes that train by rewards: what is refused, who judges, and how completions are shared out."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from regrow.core.errors import DataError, UsageError
from regrow_recipes.recipes.facts import model_facts
from regrow_recipes.recipes.planning import PlanWorld, plan_rollouts
from regrow_recipes.recipes.prompts import prepared_prompts, read_prompts
from regrow_recipes.recipes.reading import read_recipe
from regrow_recipes.recipes.rewards import check_there, reward_of, verifying
from regrow_recipes.recipes.schema import RewardSection, TrainingRecipe

GIVEN = ("model.path=m", "data.train=['a']", "output.dir=o", "reward.function=rewards.py:good")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def recipe(*words: str) -> TrainingRecipe:
    return read_recipe("grpo", [*GIVEN, *words])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["reward.command=['true']"], "Give reward.function or reward.command, one of them"),
        (["reward.function=''"], "Give reward.function or reward.command, one of them"),
        (["batch.samples=12"], "batch.samples = 12: an update has whole groups of grpo.generations = 8"),
        (["grpo.completion=1024"], "data.length = 1024: no room beside grpo.completion = 1024"),
        (["elastic.replicas=1:2"], "fix the number of ranks"),
        (["parallel.shard=2"], "each rank generates with the whole model"),
        (["data.format=text"], "its records are prompts"),
        (["output.every=2"], "writes its result after the last step"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        recipe(*words)


def test_prompts_are_for_grpo_alone() -> None:
    with pytest.raises(UsageError, match='data.format = "prompt" is for grpo'):
        read_recipe("lora", ["model.path=m", "data.train=['a']", "output.dir=o", "data.format=prompt"])


def test_completions_are_shared_out_evenly_or_refused() -> None:
    facts = model_facts(LLAMA)
    planned = plan_rollouts(facts, recipe("batch.samples=48"), PlanWorld(ranks=3))
    assert (planned.shard, planned.microbatches % 3, planned.microbatches * planned.micro) == (1, 0, 48)
    with pytest.raises(UsageError, match="batch.samples = 64 completions do not divide into forwards"):
        plan_rollouts(facts, recipe(), PlanWorld(ranks=3))
    with pytest.raises(UsageError, match="the model does not fit: each rank needs"):
        plan_rollouts(facts, recipe(), PlanWorld(ranks=2, memory=1_000_000))


def test_a_function_of_a_file_is_the_reward(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def good(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    section = RewardSection(function=f"{tmp_path}/rewards.py:good")
    check_there(section)
    assert reward_of(section)(prompts=["a", "b"], completions=["x", "yyy"]) == [1, 3]
    with pytest.raises(UsageError, match="has no function bad"):
        reward_of(RewardSection(function=f"{tmp_path}/rewards.py:bad"))


def test_a_module_in_the_working_folder_is_there_as_it_is_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("def good(completions, **_):\n    return [1.0 for _ in completions]\n")
    section = RewardSection(function="my_rewards:good")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as under the console script
    with pytest.raises(UsageError, match="there is no my_rewards"):
        check_there(section)
    monkeypatch.chdir(tmp_path)
    check_there(section)
    monkeypatch.syspath_prepend(str(tmp_path))  # as a worker does
    assert reward_of(section)(prompts=["a"], completions=["x"]) == [1.0]


@pytest.mark.parametrize("name", ["scored", "json"])
def test_a_file_may_have_dataclasses_with_annotations_of_the_future_and_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Scored:\n    number: float\n"
        "def good(completions, **_):\n    return [Scored(len(text)).number for text in completions]\n"
    )
    assert reward_of(RewardSection(function=f"{tmp_path}/{name}.py:good"))(prompts=["a"], completions=["xy"]) == [2]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("function", "text"), [("good", "write"), (":f", "write"), ("no/file.py:f", "no/file"), ("nowhere9:f", "nowhere9")]
)
def test_a_reward_that_is_not_there_is_refused_before_anything_starts(function: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_there(RewardSection(function=function))


JUDGE = (
    "import json, sys\n"
    "for line in sys.stdin:\n"
    "    record = json.loads(line)\n"
    "    print(len(record['completion']) - record['wanted'] if record['prompt'] else 'null')\n"
)


def test_a_command_reads_objects_and_prints_numbers() -> None:
    judge = verifying([sys.executable, "-c", JUDGE], deadline=60)
    found = judge(prompts=["a", ""], completions=["xyz", "x"], wanted=[1, 5], completion_ids=[[1], [2]])
    assert found == [2.0, None]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import time; time.sleep(60)", "took longer than reward.deadline = 0.3 s"),
        ("raise SystemExit('no judge')", "ended with 1: no judge"),
        ("print('good')", "printed something that is not a number"),
        ("print(1); print(2)", "printed 2 numbers for 1 completions"),
    ],
)
def test_a_command_that_does_not_judge_is_told(program: str, text: str) -> None:
    judge = verifying([sys.executable, "-c", program], deadline=0.3 if "sleep" in program else 60)
    with pytest.raises(DataError, match=text):
        judge(prompts=["a"], completions=["b"])


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(DataError, match="cannot be started"):
        verifying(["no-such-judge"], deadline=60)(prompts=["a"], completions=["b"])


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_prompts_keep_the_other_keys_of_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = recipe('data.columns={ prompt = "question" }')
    files = [
        write(tmp_path / "a.jsonl", {"question": "one", "answer": 1}),
        write(tmp_path / "b.jsonl", {"question": "two", "answer": 2}),
    ]
    path, about = prepared_prompts(asked, files)
    assert read_prompts(str(path)) == [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}]
    assert (about.records, about.format, prepared_prompts(asked, files)[0]) == (2, "prompt", path)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "it has no records"),
        ([{"text": "a"}], "line 1: its prompt is neither a string"),
        ([{"prompt": ""}], "line 1: its prompt is neither a string"),
        (
            [{"prompt": "a"}, {"prompt": "b", "more": 1}],
            "line 2: its keys are more, prompt, those of the first record are prompt",
        ),
    ],
)
def test_records_that_are_no_prompts_are_refused_by_their_line(
    rows: list[object], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=text):
        prepared_prompts(recipe(), [write(tmp_path / "a.jsonl", *rows)])


def test_weights_decide_what_trains() -> None:
    assert recipe().adapts and not recipe("grpo.weights=all").adapts
    assert msgspec.json.decode(msgspec.json.encode(recipe()), type=TrainingRecipe) == recipe()
