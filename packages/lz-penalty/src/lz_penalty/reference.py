"""The penalty's definition, in plain Python: slow and short; the other implementations are tested against it.

h is the window, the last tokens of a sequence, n of them; position j = 0 is the oldest. A match at j is the longest
common suffix of h[..j-1] and h[..n-1], the tokens before j and the tokens before the next one, no longer than the
look-back. Its length is U_j; with the token at j it would be L_j = U_j + 1, at the distance d_j = n - j.
"""

from collections.abc import Sequence
from math import log2

from lz_penalty.parameters import LZParameters


def match_lengths(window: Sequence[int], lookback: int) -> list[int]:
    """U_j of each position of a window."""
    end = len(window)
    lengths = []
    for position in range(end):
        length = 0
        while length < min(lookback, position) and window[position - 1 - length] == window[end - 1 - length]:
            length += 1
        lengths.append(length)
    return lengths


def costs(window: Sequence[int], vocabulary: int, parameters: LZParameters) -> dict[int, float]:
    """Bits that each token of the window costs a coder as the next one; others cost log2(vocabulary).

    * *residual*: bits that the coder needs in addition. A token that extends the longest match of the window, l tokens
        at the distance d, the nearest of that length: log2((l-1)(d+1) / (l d)) - 1, if l is at least 2. Any other:
      log2 of its nearest distance.
    * *amortized*: the minimum over its positions of (log2(d+1) + log2 L) / L, not below 0.
    * *distance*: log2 of the distance of its longest match, the nearest of that length.

    No cost exceeds that of an unseen token, so that no repetition is rewarded.
    """
    lengths = match_lengths(window, parameters.lookback)
    longest = max(lengths, default=0)
    at = {token: [j for j, other in enumerate(window) if other == token] for token in window}
    found = {}
    for token, positions in at.items():
        match parameters.mode:
            case "residual":
                cost = _residual(positions, lengths, longest)
            case "amortized":
                cost = max(0.0, min(_amortized(len(window) - j, lengths[j] + 1) for j in positions))
            case "distance":
                cost = log2(len(window) - max(positions, key=lambda j: (lengths[j], j)))
        found[token] = min(cost, log2(vocabulary))
    return found


def _residual(positions: Sequence[int], lengths: Sequence[int], longest: int) -> float:
    """The cost of a token at these positions of the window."""
    if longest >= 2 and any(lengths[j] == longest for j in positions):
        distance = len(lengths) - max(j for j, length in enumerate(lengths) if length == longest)
        return log2((longest - 1) * (distance + 1) / (longest * distance)) - 1
    return log2(len(lengths) - max(positions))


def _amortized(distance: int, length: int) -> float:
    """Bits a token: the cost of a match divided among its tokens."""
    return (log2(distance + 1) + log2(length)) / length


def penalties(history: Sequence[int], vocabulary: int, parameters: LZParameters) -> dict[int, float]:
    """Penalty on the logits of the next token, by token.

    Args:
        history: the sequence so far; tokens to the left of the window do not count.
        vocabulary: number of logits; tokens beyond it get no penalty.
        parameters: of this sequence.
    """
    window = history[-parameters.window :]
    lengths = match_lengths(window, parameters.lookback)
    whole = log2(vocabulary)
    return {
        token: parameters.strength * (whole - cost)
        for token, cost in costs(window, vocabulary, parameters).items()
        if token < vocabulary
        and max(length for length, other in zip(lengths, window, strict=True) if other == token) + 1
        >= parameters.min_match
    }
