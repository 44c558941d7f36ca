"""The Triton kernels of :mod:`kvlab_kernels.rows`."""

from __future__ import annotations

import triton
import triton.language as tl

from ._quantize_kernels import _code, _levels


@triton.jit(do_not_specialize=["heads", "count"])
def gather(x, index, out, heads, count, x_b, x_h, x_n, i_b, i_h, o_b, o_h, o_n, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """ROWS rows of one head, W words each, copied as they are."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = i < count
    row = tl.load(index + b * i_b + h * i_h + i, mask=live, other=0).to(tl.int64)
    for w0 in tl.static_range(0, W, COLUMNS):
        w = w0 + tl.arange(0, COLUMNS)
        good = live[:, None] & (w < W)[None, :]
        words = tl.load(x + b * x_b + h * x_h + row[:, None] * x_n + w[None, :], mask=good, other=0)
        tl.store(out + b * o_b + h * o_h + i.to(tl.int64)[:, None] * o_n + w[None, :], words, mask=good)


@triton.jit(do_not_specialize=["heads", "count"])
def turn(x, places, frequencies, out, heads, count, x_b, x_h, x_n, p_b, p_h, p_n, o_b, o_h, o_n, sign,
         D: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """ROWS rows of one head: the pairs of their first 2 * HALF channels turned by place x frequency, the rest copied.

    STEP: 1 where pairs are neighbours (interleaved), HALF where they are halves.
    """
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = i < count
    place = tl.load(places + b * p_b + h * p_h + i * p_n, mask=live, other=0).to(tl.float32) * sign
    j = tl.arange(0, P)
    first = j if STEP == HALF else 2 * j
    good = live[:, None] & (j < HALF)[None, :]
    angle = place[:, None] * tl.load(frequencies + j, mask=j < HALF, other=0.0)[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
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


@triton.jit
def _turned(rows, matrix, first, D: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Channels ``first .. first + CHUNK`` of ``rows @ matrix``, float32 [ROWS, COLUMNS]."""
    d = tl.arange(0, P)
    j = tl.arange(0, COLUMNS)
    part = tl.load(matrix + d[:, None] * D + (first + j)[None, :], mask=(d < D)[:, None] & (j < CHUNK)[None, :], other=0.0)
    return tl.dot(rows, part, input_precision="tf32x3")


@triton.jit(do_not_specialize=["heads", "tokens"])
def rotate_quantize(x, matrix, codes, scale, zero, heads, tokens, x_b, x_h, x_n, c_b, c_h, c_n, s_b, s_h, s_n, z_b, z_h, z_n,
                    BITS: tl.constexpr, SIZE: tl.constexpr, PLANE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """``quantize_token`` of ``x @ matrix``, which is never written down: each piece is multiplied when it is needed, once for its range, once for its codes."""
    TOP: tl.constexpr = 2.0**BITS - 1.0
    FIELDS: tl.constexpr = 8 // BITS
    CHUNKS: tl.constexpr = PLANE // CHUNK
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    n = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, P)
    j = tl.arange(0, COLUMNS)
    live = n < tokens
    rows = tl.load(x + b * x_b + h * x_h + n[:, None] * x_n + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(
        tl.float32
    )
    good = live[:, None] & (j < CHUNK)[None, :]
    zeros = ()
    divisors = ()
    for g in tl.static_range(PLANE * FIELDS // SIZE):
        low = tl.full([ROWS], float("inf"), tl.float32)
        high = tl.full([ROWS], float("-inf"), tl.float32)
        for part in tl.static_range(CHUNKS * FIELDS):
            if (part % FIELDS * PLANE + part // FIELDS * CHUNK) // SIZE == g:
                v = _turned(rows, matrix, part % FIELDS * PLANE + part // FIELDS * CHUNK, D, P, CHUNK, COLUMNS)
                low = tl.minimum(low, tl.min(tl.where(good, v, float("inf")), 1))
                high = tl.maximum(high, tl.max(tl.where(good, v, float("-inf")), 1))
        low, high = tl.where(live, low, 0.0), tl.where(live, high, 0.0)
        s, z, divisor = _levels(low, high, TOP, LARGEST, scale.dtype.element_ty)
        tl.store(scale + b * s_b + h * s_h + n * s_n + g, s, mask=live)
        tl.store(zero + b * z_b + h * z_h + n * z_n + g, z, mask=live)
        zeros = zeros + (z.to(tl.float32),)
        divisors = divisors + (divisor,)
    for chunk in tl.static_range(CHUNKS):
        packed = tl.zeros([ROWS, COLUMNS], tl.int32)
        for field in tl.static_range(FIELDS):
            v = _turned(rows, matrix, field * PLANE + chunk * CHUNK, D, P, CHUNK, COLUMNS)
            z = zeros[(field * PLANE + chunk * CHUNK) // SIZE][:, None]
            packed |= _code(v, z, divisors[(field * PLANE + chunk * CHUNK) // SIZE][:, None], TOP) << (field * BITS)
        tl.store(codes + b * c_b + h * c_h + n[:, None] * c_n + (chunk * CHUNK + j)[None, :], packed.to(tl.uint8), mask=good)
