"""The Triton kernels of :mod:`kvlab_kernels.rows`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "count"])
def gather(x, index, out, heads, count, x_b, x_h, x_n, i_b, i_h, o_b, o_h, o_n, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """ROWS rows of one head, W words each, copied as they are."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < count
    row = tl.load(index + b * i_b + h * i_h + i, mask=live, other=0).to(tl.int64)
    for w0 in tl.static_range(0, W, COLUMNS):
        w = w0 + tl.arange(0, COLUMNS)
        good = live[:, None] & (w < W)[None, :]
        words = tl.load(x + b * x_b + h * x_h + row[:, None] * x_n + w[None, :], mask=good, other=0)
        tl.store(out + b * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n + w[None, :], words, mask=good)


@triton.jit(do_not_specialize=["heads", "count"])
def turn(x, places, waves, out, heads, count, x_b, x_h, x_n, p_b, p_h, p_n, w_n, o_b, o_h, o_n, sign,
         D: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """ROWS rows of one head: the pairs of their first 2 * HALF channels turned by place x frequency, the rest copied.

    STEP: 1 where pairs are neighbours (interleaved), HALF where they are halves. A place below 0 turns the other way.
    """
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = i < count
    place = tl.load(places + b * p_b + h * p_h + i * p_n, mask=live, other=0).to(tl.int64)
    j = tl.arange(0, P)
    first = j if STEP == HALF else 2 * j
    good = live[:, None] & (j < HALF)[None, :]
    wave = waves + tl.where(place < 0, -place, place)[:, None] * w_n + j[None, :]
    cos = tl.load(wave, mask=good, other=0.0)
    sin = tl.load(wave + HALF, mask=good, other=0.0) * tl.where(place < 0, -sign, sign)[:, None]
    base = x + b * x_b + h * x_h + i.to(tl.int64)[:, None] * x_n
    to = out + b * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n
    one = tl.load(base + first[None, :], mask=good, other=0.0).to(tl.float32)
    two = tl.load(base + (first + STEP)[None, :], mask=good, other=0.0).to(tl.float32)
    tl.store(to + first[None, :], (one * cos - two * sin).to(out.dtype.element_ty), mask=good)
    tl.store(to + (first + STEP)[None, :], (two * cos + one * sin).to(out.dtype.element_ty), mask=good)
    for d0 in tl.static_range(2 * HALF, D, P):
        d = d0 + j
        rest = live[:, None] & (d < D)[None, :]
        tl.store(to + d[None, :], tl.load(base + d[None, :], mask=rest, other=0.0).to(out.dtype.element_ty), mask=rest)
