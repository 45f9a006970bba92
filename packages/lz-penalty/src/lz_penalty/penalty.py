"""The penalty on a batch of logits: stateless, or with a state that is updated token by token.

Both touch at most as many logits of a row as the window has tokens, for any vocabulary and text length. They do not
synchronize with the device, and are deterministic, since updates of the same logit only take the minimum.
"""

from collections.abc import Sequence
from math import log2

import torch
from torch import Tensor

from lz_penalty import devices
from lz_penalty.lookup import ResidualLookup
from lz_penalty.matches import Matches, window_of
from lz_penalty.parameters import MODES, LZParameters
from lz_penalty.rows import RowParameters


def penalise(
    logits: Tensor,
    history: Tensor,
    parameters: LZParameters | Sequence[LZParameters | None] | RowParameters,
    *,
    starts: Tensor | int | None = None,
    ends: Tensor | int | None = None,
) -> Tensor:
    """Subtract the penalty from the logits, in place, given only the tokens so far. Returns the logits.

    Args:
        logits: of the next token, floating point [batch, vocabulary].
        history: tokens so far, [batch, length].
        parameters: one for all, or one a row; None: that row gets no penalty.
        starts: the first column of `history` that counts, [batch] or one for all; default: the first.
        ends: the column after the last that counts, likewise; default: all.

    Raises ValueError if the shapes do not match.
    """
    rows = rows_of(parameters, logits)
    if history.ndim != 2 or history.shape[0] != logits.shape[0]:
        raise ValueError(f"LZ penalty: logits of shape {list(logits.shape)}, but a history of {list(history.shape)}")
    return penalise_tokens(logits, window_of(history, rows.width, starts=starts, ends=ends), rows)


def penalise_tokens(logits: Tensor, window: Tensor, rows: RowParameters) -> Tensor:
    """Subtract the penalty from the logits, in place, given the last tokens. Returns the logits."""
    if _by_kernels(logits):
        from lz_penalty import kernels

        return kernels.penalise_window(logits, window, kernels.match_lengths(window, rows), rows)
    return penalise_window(logits, Matches.found(window, rows), rows)


def penalise_matches(logits: Tensor, matches: Matches, rows: RowParameters, lines: Tensor | None = None) -> Tensor:
    """As `penalise_window`, with the Triton kernels on a GPU."""
    if _by_kernels(logits):
        from lz_penalty import kernels

        return kernels.penalise_window(logits, matches.window, matches.lengths, rows, lines)
    return penalise_window(logits, matches, rows, lines)


def rows_of(parameters: LZParameters | Sequence[LZParameters | None] | RowParameters, logits: Tensor) -> RowParameters:
    """The parameters of each row. Raises ValueError if their number is not that of the rows of logits."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"LZ penalty: logits are {logits.dtype} of shape {list(logits.shape)}, not floats of two axes")
    if isinstance(parameters, LZParameters):
        parameters = [parameters] * logits.shape[0]
    rows = parameters if isinstance(parameters, RowParameters) else RowParameters.of(parameters, logits.device)
    if len(rows.strength) != logits.shape[0]:
        raise ValueError(f"LZ penalty: {len(rows.strength)} parameters for {logits.shape[0]} rows of logits")
    return rows


def penalise_window(logits: Tensor, matches: Matches, rows: RowParameters, lines: Tensor | None = None) -> Tensor:
    """Subtract the penalty from the logits, in place, given the matches. Returns the logits.

    Args:
        logits: [batch, vocabulary].
        matches: of the sequences.
        rows: their parameters.
        lines: the row of logits of each sequence, int64; default: the sequences are the rows of logits, in order. Rows
                of logits that are not listed are neither read nor written.
    """
    if not rows.modes or not len(logits):
        return logits
    vocabulary = logits.shape[1]
    inside = rows.place >= 0
    lengths = matches.lengths
    taken = log2(vocabulary) - _costs(lengths, rows)
    if vocabulary < rows.width + 2:
        taken = taken.clamp_min_(0)
    # Unused places get some token of the vocabulary, and a penalty of 0.
    at = matches.window.clamp(0, vocabulary - 1)
    counts = (at == matches.window).logical_and_(inside)
    target, index = (logits, at) if lines is None else _as_one_row(logits, at, lines)
    before = target.gather(1, index).view_as(at)
    if rows.by_match:
        counts &= _chosen(target, index, before, torch.where(counts, lengths, -1), rows)
    after = torch.where(counts, before - taken * rows.strength, before).to(logits.dtype)
    target.scatter_reduce_(1, index, after.view_as(index), "amin")
    return logits


def _as_one_row(logits: Tensor, at: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
    """All logits as one row, and the indexes in it of the tokens of the listed rows."""
    count, vocabulary = logits.shape
    stride = logits.stride(0)
    if logits.stride(1) != 1:
        raise ValueError(f"LZ penalty: a row of logits is not contiguous, its stride is {logits.stride(1)}")
    extent = (count - 1) * stride + vocabulary
    return logits.as_strided((1, extent), (extent, 1)), (at + lines.unsqueeze(1) * stride).view(1, -1)


def _costs(lengths: Tensor, rows: RowParameters) -> Tensor:
    """Bits at each position of the windows, float32; a token's cost is the minimum over its positions."""
    costs = rows.nearness
    if "residual" in rows.modes:
        longest = lengths.amax(1, keepdim=True).clamp_min_(2)
        extends = lengths == longest
        nearest = torch.where(extends, rows.distances, torch.inf).amin(1, keepdim=True)
        extended = ((longest - 1) / longest * (1 + 1 / nearest)).log2_() - 1
        if len(rows.modes) > 1:
            extends &= rows.mode == MODES.index("residual")
        costs = torch.where(extends, extended, costs)
    if "amortized" in rows.modes:
        whole = (lengths + 1).clamp_min_(1).to(torch.float32)
        shared = ((rows.distances + 1).log2() + whole.log2()).div_(whole).clamp_min_(0)
        costs = torch.where(rows.mode == MODES.index("amortized"), shared, costs)
    return costs


def _chosen(target: Tensor, index: Tensor, before: Tensor, lengths: Tensor, rows: RowParameters) -> Tensor:
    """Positions whose match is long enough and, in mode *distance*, is the longest of its token.

    The longest match of each token is found in the logits themselves, which are as wide as the vocabulary; their values
    are then restored. So it needs no memory of that size and no pass over the vocabulary.
    """
    target.scatter_(1, index, -1.0)
    target.scatter_reduce_(1, index, lengths.to(target.dtype).view_as(index), "amax")
    longest = target.gather(1, index).to(torch.int32).view_as(before)
    target.scatter_(1, index, before.view_as(index))
    enough = longest + 1 >= rows.min_match
    if "distance" in rows.modes:
        enough &= (lengths == longest) | (rows.mode != MODES.index("distance"))
    return enough


class LZPenalty:
    """The penalty with a state: a step costs the same for any text length, since matches are updated, not searched.

    A row holds the window and the match lengths of one sequence. Not thread-safe.

    Args:
        parameters: of each sequence; None: that sequence gets no penalty.
        device: where the logits are.
        width: tokens that a row holds; default: the widest window.
    """

    def __init__(
        self,
        parameters: Sequence[LZParameters | None],
        device: torch.device | str = "cpu",
        *,
        width: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.parameters = list(parameters)
        self._set_rows(width)
        self.matches = Matches.empty(len(self.parameters), self.rows.width, self.device)

    def _set_rows(self, width: int | None = None) -> None:
        self.rows = RowParameters.of(self.parameters, self.device, width)
        self._looks_up = ResidualLookup(self.rows) if ResidualLookup.fits(self.rows) else None

    def push(self, tokens: Tensor, active: Tensor | None = None) -> None:
        """Append one token to each sequence, int64 [batch]; rows that are not `active` (bool [batch]) do not change."""
        self.matches.push(tokens, self.rows, active)

    def restart(self, history: Tensor, *, starts: Tensor | int | None = None, ends: Tensor | int | None = None) -> None:
        """Start again with the tokens so far; arguments as for `penalise`."""
        window = window_of(history, self.rows.width, starts=starts, ends=ends)
        self.matches = Matches.found(window, self.rows)

    def replace(self, row: int, parameters: LZParameters | None, history: Sequence[int] = ()) -> None:
        """Give a row to another sequence, with its tokens so far."""
        self.parameters[row] = parameters
        self._set_rows(self.rows.width)
        one = RowParameters.of([parameters], self.device, self.rows.width)
        tokens = torch.tensor([list(history[-self.rows.width :])], dtype=torch.int64).to(self.device)
        found = Matches.found(window_of(tokens, self.rows.width), one)
        window, lengths = self.matches.window.clone(), self.matches.lengths
        window[row], lengths[row] = found.window[0], found.lengths[0]
        self.matches = Matches(window, lengths)

    def apply(self, logits: Tensor) -> Tensor:
        """Subtract the penalty from the logits of the next token, in place, [batch, vocabulary]. Returns the logits."""
        matches, rows = self.matches, rows_of(self.rows, logits)
        if self._looks_up is not None and matches.filled is not None and matches.most < logits.shape[1]:
            return self._looks_up.penalise(logits, matches, matches.filled)
        return penalise_matches(logits, matches, rows)


def _by_kernels(logits: Tensor) -> bool:
    from lz_penalty import kernels

    return devices.takes_kernels(logits.device) and kernels.available()
