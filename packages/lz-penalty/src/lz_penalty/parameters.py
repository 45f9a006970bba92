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
"""Logits a bit. A much larger value would exceed the range of the logits' type."""

MOST_LOOKBACK = 256
"""Tokens. Integers up to this are exact in bfloat16, in which match lengths may pass through the logits."""

PREFIX = "lz_"
"""Prefix of the names of these parameters in a request to a server: `lz_strength`, `lz_min_match`."""


@dataclass(frozen=True)
class LZParameters:
    """The parameters of one sequence; the defaults are the paper's.

    Raises ValueError if a value is out of its range.

    Attributes:
        mode: formula for the cost in bits of a token in the window; `reference.costs` defines the three.
        strength: logits subtracted for each bit that the token costs less than an unseen one; 0 disables the penalty.
        window: furthest distance of a match, in tokens.
        lookback: longest match length that is computed, in tokens; longer matches count as this long.
        min_match: tokens whose longest match, themselves included, is shorter get no penalty; 1 penalises all tokens of
                the window. This parameter is not in the paper.
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
        """Read the parameters from a request to a server, among its other arguments; None: it asks for no penalty.

        Any name with the prefix asks for it. Raises ValueError for an unknown name or an invalid value, since the
        request would otherwise run without the penalty that it asked for; the message quotes the request.

        Args:
            arguments: of the request.
            kept: tokens of each request that the server keeps, the widest possible window.
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
            # A list or a mapping has no hash; without the cache the check reports its error.
            return _of_request.__wrapped__(asked, kept)


@lru_cache(maxsize=1024)
def _of_request(asked: tuple[tuple[str, type, object], ...], kept: int) -> LZParameters:
    """The parsed parameters. Types are part of the cache key: `1` and `true` are equal."""
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
    """Raise ValueError if a parameter is out of its range. `prefix`: of its name in the request."""
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
    """Convert 3.0 to 3 for an integer parameter, since some clients' JSON has only floats."""
    whole = name in ("window", "lookback", "min_match") and isinstance(value, float) and value.is_integer()
    return int(value) if whole and isinstance(value, float) else value
