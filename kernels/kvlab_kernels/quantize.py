"""Quantization of keys and values to packed codes, straight into cache storage."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from . import launch
from .layout import Codes
from .reference import destination, quantize_torch

MAX_GROUP = 1024  # tokens of a channel group, which one program holds


def quantize(
    x: Tensor, bits: int, axis: str, group_size: int, scale_dtype: torch.dtype = torch.float16, out: Codes | None = None
) -> Codes:
    """``x`` ``[B, H, N, D]`` (any strides) -> :class:`~kvlab_kernels.layout.Codes`, by one kernel.

    Arguments, rounding and errors are those of :func:`~kvlab_kernels.reference.quantize_torch`, and so are the results, bit for bit.
    ``out`` may be views of a cache, their last dim contiguous. A channel group may hold at most 1,024 tokens.
    """
    launch.require_triton()
    launch.check_device(x, *((out.codes, out.scale, out.zero) if out is not None else ()))
    out = destination(x, bits, axis, group_size, scale_dtype, out)
    if x.numel():
        kernel, grid, args, constants, options = plan(x, out)
        with launch.on(x.device):
            kernel[grid](*args, **constants, **options)
    return out


def rotate_quantize(
    x: Tensor, matrix: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype = torch.float16, out: Codes | None = None
) -> Codes:
    """``quantize(x @ matrix, bits, "token", group_size)`` in one kernel; the rotated rows are never written (QuaRot, arXiv 2404.00456).

    ``x``: ``[B, H, N, D]``, D up to 256. ``matrix``: float32 ``[D, D]``, a Hadamard matrix over the root of D, say; products are summed in float32. Otherwise
    as :func:`quantize`; :func:`rotate_quantize_torch` is the plain way.
    """
    launch.require_triton()
    launch.check_device(x, matrix, *((out.codes, out.scale, out.zero) if out is not None else ()))
    out = destination(x, bits, "token", group_size, scale_dtype, out)
    d = x.shape[3]
    if tuple(matrix.shape) != (d, d) or matrix.dtype != torch.float32:
        raise ValueError(f"matrix is {matrix.dtype} {list(matrix.shape)}, must be torch.float32 {[d, d]}")
    if d > 256:
        raise ValueError(f"x has head dim {d}, must be 1 to 256")
    if x.numel():
        kernel, grid, args, constants, options = plan(x, out, matrix.contiguous())
        with launch.on(x.device):
            kernel[grid](*args, **constants, **options)
    return out


def rotate_quantize_torch(
    x: Tensor, matrix: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype = torch.float16, out: Codes | None = None
) -> Codes:
    """:func:`rotate_quantize` in plain torch."""
    return quantize_torch(x.float() @ matrix, bits, "token", group_size, scale_dtype, out)


def plan(
    x: Tensor, out: Codes, matrix: Tensor | None = None
) -> tuple[Any, tuple[int, ...], tuple, dict[str, Any], dict[str, int]]:
    """The launch: kernel, grid, arguments, compile-time constants and options."""
    from . import _quantize_kernels as kernels

    b, h, n, d = x.shape
    assert out.zero is not None  # destination() saw to it
    for name, t in (("codes", out.codes), ("scale", out.scale), ("zero", out.zero)):
        if t.stride(3) != 1 and t.shape[3] > 1:
            raise ValueError(f"out.{name} has stride {t.stride(3)} in its last dim, must be 1")
    if b * h > launch.GRID:
        raise ValueError(f"x has {b} x {h} rows and heads, must be at most {launch.GRID} together")
    size, plane = out.group_size, d * out.bits // 8
    constants: dict[str, Any] = dict(BITS=out.bits, SIZE=size, PLANE=plane, LARGEST=torch.finfo(out.scale.dtype).max)
    strides = (*x.stride(), *out.codes.stride()[:3], *out.scale.stride()[:3], *out.zero.stride()[:3])
    if out.axis == "channel":
        if size > MAX_GROUP:
            raise ValueError(f"group_size={size} must be at most {MAX_GROUP} for axis='channel'")
        rows = _power_of_2(size)
        columns = min(_power_of_2(plane), max(8, min(64, 8192 // rows)))
        constants |= dict(ROWS=rows, COLUMNS=columns)
        grid = (n // size, b * h, -(-plane // columns))
        return kernels.quantize_channel, grid, (x, out.codes, out.scale, out.zero, h, *strides), constants, {"num_warps": 4}
    chunk = gcd(plane, size)
    columns = _power_of_2(chunk)
    rows = max(1, min(64, 2048 // max(columns, _power_of_2(plane))))
    if matrix is not None:
        rows, columns = 16, max(16, columns)  # what a matrix product takes
    constants |= dict(CHUNK=chunk, ROWS=rows, COLUMNS=columns, D=d)
    return (
        kernels.quantize_token,
        (-(-n // rows), b * h),
        (x, matrix, out.codes, out.scale, out.zero, h, n, *strides),
        constants,
        {"num_warps": 4},
    )


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
