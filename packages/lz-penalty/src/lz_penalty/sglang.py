"""The penalty for SGLang: `custom_logit_processor=sglang_processor()`, which needs no SGLang at the client.

The server runs with `--enable-custom-logit-processor`, with lz-penalty installed. A request asks for the penalty by
`custom_params={"lz_strength": 0.15}` in its sampling parameters, and may also set `lz_mode`, `lz_window`,
`lz_lookback` and `lz_min_match`. SGLang makes a new processor when its batch changes, so the processor has no state:
the window comes from the request's output tokens at each step.

Written from SGLang's public sources, 0.5.23. **It has not been run under a live SGLang**: its class, its string and its
own `apply_custom_logit_processor` were. With its overlap scheduler, the default, a step is prepared before the tokens
of the previous step are on the host: the window lacks the newest token at each step, as it does under speculative
decoding. `--disable-overlap-schedule` avoids that; docs/inference.md shows the effect of a strength in both cases.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor

from lz_penalty.matches import NOTHING
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise_tokens
from lz_penalty.rows import RowParameters
from lz_penalty.slots import put_last

WIDTH = 512
"""The widest window that a request may ask for, as under vLLM: a window is built anew at each step."""

_log = logging.getLogger(__name__)


def _interface() -> type:
    """SGLang's base class. Raises ImportError if it is not installed."""
    try:
        found: type = import_module("sglang.srt.sampling.custom_logit_processor").CustomLogitProcessor
    except ImportError as error:
        raise ImportError(f"LZ penalty: no SGLang with custom logit processors is installed ({error})") from error
    return found


class LZSglangProcessor(_interface()):  # type: ignore[misc]
    """Subtracts the LZ penalty from the logits of the requests that ask for it."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Mapping[str, Any] | None] | None = None) -> Tensor:
        """Subtract the penalty from the logits, in place, [rows, vocabulary]; one mapping a row."""
        given = list(custom_param_list or ())
        parameters = [_asked(each) for each in given]
        if len(given) != len(logits) or all(each is None for each in parameters):
            return logits
        rows = _rows(tuple(parameters), logits.device)
        windows = numpy.full((len(given), rows.width), NOTHING, dtype=numpy.int64)
        for window, each, asked in zip(windows, given, parameters, strict=True):
            if each and asked is not None:
                put_last(window, each["__req__"].output_ids)
        return penalise_tokens(logits, torch.from_numpy(windows).to(logits.device, non_blocking=True), rows)


@lru_cache(maxsize=8)
def _rows(parameters: tuple[LZParameters | None, ...], device: torch.device) -> RowParameters:
    """The parameters of a batch, cached, since a batch is the same for many steps."""
    return RowParameters.of(parameters, device)


def _asked(given: Mapping[str, Any] | None) -> LZParameters | None:
    """Parameters of a request. A request with invalid parameters is ended and gets no penalty."""
    if given is None or "__req__" not in given:
        return None
    try:
        return LZParameters.of_request(given, kept=WIDTH)
    except ValueError as error:
        _refuse(given["__req__"], str(error))
        return None


def _refuse(request: Any, error: str) -> None:
    """End a request as SGLang's scheduler ends a running one: an exception here would end the server."""
    try:
        abort = import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
        request.to_finish = abort(error, HTTPStatus.BAD_REQUEST, "BadRequestError")
    except (ImportError, AttributeError, TypeError) as failure:
        _warn_once(error, str(failure))


@lru_cache(maxsize=1024)
def _warn_once(error: str, failure: str) -> None:
    _log.warning("%s; the request gets no penalty, and could not be ended: %s", error, failure)
