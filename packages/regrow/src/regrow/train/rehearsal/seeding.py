"""Finds random generators that a body seeds before it draws: their earlier state does not affect the body's numbers."""

import random
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from regrow.train.attributes.kept_values import Generator, position


class Seeding:
    """Finds the generators of a script that are seeded before anything is drawn from them.

    Meanwhile it uses Python's profile function of this thread; if the script has set one, nothing is found. Nothing is
    found of numpy's generators either, as their calls are not reported to a profile function.

    Args:
        generators: the generators to watch.
    """

    def __init__(self, generators: Iterable[Generator]) -> None:
        found = (each for each in generators if isinstance(each, torch.Generator | random.Random))
        self._stood = {id(each): position(each) for each in found}
        self._seeded: set[int] = set()
        self._listening = bool(self._stood) and sys.getprofile() is None
        if self._listening:
            sys.setprofile(self._trace)

    def stop(self) -> None:
        """Stop watching."""
        if self._listening and getattr(sys.getprofile(), "__self__", None) is self:
            sys.setprofile(None)
        self._listening = False

    def seeded(self, generator: Generator) -> bool:
        """True if the script seeded the generator before anything was drawn."""
        return id(generator) in self._seeded

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" or arg.__name__ not in ("manual_seed", "seed"):
            return
        generator = arg.__self__
        if self._stood.get(id(generator)) is None or id(generator) in self._seeded:
            return
        given = arg.__name__ == "manual_seed" or frame.f_locals.get("a") is not None  # else it is seeded by the system
        if given and position(generator) == self._stood[id(generator)]:
            self._seeded.add(id(generator))
