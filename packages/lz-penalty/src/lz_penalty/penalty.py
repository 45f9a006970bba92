"""The penalty on a batch of logits: stateless, or with a state that grows by a token a step.

Both touch as many logits of a row as the window has tokens, whatever the vocabulary and the length of the text; they
ask nothing of the device, and give the same each time, as they only take the least of what falls on the same logit.
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
    """Take the penalty off the logits, in place, from nothing but the tokens so far. Returns the logits.

    Args:
        logits: of the next token, floating point [batch, vocabulary].
        history: tokens so far, [batch, length].
        parameters: one for all, or one a row; None: that row gets no penalty.
        starts: the first column of `history` that counts, [batch] or one for all; default: the first there is.
        ends: the column after the last that counts, likewise; default: all.

    Raises ValueError where the shapes do not fit.
    """
    rows = rows_of(parameters, logits)
    if history.ndim != 2 or history.shape[0] != logits.shape[0]:
        raise ValueError(f"LZ penalty: logits of shape {list(logits.shape)}, but a history of {list(history.shape)}")
    return penalise_tokens(logits, window_of(history, rows.width, starts=starts, ends=ends), rows)


def penalise_tokens(logits: Tensor, window: Tensor, rows: RowParameters) -> Tensor:
    """Take the penalty off the logits, in place, where the last tokens are known. Returns the logits."""
    if _by_kernels(logits):
        from lz_penalty import kernels

        return kernels.penalise_window(logits, window, kernels.match_lengths(window, rows), rows)
    return penalise_window(logits, Matches.found(window, rows), rows)


def rows_of(parameters: LZParameters | Sequence[LZParameters | None] | RowParameters, logits: Tensor) -> RowParameters:
    """The parameters of each row. Raises ValueError where there are not as many as rows of logits."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"LZ penalty: logits are {logits.dtype} of shape {list(logits.shape)}, not floats of two axes")
    if isinstance(parameters, LZParameters):
        parameters = [parameters] * logits.shape[0]
    rows = parameters if isinstance(parameters, RowParameters) else RowParameters.of(parameters, logits.device)
    if len(rows.strength) != logits.shape[0]:
        raise ValueError(f"LZ penalty: {len(rows.strength)} parameters for {logits.shape[0]} rows of logits")
    return rows


def penalise_window(logits: Tensor, matches: Matches, rows: RowParameters) -> Tensor:
    """Take the penalty off the logits, in place, where the matches are known. Returns the logits."""
    if not rows.modes or not len(logits):
        return logits
    vocabulary = logits.shape[1]
    inside = rows.place >= 0
    lengths = matches.lengths
    taken = log2(vocabulary) - _costs(lengths, rows)
    if vocabulary < rows.width + 2:
        taken = taken.clamp_min_(0)
    # What does not count stands for some token of the vocabulary, and takes nothing off it.
    at = matches.window.clamp(0, vocabulary - 1)
    counts = (at == matches.window).logical_and_(inside)
    before = logits.gather(1, at)
    if rows.by_match:
        counts &= _chosen(logits, at, before, torch.where(counts, lengths, -1), rows)
    after = torch.where(counts, before - taken * rows.strength, before).to(logits.dtype)
    return logits.scatter_reduce_(1, at, after, "amin")


def _costs(lengths: Tensor, rows: RowParameters) -> Tensor:
    """Bits at each position of the windows, float32; a token costs the least of its positions."""
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


def _chosen(logits: Tensor, at: Tensor, before: Tensor, lengths: Tensor, rows: RowParameters) -> Tensor:
    """Positions whose token ends a match that is long enough and, in mode *distance*, that are of its longest.

    The longest match of each token is found on the logits themselves: they are as wide as the vocabulary, and what
    stood there is put back. So it costs no memory and no pass over them.
    """
    logits.scatter_(1, at, -1.0)
    logits.scatter_reduce_(1, at, lengths.to(logits.dtype), "amax")
    longest = logits.gather(1, at).to(torch.int32)
    logits.scatter_(1, at, before)
    enough = longest + 1 >= rows.min_match
    if "distance" in rows.modes:
        enough &= (lengths == longest) | (rows.mode != MODES.index("distance"))
    return enough


class LZPenalty:
    """The penalty with a state: a step costs the same however long the text is, and no match is looked for again.

    A row holds the window and the match lengths of one sequence, two rows of whole numbers. Not thread-safe.

    Args:
        parameters: of each sequence; None: it gets no penalty.
        device: where the logits are.
        width: tokens a row holds; default: the widest window.
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
        """Take one more token of each sequence, int64 [batch]; a row that is not `active` (bool [batch]) waits."""
        self.matches.push(tokens, self.rows, active)

    def restart(self, history: Tensor, *, starts: Tensor | int | None = None, ends: Tensor | int | None = None) -> None:
        """Begin anew with the tokens so far; arguments as of `penalise`."""
        window = window_of(history, self.rows.width, starts=starts, ends=ends)
        self.matches = Matches.found(window, self.rows)

    def replace(self, row: int, parameters: LZParameters | None, history: Sequence[int] = ()) -> None:
        """Give a row to another sequence, with the tokens that it has already."""
        self.parameters[row] = parameters
        self._set_rows(self.rows.width)
        one = RowParameters.of([parameters], self.device, self.rows.width)
        tokens = torch.tensor([list(history[-self.rows.width :])], dtype=torch.int64).to(self.device)
        found = Matches.found(window_of(tokens, self.rows.width), one)
        window, lengths = self.matches.window.clone(), self.matches.lengths
        window[row], lengths[row] = found.window[0], found.lengths[0]
        self.matches = Matches(window, lengths)

    def extend(self, count: int) -> None:
        """Add rows for so many more sequences, which get no penalty until they are replaced."""
        self.parameters += [None] * count
        self._set_rows(self.rows.width)
        more = Matches.empty(count, self.rows.width, self.device)
        window = torch.cat((self.matches.window, more.window))
        self.matches = Matches(window, torch.cat((self.matches.lengths, more.lengths)))

    def apply(self, logits: Tensor) -> Tensor:
        """Take the penalty off the logits of the next token, in place, [batch, vocabulary]. Returns the logits."""
        return self._apply(logits, self.matches, rows_of(self.rows, logits))

    def apply_to(self, logits: Tensor, sequences: Tensor, rows: RowParameters) -> Tensor:
        """As `apply`, where row r of the logits is of sequence `sequences[r]`, and `rows` has their parameters."""
        matches = Matches(self.matches.window[sequences], self.matches.lengths[sequences])
        return self._apply(logits, matches, rows_of(rows, logits))

    def _apply(self, logits: Tensor, matches: Matches, rows: RowParameters) -> Tensor:
        if _by_kernels(logits):
            from lz_penalty import kernels

            return kernels.penalise_window(logits, matches.window, matches.lengths, rows)
        if self._looks_up is not None and matches.filled is not None and matches.most < logits.shape[1]:
            return self._looks_up.penalise(logits, matches, matches.filled)
        return penalise_window(logits, matches, rows)


def _by_kernels(logits: Tensor) -> bool:
    from lz_penalty import kernels

    return devices.takes_kernels(logits.device) and kernels.available()
