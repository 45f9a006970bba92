"""Resolves a recipe, a world and the files on disk to the run that every worker reads, and describes it."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_recipes.recipes.facts import ModelFacts, model_facts, preloads, refusal, short
from regrow_recipes.recipes.planning import (
    PlanWorld,
    RecipePlan,
    in_bytes,
    plan,
    plan_rollouts,
    recovery_costs,
    steps_of,
)
from regrow_recipes.recipes.preparing import AboutRows, data_files, prepared
from regrow_recipes.recipes.prompts import prepared_prompts
from regrow_recipes.recipes.rewards import check_there
from regrow_recipes.recipes.schema import Run, TrainingRecipe

RUN_FILE = "run.json"
_NEEDED = ("transformers", "tokenizers", "safetensors", "peft", "jinja2")
_NEEDED_BESIDE = {"grpo": ("accelerate", "datasets", "trl")}


class Resolved(msgspec.Struct, frozen=True):
    """All that is known before the first worker starts."""

    run: Run
    facts: ModelFacts
    plan: RecipePlan
    about: AboutRows
    world: PlanWorld

    @property
    def preload(self) -> list[str]:
        """Modules that the zygote imports, so that a replaced worker need not."""
        return [*preloads(self.facts.family), *(["peft"] if self.run.recipe.adapts else [])]


def check_installed(method: str = "") -> None:
    """Raise `UsageError` if a package that recipes, or the recipes of a method, need is not installed."""
    for needed, extra in ((_NEEDED, "recipes"), (_NEEDED_BESIDE.get(method, ()), "trl")):
        missing = [name for name in needed if find_spec(name) is None]
        if missing:
            raise UsageError(f"recipes need {', '.join(missing)}", hint=install_line(extra, package="regrow-recipes"))


def resolve(recipe: TrainingRecipe, world: PlanWorld) -> Resolved:
    """Resolve a recipe; no weights are read.

    Raises:
        UsageError: lists all errors that can be found before the start.
    """
    check_installed(recipe.method)
    generates = recipe.method == "grpo"
    config = _config_of(recipe)
    facts = model_facts(config)
    if why := refusal(config):
        raise UsageError(f"{recipe.model.path} cannot be trained: {why}")
    _check_tokenizer(recipe)
    targets = facts.targets(recipe.lora.targets) if recipe.adapts else []
    if generates:
        check_there(recipe.reward)
    planned = (plan_rollouts if generates else plan)(facts, recipe, world)
    files = data_files(recipe.data.train)
    eval_files = data_files(recipe.data.eval, "data.eval")
    prepare = prepared_prompts if generates else prepared
    folder, about = prepare(recipe, files)
    eval_folder = str(prepare(recipe, eval_files)[0]) if eval_files else ""
    if targets:
        recipe = msgspec.structs.replace(recipe, lora=msgspec.structs.replace(recipe.lora, targets=targets))
    documents = 2 if recipe.method == "dpo" else 1
    tokens = planned.rows * recipe.data.length * documents
    run = Run(
        recipe=_absolute(recipe),
        model_config=config,
        data=str(folder),
        eval_data=eval_folder,
        steps=steps_of(recipe, about.rows * _completions(recipe), planned.rows),
        microbatches=planned.microbatches,
        micro=planned.micro,
        shard=planned.shard,
        recompute=planned.recompute,
        tokens_per_step=tokens,
        flops_per_token=facts.flops_per_token(_usual_length(about, recipe), frozen=recipe.adapts),
    )
    return Resolved(run, facts, planned, about, world)


def write_run(resolved: Resolved) -> Path:
    """Write the run to a file that every worker of the job reads, newcomers too."""
    path = Path(resolved.run.recipe.output.dir) / RUN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(resolved.run)))
    return path


def account(resolved: Resolved) -> Iterator[str]:
    """Describe the model, the data, the plan and its cost, in lines for people."""
    run, facts, planned, about = resolved.run, resolved.facts, resolved.plan, resolved.about
    recipe = run.recipe
    active = "" if facts.active == facts.parameters else f", {facts.active:,} ({short(facts.active)}) active"
    yield f"model      {facts.family}, {facts.parameters:,} parameters ({short(facts.parameters)}){active}"
    if recipe.adapts:
        number = facts.adapter_parameters(facts.targets(recipe.lora.targets), recipe.lora.rank)
        yield f"adapter    {number:,} parameters on {', '.join(facts.targets(recipe.lora.targets))}"
    if recipe.method == "grpo":
        yield f"data       {about.records:,} prompts, {recipe.grpo.generations} completions of each at a time"
    else:
        full = 100 * about.tokens / (about.rows * recipe.data.length * (2 if about.format == "preference" else 1))
        yield (
            f"data       {about.records:,} records ({about.format}), {about.tokens:,} tokens, {about.counted:,} of "
            f"them count; {about.rows:,} rows of {recipe.data.length}, {full:.0f}% full"
        )
    if about.cut:
        yield f"           {about.cut:,} records are longer than a row and are cut off: give a larger data.length"
    if about.turns_left_out:
        yield f"           {about.turns_left_out:,} answers do not count: the chat template rewrites them later"
    yield (
        f"step       {planned.rows} rows = {planned.microbatches} micro-batches of {planned.micro} for each of "
        f"{planned.shard} ranks; {run.tokens_per_step:,} tokens; {run.steps:,} steps"
    )
    yield f"FLOPs      {short(run.flops_per_token)} a token, {short(run.flops_per_token * run.tokens_per_step)} a step"
    parallel = "DDP" if planned.shard == 1 else "FSDP2" if planned.replicas == 1 else "HSDP"
    again = "activations recomputed in the backward" if planned.recompute else "activations kept"
    yield f"world      {planned.replicas} replicas of {planned.shard} ranks ({parallel}), {again}"
    parts = planned.memory
    yield (
        f"memory     {in_bytes(parts.total)} a rank: {in_bytes(parts.weights)} frozen weights, "
        f"{in_bytes(parts.training)} what trains, {in_bytes(parts.gathered)} gathered, "
        f"{in_bytes(parts.activations)} activations, {in_bytes(parts.logits)} logits"
    )
    for note in planned.notes:
        yield f"note       {note}"
    yield "recovery costs"
    for flag, cost in recovery_costs(planned):
        yield f"  {flag:<22} {cost}"


def first_record(resolved: Resolved) -> str:
    """The first record as the model sees it; for a method that generates, the record itself."""
    if resolved.about.format == "prompt":
        return f"first record:\n{resolved.about.first}"
    return f"first record, with what counts in [[ ]]:\n{resolved.about.first}"


def _completions(recipe: TrainingRecipe) -> int:
    """Completions of a record in an epoch, counted each time an update uses them; 1 if the method generates none."""
    return recipe.grpo.generations * recipe.grpo.iterations if recipe.method == "grpo" else 1


def _usual_length(about: AboutRows, recipe: TrainingRecipe) -> int:
    """Typical length of a document: in packed rows, it decides the FLOPs of attention."""
    return max(1, min(recipe.data.length, about.tokens // max(1, about.documents)))


def _config_of(recipe: TrainingRecipe) -> dict[str, Any]:
    if recipe.model.config:
        return dict(recipe.model.config)
    path = Path(recipe.model.path).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{recipe.model.path} is not a folder with a config.json",
            hint="model.path is a local folder in Hugging Face's layout: hf download NAME --local-dir DIR",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return dict(config)


def _check_tokenizer(recipe: TrainingRecipe) -> None:
    folder = Path(recipe.tokenizer).expanduser()
    if not any(folder.glob("tokenizer*")):
        raise UsageError(f"{folder} has no tokenizer", hint="give model.tokenizer, a folder with a tokenizer.json")


def _absolute(recipe: TrainingRecipe) -> TrainingRecipe:
    """The recipe with absolute paths, since workers may have another working directory."""

    def whole(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    model = msgspec.structs.replace(
        recipe.model, path=whole(recipe.model.path), tokenizer=whole(recipe.model.tokenizer)
    )
    output = msgspec.structs.replace(recipe.output, dir=whole(recipe.output.dir))
    place, _, name = recipe.reward.function.rpartition(":")
    function = f"{whole(place)}:{name}" if place.endswith(".py") else recipe.reward.function
    reward = msgspec.structs.replace(recipe.reward, function=function)
    return msgspec.structs.replace(recipe, model=model, output=output, reward=reward)
