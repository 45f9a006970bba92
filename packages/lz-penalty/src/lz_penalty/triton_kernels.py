"""The kernels. Importing this module imports Triton; `kernels` imports it at the first use."""

# mypy: ignore-errors
# Triton compiles the source of these functions; Python's types do not apply to it.

import triton
import triton.language as tl


@triton.jit
def lengths(window, out, lookback, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Match lengths of one row of a window, computed anew."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    there = place < WIDTH
    most = tl.load(lookback + row)
    window += row * WIDTH
    alive = tl.load(window + place, mask=there, other=-1) >= 0
    found = tl.zeros([BLOCK], tl.int32)
    for back in range(1, MOST + 1):
        last = tl.load(window + WIDTH - back, mask=back <= WIDTH, other=-1)
        # Outside the window is -2, which equals no token.
        before = tl.load(window + place - back, mask=there & (place >= back), other=-2)
        alive = alive & (before == last) & (back <= most)
        found += alive.to(tl.int32)
    tl.store(out + row * WIDTH + place, found, mask=there)


@triton.jit
def penalty(
    logits,
    window,
    lengths,
    lines,
    strength,
    windows,
    min_match,
    modes,
    vocabulary,
    stride,
    window_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    AMORTIZED: tl.constexpr,
    DISTANCE: tl.constexpr,
):
    """Subtract the penalty from the row of logits of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    window += row * window_stride
    lengths += row * WIDTH
    own = WIDTH - tl.load(windows + row)
    mode = tl.load(modes + row)
    bits = tl.log2(vocabulary.to(tl.float32))

    token = tl.load(window + place, mask=place < WIDTH, other=-1)
    counts = (place >= own) & (token >= 0) & (token < vocabulary)
    length = tl.load(lengths + place, mask=place < WIDTH, other=0)
    length = tl.where(place < WIDTH, tl.minimum(length, place - own), -1)

    longest = tl.max(length, axis=0)
    nearest = tl.min(tl.where(length == longest, WIDTH - place, WIDTH), axis=0).to(tl.float32)
    top = tl.maximum(longest, 2).to(tl.float32)
    extended = tl.log2((top - 1) / top * (1 + 1 / nearest)) - 1

    # For each position, over all positions of the same token: the minimum cost, longest match, and newest position.
    cost = tl.full([BLOCK], float("inf"), tl.float32)
    best = tl.full([BLOCK], -1, tl.int32)
    newest = tl.full([BLOCK], -1, tl.int32)
    for begin in range(0, BLOCK, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_token = tl.load(window + other, mask=other < WIDTH, other=-1)
        other_counts = (other >= own) & (other_token >= 0) & (other_token < vocabulary)
        other_length = tl.load(lengths + other, mask=other < WIDTH, other=0)
        other_length = tl.where(other_counts, tl.minimum(other_length, other - own), -1)
        distance = tl.where(other_counts, WIDTH - other, 1).to(tl.float32)
        whole = tl.maximum(other_length + 1, 1).to(tl.float32)
        shared = tl.maximum((tl.log2(distance + 1) + tl.log2(whole)) / whole, 0.0)
        residual = tl.where((other_length == longest) & (longest >= 2), extended, tl.log2(distance))
        other_cost = tl.where(mode == AMORTIZED, shared, residual)
        same = (token[:, None] == other_token[None, :]) & other_counts[None, :]
        cost = tl.minimum(cost, tl.min(tl.where(same, other_cost[None, :], float("inf")), axis=1))
        # Length and position as one number: the longest match, and the nearest of equal length.
        rank = tl.where(same, other_length[None, :] * BLOCK + other[None, :], -1)
        best = tl.maximum(best, tl.max(rank, axis=1))
        newest = tl.maximum(newest, tl.max(tl.where(same, other[None, :], -1), axis=1))

    cost = tl.where(mode == DISTANCE, tl.log2(tl.maximum(WIDTH - best % BLOCK, 1).to(tl.float32)), cost)
    chosen = counts & (newest == place) & (best // BLOCK + 1 >= tl.load(min_match + row))
    taken = tl.load(strength + row) * tl.maximum(bits - cost, 0.0)
    at = logits + tl.load(lines + row) * stride + token
    before = tl.load(at, mask=chosen, other=0.0)
    tl.store(at, (before.to(tl.float32) - taken).to(before.dtype), mask=chosen)
