"""Settings that change with the size of the world: rules for the learning rate, a table of named values. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from regrow.core.errors import UsageError

Rule = Literal["constant", "linear", "sqrt"]
"""Rule by which the learning rate follows the number of replicas: not at all, in proportion, by the square root."""
T = TypeVar("T")


@dataclass(frozen=True)
class Policy:
    """Settings that depend on the number of replicas. A change takes effect on all ranks at the new world's first step.

    The learning rate that the script and its schedule have set is multiplied by a factor at each update; neither the
    optimizer's nor the schedule's own state changes. With a constant global batch a step has the same number of samples
    in every world, so the schedule simply goes on.

    Attributes:
        learning_rate: a rule, or a table of rates by replicas; the factor is the ratio to the rate of `base`.
        base: the number of replicas for which the script's own learning rate is meant.
        settings: named values by replicas, for `session.setting(name)`; every row has the same names.

    A size that is not in a table uses the row of the next smaller size, else of the smallest.

    Raises:
        UsageError: an unknown rule, a size or a rate that is not positive, rows with different names.
    """

    learning_rate: Rule | Mapping[int, float] = "constant"
    base: int = 1
    settings: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all values, so that no error appears only when the world changes."""
        if self.base < 1:
            raise UsageError(f"base={self.base} replicas", hint="name the size that the learning rate is meant for")
        if isinstance(self.learning_rate, str):
            if self.learning_rate not in get_args(Rule):
                raise UsageError(
                    f"learning_rate={self.learning_rate!r} is no rule", hint="constant, linear, sqrt, or a table"
                )
        elif not self.learning_rate or not all(
            math.isfinite(rate) and rate > 0 for rate in self.learning_rate.values()
        ):
            raise UsageError(
                f"learning_rate={dict(self.learning_rate)} has no rates, or such that are not positive",
                hint="give {replicas: learning rate}",
            )
        rates = [] if isinstance(self.learning_rate, str) else list(self.learning_rate)
        for size in [*rates, *self.settings]:
            if size < 1:
                raise UsageError(f"a table has a row for {size} replicas", hint="sizes are 1 or more")
        if len({frozenset(row) for row in self.settings.values()}) > 1:
            raise UsageError("the rows of settings have different names", hint="give every size a value of each name")

    def factor(self, replicas: int) -> float:
        """Factor of the learning rate."""
        if isinstance(self.learning_rate, str):
            ratio = replicas / self.base
            return {"constant": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.learning_rate]
        return row_of(self.learning_rate, replicas) / row_of(self.learning_rate, self.base)

    def setting(self, name: str, replicas: int) -> Any:
        """A named value. Raises `UsageError` if there is no such name."""
        row: Mapping[str, Any] = row_of(self.settings, replicas) if self.settings else {}
        if name not in row:
            raise UsageError(f"the policy has no setting {name!r}", hint=f"it has: {', '.join(sorted(row)) or 'none'}")
        return row[name]


def row_of(table: Mapping[int, T], replicas: int) -> T:
    """The row for this number of replicas; if there is none, that of the next smaller size, or else of the smallest."""
    return table[max((size for size in table if size <= replicas), default=min(table))]
