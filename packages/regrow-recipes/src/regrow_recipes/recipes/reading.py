"""Reads a recipe from TOML and `key=value` words; reports all errors at once, each with its place and a hint."""

import difflib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from regrow.core.errors import UsageError
from regrow_recipes.recipes.schema import TrainingRecipe

Table = dict[str, Any]

METHODS: Final = ("pretrain", "full", "lora", "dpo", "grpo")
SECTIONS: Final = {
    field.name: field.type for field in msgspec.structs.fields(TrainingRecipe) if isinstance(field.type, type)
}
"""The tables of a recipe, by name."""


def method_text(name: str) -> str:
    """The TOML text of a built-in method."""
    return resources.files("regrow_recipes.recipes").joinpath("methods", f"{name}.toml").read_text(encoding="utf-8")


def method_values(name: str) -> dict[str, Any]:
    """Values of a built-in method, section by section; values that a user must give are empty."""
    values: Table = {}
    wrong = list(_decoded(tomllib.loads(method_text(name)), values))
    if wrong:
        raise UsageError(f"the method {name} is wrong: {wrong[0]}")
    return {section: values.get(section, kind()) for section, kind in SECTIONS.items()}


def read_recipe(source: str, overrides: Sequence[str] = ()) -> TrainingRecipe:
    """Read a recipe from a file, or a built-in method by name; `section.key=value` words override it.

    Raises:
        UsageError: names all errors.
    """
    if source in METHODS:
        table: Table = tomllib.loads(method_text(source))
    else:
        table = _with_base(Path(source), _load(Path(source)))
    return decode(_merged(table, override_table(overrides)), place=source)


def decode(table: Table, *, place: str = "the recipe") -> TrainingRecipe:
    """Decode a recipe. Raises `UsageError` with all errors at once."""
    values: Table = {}
    wrong = list(_decoded(table, values))
    if not wrong:
        recipe = TrainingRecipe(**values)
        wrong = list(contradictions(recipe))
        if not wrong:
            return recipe
    if len(wrong) == 1:
        raise UsageError(f"{place}: {wrong[0]}")
    raise UsageError(f"{place} has {len(wrong)} errors:\n" + "\n".join(f"  {sentence}" for sentence in wrong))


def override_table(overrides: Sequence[str]) -> Table:
    """Parse `optim.lr=2e-4` and the like to tables. Raises `UsageError`."""
    table: Table = {}
    for word in overrides:
        path, equals, text = word.partition("=")
        section, dot, key = path.partition(".")
        if not equals or not dot or not key:
            raise UsageError(f"{word!r} is not a setting", hint="write section.key=value, for example optim.lr=2e-4")
        inner = table.setdefault(section, {})
        *above, last = key.split(".")
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = _value(text)
    return table


def _value(text: str) -> Any:
    """Parse a value as TOML; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _load(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = _near(str(path), METHODS)
        raise UsageError(
            f"there is no recipe {path}", hint=f"{near}give a file, or one of {', '.join(METHODS)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the recipe {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{path} is not valid TOML: {error}", hint="strings are in quotes, lists in [brackets]"
        ) from error


def _with_base(path: Path, table: Table) -> Table:
    """The table merged over the recipe that it extends."""
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise UsageError(
            f"{path}: extends = {base!r} is not a name", hint=f"give a file, or one of {', '.join(METHODS)}"
        )
    if base in METHODS:
        return _merged(tomllib.loads(method_text(base)), table)
    below = _load(path.parent / base)
    if "extends" in below and below["extends"] not in METHODS:
        raise UsageError(
            f"{path} extends {base}, which extends {below['extends']}",
            hint="a recipe extends one file, and that file extends a method",
        )
    return _merged(_with_base(path.parent / base, below), table)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Table:
    made = dict(below)
    for name, value in above.items():
        present = made.get(name)
        made[name] = _merged(present, value) if isinstance(present, dict) and isinstance(value, dict) else value
    rivals = (("batch", "tokens", "samples"), ("train", "epochs", "steps"))
    for section, *pair in rivals:
        given = above.get(section)
        if isinstance(given, dict) and isinstance(made.get(section), dict):
            # A key excludes the other key of its pair in the base recipe.
            for mine, other in (pair, reversed(pair)):
                if mine in given and other not in given:
                    made[section].pop(other, None)
    return made


# --- errors --------------------------------------------------------------------------------------------------------


def _decoded(table: Table, values: Table) -> Iterator[str]:
    """Put the valid entries into `values`; yields a sentence for each error."""
    for name, given in table.items():
        if name == "method":
            if given in METHODS:
                values[name] = given
            else:
                yield f"method = {_shown(given)}: {_near(str(given), METHODS)}it is one of {', '.join(METHODS)}"
        elif name not in SECTIONS:
            yield f"there is no table [{name}]: {_near(name, SECTIONS)}there are {', '.join(SECTIONS)}"
        elif not isinstance(given, dict):
            yield f"{name} = {_shown(given)}: it must be a table, so write [{name}] and its keys below"
        else:
            fields: Table = {}
            yield from _decoded_section(name, SECTIONS[name], given, fields)
            values[name] = SECTIONS[name](**fields)
    if "method" not in table:
        yield f'no method is named: write extends = "lora" at the top, or another of {", ".join(METHODS)}'


def _decoded_section(section: str, kind: type, given: Table, values: Table) -> Iterator[str]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for key, value in given.items():
        if key not in hints:
            elsewhere = next((name for name, other in SECTIONS.items() if key in _keys(other)), "")
            where = f"{key} belongs to [{elsewhere}]; " if elsewhere else _near(key, hints)
            yield f"[{section}] has no key {key}: {where}there are {', '.join(hints)}"
            continue
        try:
            values[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError:
            yield f"{section}.{key} = {_shown(value)}: give {expected(hints[key])}"


def contradictions(recipe: TrainingRecipe) -> Iterator[str]:
    """One sentence for each contradiction in a recipe."""
    model, data, batch, train = recipe.model, recipe.data, recipe.batch, recipe.train
    if model.config and recipe.method != "pretrain":
        yield f"model.config makes a model of random weights, which {recipe.method} cannot start from: give model.path"
    elif model.config and "model_type" not in model.config:
        yield 'model.config has no model type: add model_type = "llama", or another family'
    if model.config and model.path:
        yield "model.path and model.config are both given: leave one of them out"
    if not model.config and not model.path:
        yield "which model? Give model.path, a folder in Hugging Face's layout (--model DIR)"
    if model.config and not model.tokenizer:
        yield "model.config has no tokenizer: give model.tokenizer, a folder"
    if not data.train:
        yield "which data? Give data.train, a list of files (--data FILE)"
    if not recipe.output.dir:
        yield "where to? Give output.dir, a folder (--out DIR)"
    if recipe.method == "dpo" and data.format not in ("auto", "preference"):
        yield f"data.format = {_shown(data.format)}: dpo compares two answers, so its records are preferences"
    if recipe.method != "dpo" and data.format == "preference":
        yield f'data.format = "preference" is for dpo, and this is {recipe.method}: extends = "dpo"'
    if recipe.method == "dpo" and data.pack:
        yield "data.pack = true: dpo has pairs in its rows, which are not packed; write pack = false"
    if recipe.method == "pretrain" and data.format not in ("auto", "text", "tokens"):
        yield f'data.format = {_shown(data.format)}: pretrain takes plain text; for conversations extends = "full"'
    yield from _of_rewards(recipe)
    if data.length < 2:
        yield "data.length = 1: a row needs a token to predict; give 2 or more"
    yield from _one_of("batch", tokens=batch.tokens, samples=batch.samples)
    if batch.tokens and batch.tokens < data.length:
        yield f"batch.tokens = {batch.tokens} is less than one row (data.length = {data.length}): give more"
    yield from _one_of("train", epochs=train.epochs, steps=train.steps)
    if train.eval_every and not data.eval:
        yield "train.eval_every is given, but no data to evaluate on: give data.eval, a list of files"
    if recipe.output.merge and not recipe.adapts:
        yield f"output.merge = true: {recipe.method} trains all weights, there is no adapter to merge; leave it out"
    if recipe.elastic.replicas:
        least, most = (int(word) for word in recipe.elastic.replicas.split(":"))
        if not 1 <= least <= most:
            yield f'elastic.replicas = "{recipe.elastic.replicas}" is not a range: give MIN:MAX such as "1:8"'


def _of_rewards(recipe: TrainingRecipe) -> Iterator[str]:
    grpo, samples = recipe.grpo, recipe.batch.samples
    if recipe.method != "grpo":
        if recipe.data.format == "prompt":
            yield f'data.format = "prompt" is for grpo, and this is {recipe.method}: extends = "grpo"'
        return
    if recipe.data.format not in ("auto", "prompt"):
        yield f"data.format = {_shown(recipe.data.format)}: grpo generates answers, so its records are prompts"
    if bool(recipe.reward.function) == bool(recipe.reward.command):
        yield "how good is a completion? Give reward.function or reward.command, one of them"
    if samples % grpo.generations or not samples:
        yield (
            f"batch.samples = {samples}: an update has whole groups of grpo.generations = {grpo.generations}, "
            "so give a multiple of it"
        )
    if recipe.data.length <= grpo.completion:
        yield f"data.length = {recipe.data.length}: no room beside grpo.completion = {grpo.completion}; give more"
    if recipe.elastic.replicas or recipe.elastic.invariant:
        yield "elastic: groups of completions fix the number of ranks; leave it out"
    if recipe.output.every:
        yield "output.every: grpo writes its result after the last step; leave it out"
    if recipe.parallel.shard not in ("auto", 1):
        yield f"parallel.shard = {recipe.parallel.shard}: each rank generates with the whole model; leave it out"


def _one_of(section: str, **pair: float) -> Iterator[str]:
    first, second = pair
    given = [name for name, value in pair.items() if value]
    if len(given) == 2:
        yield f"{section}.{first} and {section}.{second} are both given: leave one of them out"
    elif not given:
        yield f"[{section}] needs {first} or {second}: give one of them"


def expected(hint: Any) -> str:
    """Describe the values that a type allows."""
    if typing.get_origin(hint) is typing.Annotated:
        kind, *metas = typing.get_args(hint)
        meta = next((meta for meta in metas if isinstance(meta, msgspec.Meta)), None)
        return expected(kind) + (_range(meta) if meta is not None else "")
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(f'"{word}"' for word in typing.get_args(hint))
    arguments = [part for part in typing.get_args(hint) if part is not type(None)]
    origin = typing.get_origin(hint)
    if origin is list:
        return f"a list of {_PLURAL[arguments[0]]}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {expected(arguments[0])}"
    if origin is dict:
        return "a table"
    if arguments:
        return " or ".join(expected(part).replace("one of ", "", 1) for part in arguments)
    return _SINGULAR[hint]


_SINGULAR: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string in quotes",
}
_PLURAL: Final[dict[Any, str]] = {str: "strings in quotes", int: "whole numbers", float: "numbers"}


def _range(meta: msgspec.Meta) -> str:
    words = [
        f"{word} {bound:g}"
        for word, bound in (("from", meta.ge), ("above", meta.gt), ("to", meta.le), ("below", meta.lt))
        if bound is not None
    ]
    shape = ' as "MIN:MAX"' if meta.pattern else ""
    return (" " + ", ".join(words) if words else "") + shape


def _keys(kind: type) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def _near(word: str, known: Any) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}? " if found else ""


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
