"""`regrow.data.Mixture`: a weighted mixture of several data sets."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from regrow.core.errors import DataError, UsageError
from regrow.data.mixture import Weighting

Weights = Mapping[str, float]


class Mixture(Dataset[Any]):
    """Samples of several map-style data sets, drawn by weight; for a `DataLoader` that goes to `session.steps`.

        data = Mixture({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3})
        data = Mixture({"a": a, "b": b}, weights=[(0, {"a": 1, "b": 0}), (10_000, {"a": 7, "b": 3})])

    Each data set has its own epochs: all of its samples are read once, in its own order, before any is read again, also
    when the weights change. All batches are full. The order is `regrow.data.mixture`'s with torch's default samplers
    (`shuffle=True` or `False`); any other sampler, or direct iteration of the loader, reads the concatenation of the
    data sets, without weights.

    Args:
        sources: map-style data sets by name.
        weights: relative weight of each; or a schedule of (first step, weights), of which the first begins at step 0.

    Raises:
        UsageError: a source is empty or not map-style, or the weights do not match the sources.
    """

    def __init__(self, sources: Mapping[str, Any], *, weights: Weights | Sequence[tuple[int, Weights]]) -> None:
        self.sources = dict(sources)
        self._names = list(self.sources)
        self._sizes = [_size_of(name, source) for name, source in self.sources.items()]
        self._ends = list(accumulate(self._sizes))
        steps = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        listed = [(step, _in_order(self._names, step, named)) for step, named in steps]
        Weighting.of(self._names, listed)
        self.schedule: list[tuple[int, list[float]]] = listed

    def __len__(self) -> int:
        """Number of samples of all sources together."""
        return self._ends[-1]

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        """Sample `index` of the concatenated sources, or of (number of the source, index in it)."""
        number, at = self.place_of(index)
        source = self.sources[self._names[number]]
        try:
            return source[at]
        except IndexError as error:
            now = len(source)
            if now >= self._sizes[number]:
                error.add_note(f"raised by the source {self._names[number]!r} of a mixture for its sample {at}")
                raise
            raise DataError(
                f"the source {self._names[number]!r} of a mixture, {type(source).__name__}, had {self._sizes[number]} "
                f"samples at the start and has {now} now: sample {at} is gone",
                hint="give it back what it had, or start a new training: the order of samples depends on their number",
            ) from error

    def place_of(self, index: int | tuple[int, int]) -> tuple[int, int]:
        """Number of the source, and index in it, of sample `index`. Raises `IndexError`."""
        if isinstance(index, tuple):
            return index
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a mixture of {len(self)}")
        number = next(i for i, end in enumerate(self._ends) if index < end)
        return number, index - self._ends[number] + self._sizes[number]


def _in_order(names: list[str], step: int, weights: Weights) -> list[float]:
    if type(step) is not int:
        raise UsageError(f"the weights of a mixture begin at step {step!r}", hint="write it as a whole number")
    if set(weights) != set(names):
        odd = sorted(set(weights) ^ set(names))
        raise UsageError(
            f"the weights of a mixture from step {step} on and its sources differ in {', '.join(map(repr, odd))}",
            hint="give each source a weight; 0 leaves it out for that time",
        )
    return [float(weights[name]) for name in names]


def _size_of(name: str, source: Any) -> int:
    if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(
            f"the source {name!r} of a mixture, {type(source).__name__}, is no map-style data set",
            hint="give it __len__ and __getitem__",
        )
    size = len(source)
    if size == 0:
        raise UsageError(
            f"the source {name!r} of a mixture, {type(source).__name__}, is empty", hint="fill it, or leave it out"
        )
    return size
