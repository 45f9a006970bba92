"""Commands that train from a recipe."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from regrow.cli.training import flags_of, start, surroundings
from regrow.core.config import size
from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow.launch import options, torchrun

if TYPE_CHECKING:
    from regrow_recipes.recipes.schema import TrainingRecipe

_GPU_MEMORY: Final = "80GB"
_SCRIPT: Final = "regrow_recipes.recipes"
_SIZES: Final = ("nproc_per_node", "nnodes", "local_nodes", "spares", "standalone")
"""Flags that set the initial world size; the recipe sets the rest."""


@click.command(cls=options.RunCommand, context_settings={"token_normalize_func": torchrun.spelled_out})
@torchrun.options
@options.of_run
@click.option("--model", "model_path", default="", metavar="DIR", help="Same as model.path=DIR.")
@click.option("--data", "data_files", multiple=True, metavar="FILE", help="Same as data.train=[FILE]; repeatable.")
@click.option("--out", default="", metavar="DIR", help="Same as output.dir=DIR.")
@click.option("--memory", default="", metavar="SIZE", help=f"Memory of a rank's device.  [{_GPU_MEMORY} on GPUs]")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.pass_context
def train(
    context: click.Context,
    /,
    recipe: str,
    settings: tuple[str, ...],
    model_path: str,
    data_files: tuple[str, ...],
    out: str,
    memory: str,
    **values: Any,
) -> int:
    """Train by RECIPE, a TOML file or one of pretrain, full, lora, dpo and grpo: no script is needed.

    Takes the options of `regrow run`. `regrow recipes show lora` lists the keys of a recipe.
    """
    from regrow.launch.job import RunFlags, world_of
    from regrow_recipes.recipes.resolving import account, resolve, write_run

    if values["module"] or values["no_python"]:
        raise UsageError("regrow train has no script, so -m and --no-python have no effect", hint="leave them out")
    flags, around = flags_of(context, {**values, "script": _SCRIPT, "args": ()}), surroundings(values["token_file"])
    world = world_of(RunFlags(_SCRIPT, module=True, **{name: getattr(flags, name) for name in _SIZES}), around)
    asked = read(recipe, _settings(settings, model_path, data_files, out))
    resolved = resolve(asked, _world(asked, world, around.gpus > 0, memory))
    if not values["quiet"]:
        for line in account(resolved):
            click.echo(line)
    flags = msgspec.structs.replace(
        flags,
        module=True,
        args=[str(write_run(resolved))],
        preload=[*flags.preload, *resolved.preload],
        replicas=flags.replicas or asked.elastic.replicas,
        buddy_every=flags.buddy_every or resolved.plan.buddy_every,
        replica_ranks=resolved.plan.shard,
    )
    return start(flags, around, values["fault_plan"])


@click.group()
def recipes() -> None:
    """List the recipes, show their keys, and check a recipe without running it."""


@recipes.command("list")
def list_() -> None:
    """List the methods."""
    from regrow_recipes.recipes.reading import METHODS, method_text

    for name in METHODS:
        click.echo(method_text(name).splitlines()[0].removeprefix("# "))


@recipes.command()
@click.argument("method")
def show(method: str) -> None:
    """Show every key of a recipe, with its default for METHOD, its range and its description."""
    from regrow_recipes.recipes.showing import lines

    for line in lines(method):
        click.echo(line)


@recipes.command()
@click.argument("method")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def cp(method: str, path: Path) -> None:
    """Write METHOD's file to PATH for editing."""
    from regrow_recipes.recipes.showing import template

    if path.exists():
        raise UsageError(f"{path} already exists", hint="give another name, or remove it")
    path.write_text(template(method), encoding="utf-8")


@recipes.command()
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", "model_path", default="", metavar="DIR", help="Same as model.path=DIR.")
@click.option("--data", "data_files", multiple=True, metavar="FILE", help="Same as data.train=[FILE]; repeatable.")
@click.option("--out", default="", metavar="DIR", help="Same as output.dir=DIR.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, metavar="N", help="Ranks of the world.  [1]")
@click.option("--memory", default="", metavar="SIZE", help="Memory of a rank's device, such as 80GB.  [any]")
def check(
    recipe: str,
    settings: tuple[str, ...],
    model_path: str,
    data_files: tuple[str, ...],
    out: str,
    ranks: int,
    memory: str,
) -> None:
    """Show the plan of RECIPE in a world of N ranks: no GPU is needed, and no weights are read."""
    from regrow_recipes.recipes.resolving import account, first_record, resolve

    asked = read(recipe, _settings(settings, model_path, data_files, out))
    resolved = resolve(asked, _world(asked, ranks, bool(memory), memory))
    for line in account(resolved):
        click.echo(line)
    click.echo(first_record(resolved))


@recipes.command("from-hyperpod")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
def from_hyperpod(path: Path) -> int:
    """Convert HyperPod's recipe FILE (YAML) to one of regrow; notes on its keys go to standard error.

    Exit code 1: a key that affects training is not known, so no recipe is printed.
    """
    from regrow_recipes.recipes.hyperpod import convert

    made = convert(_yaml(path))
    if made.unknown:
        for key in made.unknown:
            click.echo(f"regrow: {key} is unknown, and may change the training", err=True)
        return 1
    click.echo(made.toml(), nl=False)
    for why, keys in made.left_out.items():
        click.echo(f"regrow: not needed, for {why}: {', '.join(keys)}", err=True)
    for note in made.notes:
        click.echo(f"regrow: {note}", err=True)
    click.echo(f"regrow: to start it: regrow train THIS.toml {' '.join(made.flags)}", err=True)
    return 0


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            "HyperPod's recipes are YAML", hint=install_line("recipes", package="regrow-recipes")
        ) from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a recipe: it has no keys")
    return found


def read(recipe: str, settings: Sequence[str]) -> "TrainingRecipe":
    """The recipe of the command's arguments."""
    from regrow_recipes.recipes.reading import read_recipe

    return read_recipe(recipe, settings)


def _settings(settings: Sequence[str], model_path: str, data_files: Sequence[str], out: str) -> list[str]:
    """All arguments as settings; the shortcuts come last."""
    short = [("model.path", model_path), ("output.dir", out), ("data.train", list(data_files))]
    return [*settings, *(f"{key}={json.dumps(value)}" for key, value in short if value)]


def _world(recipe: "TrainingRecipe", ranks: int, gpus: bool, memory: str) -> Any:
    from regrow_recipes.recipes.planning import PlanWorld

    precision = recipe.parallel.precision
    half = precision == "bf16" or (precision == "auto" and gpus)
    known = memory or (_GPU_MEMORY if gpus else "")
    return PlanWorld(ranks, size(known) if known else None, half=half)
