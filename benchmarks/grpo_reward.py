"""The reward of `grpo.py`, on both sides: the share of words with an even number."""

from typing import Any


def even(completions: list[str], **_: Any) -> list[float]:
    """Reward from 0 to 1 for each completion; an untrained model gets about a half."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(len(text.split()), 1) for text in completions]
