"""The Triton kernels of :mod:`kvlab_kernels.quantize`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _levels(low, high, TOP: tl.constexpr, LARGEST: tl.constexpr, SCALE: tl.constexpr):
    """-> (scale, zero) as they are stored, and the divisor: the stored scale, or infinity where it is 0."""
    zero = tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(SCALE)
    scale = tl.minimum(tl.div_rn(high - low, low * 0.0 + TOP), LARGEST).to(SCALE)
    divisor = scale.to(tl.float32)
    return scale, zero, tl.where(divisor == 0.0, float("inf"), divisor)


@triton.jit
def _code(x, zero, divisor, TOP: tl.constexpr):
    """Codes as int32. Adding and taking away 1.5 * 2**23 rounds to an integer, half to even."""
    x, divisor = tl.broadcast(x - zero, divisor)
    t = tl.minimum(tl.maximum(tl.div_rn(x, divisor), 0.0), TOP)
    return ((t + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit(do_not_specialize=["heads"])
def quantize_channel(x, codes, scale, zero, heads, x_b, x_h, x_n, x_d, c_b, c_h, c_n, s_b, s_h, s_n, z_b, z_h, z_n,
                     BITS: tl.constexpr, SIZE: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                     LARGEST: tl.constexpr):  # fmt: skip
    """One group of SIZE tokens, COLUMNS bytes of each: the channels of all fields of these bytes."""
    TOP: tl.constexpr = 2.0**BITS - 1.0
    b = (tl.program_id(1) // heads).to(tl.int64)  # tokens along the first axis: only there a grid may be long
    h = (tl.program_id(1) % heads).to(tl.int64)
    group = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < PLANE
    good = (i < SIZE)[:, None] & inside[None, :]
    n = group * SIZE + i
    packed = tl.zeros([ROWS, COLUMNS], tl.int32)
    for field in tl.static_range(8 // BITS):
        d = field * PLANE + j
        at = x + b * x_b + h * x_h + n[:, None] * x_n + (d * x_d)[None, :]
        v = tl.load(at, mask=good, other=0.0).to(tl.float32)
        low = tl.min(tl.where(good, v, float("inf")), 0)
        high = tl.max(tl.where(good, v, float("-inf")), 0)
        low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
        s, z, divisor = _levels(low, high, TOP, LARGEST, scale.dtype.element_ty)
        tl.store(scale + b * s_b + h * s_h + group * s_n + d, s, mask=inside)
        tl.store(zero + b * z_b + h * z_h + group * z_n + d, z, mask=inside)
        packed |= _code(v, z.to(tl.float32)[None, :], divisor[None, :], TOP) << (field * BITS)
    tl.store(codes + b * c_b + h * c_h + n[:, None] * c_n + j[None, :], packed.to(tl.uint8), mask=good)


@triton.jit
def _part(x, n, live, x_n, x_d, matrix, first, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Channels ``first .. first + CHUNK`` of the tokens ``n``, float32 [ROWS, COLUMNS]: as they lie, or of their products with ``matrix``."""
    j = tl.arange(0, COLUMNS)
    inside = (j < CHUNK)[None, :]
    if matrix is None:
        return tl.load(x + n[:, None] * x_n + ((first + j) * x_d)[None, :], mask=live[:, None] & inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for d0 in range(0, D, 32):
            d = d0 + tl.arange(0, 32)
            rows = tl.load(x + n[:, None] * x_n + (d * x_d)[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(
                tl.float32
            )
            part = tl.load(matrix + d[:, None] * D + (first + j)[None, :], mask=(d < D)[:, None] & inside, other=0.0)
            total = tl.dot(rows, part, total, input_precision="tf32x3")
        return total


@triton.jit(do_not_specialize=["heads", "tokens"])
def quantize_token(x, matrix, codes, scale, zero, heads, tokens, x_b, x_h, x_n, x_d, c_b, c_h, c_n, s_b, s_h, s_n, z_b, z_h, z_n,
                   BITS: tl.constexpr, SIZE: tl.constexpr, PLANE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """ROWS tokens, or with ``matrix`` [D, D] their products with it, which are never written down.

    A chunk of CHUNK bytes is so narrow that each of its fields lies within one group of SIZE channels. Every number is read, or multiplied, twice: once
    for the range of its group and once for its code. The second time it comes from the processor's cache.
    """
    TOP: tl.constexpr = 2.0**BITS - 1.0
    FIELDS: tl.constexpr = 8 // BITS
    CHUNKS: tl.constexpr = PLANE // CHUNK
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    live = n < tokens
    good = live[:, None] & (j < CHUNK)[None, :]
    x += b * x_b + h * x_h
    zeros = ()
    divisors = ()
    for g in tl.static_range(PLANE * FIELDS // SIZE):
        low = tl.full([ROWS], float("inf"), tl.float32)
        high = tl.full([ROWS], float("-inf"), tl.float32)
        for part in tl.static_range(CHUNKS * FIELDS):
            if (part % FIELDS * PLANE + part // FIELDS * CHUNK) // SIZE == g:
                v = _part(x, n, live, x_n, x_d, matrix, part % FIELDS * PLANE + part // FIELDS * CHUNK, D, CHUNK, ROWS, COLUMNS)
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
            v = _part(x, n, live, x_n, x_d, matrix, field * PLANE + chunk * CHUNK, D, CHUNK, ROWS, COLUMNS)
            z = zeros[(field * PLANE + chunk * CHUNK) // SIZE][:, None]
            packed |= _code(v, z, divisors[(field * PLANE + chunk * CHUNK) // SIZE][:, None], TOP) << (field * BITS)
        tl.store(codes + b * c_b + h * c_h + n[:, None] * c_n + (chunk * CHUNK + j)[None, :], packed.to(tl.uint8), mask=good)
