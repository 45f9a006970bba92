"""Prices of tokens. Pure."""

import math
from dataclasses import dataclass

from regrow.core.errors import UsageError
from regrow_batch.answers import Tokens

_MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in any one currency.

    Attributes:
        prompt: for prompt tokens.
        answer: for answer tokens, reasoning included.
        cached: for prompt tokens that the server had cached; as `prompt` if not given.
    """

    prompt: float
    answer: float
    cached: float

    @classmethod
    def read(cls, text: str) -> "Prices | None":
        """Parse `prompt=0.15,answer=0.6,cached=0.07`; None: the text is empty. Raises `UsageError`."""
        if not text:
            return None
        found: dict[str, float] = {}
        for word in text.split(","):
            name, _, price = word.strip().partition("=")
            try:
                value = float(price)
            except ValueError:
                value = math.nan
            if name not in ("prompt", "answer", "cached") or not 0 <= value < math.inf:
                raise UsageError(
                    f"--price: {word!r} is no price", hint="give --price prompt=0.15,answer=0.6, of a million tokens"
                )
            found[name] = value
        prompt = found.get("prompt", 0.0)
        return cls(prompt, found.get("answer", 0.0), found.get("cached", prompt))

    def of(self, tokens: Tokens) -> float:
        """Cost of these tokens."""
        fresh = tokens.prompt - tokens.cached
        return (self.prompt * fresh + self.cached * tokens.cached + self.answer * tokens.answer) / _MILLION
