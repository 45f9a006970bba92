"""The penalty for SGLang: `custom_logit_processor=LZSglangProcessor.to_str()`.

The server runs with `--enable-custom-logit-processor`, with regrow installed. A request asks for the penalty by
`custom_params={"lz_strength": 0.15}` in its sampling parameters, and may give `lz_mode`, `lz_window`, `lz_lookback` and
`lz_min_match` too. SGLang makes a new processor when its batch changes, so it has no state: the window comes from the
request's output tokens at each step.

Written by SGLang's public sources. **It has not been run under SGLang**, only against a stub of its interface. Where
its scheduler prepares a step before the tokens of the one before are on the host (`--disable-overlap-schedule` keeps it
from that), and under speculative decoding, the newest tokens are not in the window yet.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lz_penalty.matches import NOTHING
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise_tokens
from lz_penalty.rows import RowParameters

_log = logging.getLogger(__name__)


def _interface() -> type:
    """SGLang's base class. Raises ImportError where it is not installed."""
    try:
        found: type = import_module("sglang.srt.sampling.custom_logit_processor").CustomLogitProcessor
    except ImportError as error:
        raise ImportError(f"LZ penalty: no SGLang with custom logit processors is installed ({error})") from error
    return found


class LZSglangProcessor(_interface()):  # type: ignore[misc]
    """Takes the LZ penalty off the logits of the requests that ask for it."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Mapping[str, Any] | None] | None = None) -> Tensor:
        """Take the penalty off the logits, in place, [rows, vocabulary]; one mapping a row."""
        given = list(custom_param_list or ())
        parameters = [_asked(each) for each in given]
        if len(given) != len(logits) or all(each is None for each in parameters):
            return logits
        rows = RowParameters.of(parameters, logits.device)
        windows = [
            _last(each["__req__"].output_ids, rows.width) if each and asked is not None else [NOTHING] * rows.width
            for each, asked in zip(given, parameters, strict=True)
        ]
        return penalise_tokens(logits, torch.tensor(windows).to(logits.device, non_blocking=True), rows)


def _last(tokens: Sequence[int], width: int) -> list[int]:
    """The last tokens, with nothing before them where there are fewer."""
    found = list(tokens[-width:])
    return [NOTHING] * (width - len(found)) + found


def _asked(given: Mapping[str, Any] | None) -> LZParameters | None:
    """What a request asks for. Nonsense is told and gets no penalty, as an error would end the server."""
    if given is None or "__req__" not in given:
        return None
    try:
        return LZParameters.of_request(given)
    except ValueError as error:
        _tell_once(str(error))
        return None


@cache
def _tell_once(error: str) -> None:
    _log.warning("%s; the request gets no penalty", error)
