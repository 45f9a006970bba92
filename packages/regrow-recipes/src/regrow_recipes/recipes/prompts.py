"""Prompts of a recipe that generates: the records of its files, written to one JSON Lines file before the start."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from regrow.core.config import cache_home
from regrow.core.errors import DataError, UsageError
from regrow_recipes.recipes.preparing import AboutRows
from regrow_recipes.recipes.records import records
from regrow_recipes.recipes.schema import TrainingRecipe
from regrow_recipes.recipes.shapes import Record, renamed


def prepared_prompts(recipe: TrainingRecipe, files: Sequence[str]) -> tuple[Path, AboutRows]:
    """The prompts of these files in one file. Raises `UsageError` that names the error in a file."""
    try:
        lines = [json.dumps(record) for record in _checked(recipe, files)]
    except (DataError, TypeError) as error:
        raise UsageError(f"the data could not be prepared: {error}") from error
    if not lines:
        raise UsageError("the data could not be prepared: it has no records")
    text = "\n".join(lines)
    path = cache_home() / "recipes" / f"prompts-{xxhash.xxh3_128_hexdigest(text.encode())}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, making = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(making, path)
    number, tokens = len(lines), len(lines) * recipe.data.length
    about = AboutRows("prompt", number, number, number, tokens, counted=0, cut=0, turns_left_out=0, first=lines[0])
    return path, about


def read_prompts(path: str) -> list[Record]:
    """Read the file of `prepared_prompts`."""
    return [record for _, record in records(path)]


def _checked(recipe: TrainingRecipe, files: Sequence[str]) -> Iterator[Record]:
    keys: set[str] = set()
    for path in files:
        for place, given in records(path):
            try:
                record = renamed(given, recipe.data.columns)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            if not isinstance(record.get("prompt"), str | list) or not record["prompt"]:
                raise DataError(
                    f"{place}: its prompt is neither a string nor a list of messages; its keys: {', '.join(record)}"
                )
            keys = keys or set(record)
            if set(record) != keys:
                raise DataError(
                    f"{place}: its keys are {', '.join(sorted(record))}, "
                    f"those of the first record are {', '.join(sorted(keys))}"
                )
            yield record
