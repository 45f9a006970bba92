"""Parameters of the penalty, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, get_args

Mode = Literal["residual", "amortized", "distance"]

MODES: tuple[Mode, ...] = get_args(Mode)

MOST_WINDOW = 4096
"""Tokens. The cost of a step grows with the window."""

MOST_STRENGTH = 1_000_000
"""Logits a bit. What is far beyond has no place in the numbers that logits are."""

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
        check({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def by_match(self) -> bool:
        """True if the longest match of each token must be known before it is penalised."""
        return self.strength > 0 and (self.min_match > 1 or self.mode == "distance")

    @classmethod
    def of_request(cls, arguments: Mapping[str, object] | None, *, kept: int = MOST_WINDOW) -> "LZParameters | None":
        """Read the parameters that a request to a server carries beside its own; None: it asks for no penalty.

        Any name with the prefix asks for it. Raises ValueError for a name or a value that means nothing, as the
        request would otherwise run without what was asked; it names what the request wrote.

        Args:
            arguments: of the request.
            kept: tokens of each request that the server keeps.
        """
        if not arguments:
            return None
        asked = tuple(
            (name[len(PREFIX) :], type(value), value) for name, value in arguments.items() if name.startswith(PREFIX)
        )
        if not asked:
            return None
        try:
            return _of_request(asked, kept)
        except TypeError:
            # A list or a mapping has no hash; it means nothing here, and what is wrong with it is said.
            return _of_request.__wrapped__(asked, kept)


@lru_cache(maxsize=1024)
def _of_request(asked: tuple[tuple[str, type, object], ...], kept: int) -> LZParameters:
    """The parameters that were asked for. Types are told apart: `1` and `true` are equal."""
    known = {field.name for field in fields(LZParameters)}
    unknown = sorted({name for name, _, _ in asked} - known)
    if unknown:
        raise ValueError(
            f"LZ penalty: no parameter is called {PREFIX}{unknown[0]}; "
            f"there are {', '.join(PREFIX + name for name in sorted(known))}"
        )
    values = {name: _as_whole(name, value) for name, _, value in asked}
    check(values, prefix=PREFIX, most_window=kept)
    return LZParameters(**values)  # type: ignore[arg-type]


def check(values: Mapping[str, object], *, prefix: str = "", most_window: int = MOST_WINDOW) -> None:
    """Raise ValueError where a parameter is out of its range. `prefix`: of the name by which it was given."""
    if "mode" in values and values["mode"] not in MODES:
        raise ValueError(f"LZ penalty: {prefix}mode is {values['mode']!r}, not one of {', '.join(MODES)}")
    strength = values.get("strength", 0.0)
    if not isinstance(strength, int | float) or isinstance(strength, bool) or not 0 <= strength <= MOST_STRENGTH:
        raise ValueError(f"LZ penalty: {prefix}strength is {strength!r}, not a number from 0 to {MOST_STRENGTH}")
    for name, most in (("window", most_window), ("lookback", MOST_LOOKBACK), ("min_match", MOST_LOOKBACK + 1)):
        value = values.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(f"LZ penalty: {prefix}{name} is {value!r}, not a whole number from 1 to {most}")


def _as_whole(name: str, value: object) -> object:
    """Take 3.0 for 3 where a whole number is wanted: a JSON of some clients has no whole numbers."""
    whole = name in ("window", "lookback", "min_match") and isinstance(value, float) and value.is_integer()
    return int(value) if whole and isinstance(value, float) else value
