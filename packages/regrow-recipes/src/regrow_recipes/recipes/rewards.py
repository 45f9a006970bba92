"""Rewards of completions: a Python function, or a command that reads JSON lines and prints numbers."""

import ctypes
import importlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from regrow.core.errors import DataError, UsageError
from regrow_recipes.recipes.schema import RewardSection

Reward = Callable[..., list[float | None]]
_PR_SET_PDEATHSIG = 1
_NOT_OF_THE_RECORD = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})


def reward_of(section: RewardSection) -> Reward:
    """The reward that a recipe names, with TRL's call signature. Raises `UsageError` if there is none."""
    if section.command:
        return verifying(section.command, deadline=section.deadline)
    place, _, name = section.function.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"reward.function: {place} has no function {name}")
    reward: Reward = found
    return reward


def check_there(section: RewardSection) -> None:
    """Raise `UsageError` if the file or module of a reward does not exist. Runs no code of it."""
    place, colon, name = section.function.rpartition(":")
    if section.command:
        return
    if not colon or not place or not name:
        raise UsageError(
            f"reward.function = {section.function!r}", hint='write "module:function" or "FILE.py:function"'
        )
    if not (Path(place).is_file() if place.endswith(".py") else _is_module(place.partition(".")[0])):
        raise UsageError(f"reward.function: there is no {place}", hint=f"looked from {Path.cwd()}")


def _is_module(name: str) -> bool:
    """True if workers, which also search the working directory, can import a module of this name."""
    here = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    return here is not None or importlib.util.find_spec(name) is not None


def verifying(command: Sequence[str], *, deadline: float) -> Reward:
    """A reward by a command, which is started once for all completions that a rank scores at a time.

    The command reads one JSON object a line: `prompt`, `completion` and the other keys of the record. It prints a
    number for each, in the same order, or `null` if it has none.

    Args:
        command: the program and its arguments.
        deadline: seconds that the command may take.

    Raises:
        DataError: (when called) the command takes longer, fails, or prints something else.
    """

    def verifier(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        own = {name: values for name, values in columns.items() if name not in _NOT_OF_THE_RECORD}
        records = [
            {name: values[at] for name, values in own.items()} | {"prompt": prompt, "completion": completion}
            for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        return _numbers(_said(command, text, deadline), len(records), command[0])

    return verifier


def _said(command: Sequence[str], text: str, deadline: float) -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
            preexec_fn=_end_with_rank,
        )
    except subprocess.TimeoutExpired:
        hint = "raise it, or lower the number of completions in an update"
        raise DataError(f"{command[0]} took longer than reward.deadline = {deadline:g} s", hint=hint) from None
    except OSError as error:
        raise DataError(f"reward.command: {command[0]} cannot be started: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise DataError(f"{command[0]} ended with {done.returncode}: {last}")
    return done.stdout


def _end_with_rank() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_libc = ctypes.CDLL(None)


def _numbers(text: str, expected: int, name: str) -> list[float | None]:
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
        numbers = [None if value is None else float(value) for value in found]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} printed something that is not a number: {error}", hint="print one number per line"
        ) from error
    if len(numbers) != expected:
        raise DataError(
            f"{name} printed {len(numbers)} numbers for {expected} completions", hint="print one number for each"
        )
    return numbers


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_reward_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"reward.function: {path} cannot be read as a module")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module
