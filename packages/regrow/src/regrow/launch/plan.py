"""Fault plans, read from a TOML file: each fault names a rank, a step and a kind of fault.

One file may mix two forms::

    [[fault]]                       [random]
    rank = 2                        seed = 7
    step = 30                       count = 100
    at = "reduce"                   first_step = 10
    how = "sigkill"                 every = 5
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from regrow.core.errors import UsageError
from regrow.core.ids import Rank, StepNo
from regrow.core.messages.vocabulary import STEP_STAGES, FaultHow, FaultSpec, FaultStage

_RECOVERY_STAGES: Final = (FaultStage.FORM, FaultStage.HYDRATE, FaultStage.ROLL)
_FAULT_KEYS: Final = ("rank", "step", "at", "how")
_RANDOM_KEYS: Final = ("seed", "count", "first_step", "every", "stages", "hows", "world")

_Choice = TypeVar("_Choice", FaultHow, FaultStage)


def load_faults(path: Path, *, world: int) -> list[FaultSpec]:
    """The faults of a plan file, ordered by step; deterministic for a file and world size.

    Args:
        path: the TOML file.
        world: world size of the job; a plan that names a rank outside it is refused.

    Raises:
        UsageError: names the file, the entry and what to write instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the fault plan {path} cannot be read: {_reason(error)}") from error
    return parse_faults(text, world=world, source=str(path))


def parse_faults(text: str, *, world: int, source: str = "fault plan") -> list[FaultSpec]:
    """Parse faults as `load_faults` does, but from text. `source` names the text in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{source} is not TOML: {error}", hint='an entry is [[fault]] with rank, step, at = "reduce"'
        ) from error
    _Entry(source, "", document).only(("fault", "random"))
    faults = _listed(document, world, source) + _drawn(document, world, source)
    if not faults:
        raise UsageError(f"{source} has no fault", hint="write [[fault]] entries, or [random] with count")
    return sorted(faults, key=lambda fault: -1 if fault.step is None else fault.step)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not text"


class _Entry:
    """One table of the file, with its location for error messages."""

    def __init__(self, source: str, place: str, table: Mapping[str, object]) -> None:
        self._where = f"{source}, {place}" if place else source
        self._table = table

    def fail(self, cause: str, hint: str = "") -> UsageError:
        return UsageError(f"{self._where}: {cause}", hint=hint)

    def only(self, keys: Sequence[str]) -> None:
        if unknown := [key for key in self._table if key not in keys]:
            raise self.fail(f"unknown key {unknown[0]!r}", hint=f"known are {', '.join(keys)}")

    def number(self, key: str, default: int | None, *, least: int = 0, below: int | None = None) -> int:
        value = self._table.get(key, default)
        if value is None:
            raise self.fail(f"{key} is missing", hint=f"add {key} = {least}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(f"{key} = {value!r} is not a whole number")
        if value < least or (below is not None and value >= below):
            span = f"at least {least}" if below is None else f"from {least} to {below - 1}"
            raise self.fail(f"{key} = {value} is out of range", hint=f"it is {span}")
        return value

    def choice(self, key: str, kind: type[_Choice], value: object, among: Sequence[_Choice]) -> _Choice:
        names = [str(item) for item in among]
        if not isinstance(value, str) or value not in names:
            raise self.fail(f"{key} = {value!r} is not known", hint=f"it is one of {', '.join(names)}")
        return kind(value)

    def choices(
        self, key: str, kind: type[_Choice], among: Sequence[_Choice], default: Sequence[_Choice]
    ) -> list[_Choice]:
        values = self._table.get(key)
        if values is None:
            return list(default)
        if not isinstance(values, list) or not values:
            raise self.fail(f"{key} is not a list of names", hint=f'for example {key} = ["{among[0]}"]')
        return [self.choice(key, kind, value, among) for value in values]


def _listed(document: Mapping[str, object], world: int, source: str) -> list[FaultSpec]:
    tables = document.get("fault", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{source}: 'fault' is not a list of tables", hint="write [[fault]] with double brackets")
    return [_one(number, table, world, source) for number, table in enumerate(tables, 1)]


def _one(number: int, table: Mapping[str, object], world: int, source: str) -> FaultSpec:
    entry = _Entry(source, f"fault {number}", table)
    entry.only(_FAULT_KEYS)
    stage = entry.choice("at", FaultStage, table.get("at", str(FaultStage.FORWARD)), tuple(FaultStage))
    how = entry.choice("how", FaultHow, table.get("how", str(FaultHow.SIGKILL)), tuple(FaultHow))
    in_recovery = stage in _RECOVERY_STAGES and "step" not in table
    return FaultSpec(
        fault=f"plan-{number}",
        rank=Rank(entry.number("rank", None, below=world)),
        how=how,
        stage=stage,
        step=None if in_recovery else StepNo(entry.number("step", None)),
    )


def _drawn(document: Mapping[str, object], world: int, source: str) -> list[FaultSpec]:
    table = document.get("random")
    if table is None:
        return []
    if not isinstance(table, dict):
        raise UsageError(f"{source}: 'random' is not a table", hint="write [random] with single brackets")
    entry = _Entry(source, "random", table)
    entry.only(_RANDOM_KEYS)
    count = entry.number("count", None, least=1)
    first = entry.number("first_step", 5)
    every = entry.number("every", 5, least=1)
    ranks = entry.number("world", world, least=1, below=world + 1)
    stages = entry.choices("stages", FaultStage, tuple(FaultStage), STEP_STAGES)
    hows = entry.choices("hows", FaultHow, tuple(FaultHow), (FaultHow.SIGKILL,))
    draw = random.Random(entry.number("seed", 0))
    return [
        FaultSpec(
            fault=f"random-{number + 1}",
            rank=Rank(draw.randrange(ranks)),
            how=draw.choice(hows),
            stage=draw.choice(stages),
            step=StepNo(first + number * every),
        )
        for number in range(count)
    ]
