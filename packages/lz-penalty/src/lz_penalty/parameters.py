"""What is penalised, and how strongly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

Mode = Literal["residual", "amortized", "distance"]

MODES: tuple[Mode, ...] = get_args(Mode)

MOST_WINDOW = 4096
"""Tokens. The cost of a step grows with the window."""

MOST_LOOKBACK = 256
"""Tokens. Whole numbers up to this are exact in bfloat16, in which match lengths may pass through the logits."""

PREFIX = "lz_"
"""Of the names under which a request to a server carries its parameters: `lz_strength`, `lz_min_match`."""


@dataclass(frozen=True)
class LZParameters:
    """The parameters of one sequence; the defaults are the paper's.

    Raises ValueError where a value is out of its range.

    Attributes:
        mode: what a token costs that stands in the window, in bits; `reference.costs` defines the three.
        strength: logits taken off for each bit that the token costs less than one never seen; 0 takes nothing.
        window: how many tokens back a match may lie.
        lookback: the longest match that is told from longer ones, in tokens.
        min_match: tokens whose longest match, themselves included, is shorter are left alone; 1 leaves none of the
            window alone. Ours, not the paper's.
    """

    mode: Mode = "residual"
    strength: float = 0.15
    window: int = 512
    lookback: int = 32
    min_match: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"LZ penalty: mode is {self.mode!r}, not one of {', '.join(MODES)}")
        if not _is_number(self.strength) or not math.isfinite(self.strength) or self.strength < 0:
            raise ValueError(f"LZ penalty: strength is {self.strength!r}, not a finite number of at least 0")
        for name, most in (("window", MOST_WINDOW), ("lookback", MOST_LOOKBACK), ("min_match", MOST_LOOKBACK + 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"LZ penalty: {name} is {value!r}, not a whole number from 1 to {most}")

    @classmethod
    def of_request(cls, arguments: Mapping[str, object] | None) -> "LZParameters | None":
        """Read the parameters that a request to a server carries beside its own; None: it asks for no penalty.

        Any name with the prefix asks for it. Raises ValueError for a name or a value that means nothing, as the
        request would otherwise run without what was asked.
        """
        asked = {name[len(PREFIX) :]: value for name, value in (arguments or {}).items() if name.startswith(PREFIX)}
        if not asked:
            return None
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(asked) - known)
        if unknown:
            raise ValueError(
                f"LZ penalty: no parameter is called {PREFIX}{unknown[0]}; "
                f"there are {', '.join(PREFIX + name for name in sorted(known))}"
            )
        return cls(**{name: _as_whole(name, value) for name, value in asked.items()})  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_whole(name: str, value: object) -> object:
    """Take 3.0 for 3 where a whole number is wanted: a JSON of some clients has no whole numbers."""
    whole = name in ("window", "lookback", "min_match") and isinstance(value, float) and value.is_integer()
    return int(value) if whole and isinstance(value, float) else value
