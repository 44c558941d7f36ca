"""How codes lie in memory: the one description that stores write, torch reads and Triton kernels read.

A tensor ``x`` of shape ``[B, H, N, D]`` (batch, KV heads, tokens, head dim) is written as unsigned codes with
``x ≈ code * scale + zero``. Codes of fewer than eight bits are packed along the head dim in *planes*: with ``F = 8 // bits``
fields a byte, byte ``j`` of a token holds the channels ``j, j + D/F, j + 2D/F, …``, the first in the lowest bits. So a token's
row is a row of bytes (tokens can be gathered, paged and dropped one by one), and unpacking is a shift and a mask with no
interleaving: ``q @ x.T`` is the sum over planes of ``q[plane] @ field.T``. Three bits are written as the two lower bits of all channels in
planes of four fields, then the third bits in planes of eight: three eighths of a byte a number, and no number straddles two bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (8, 4, 2)  # what `quantize` writes
WIDTHS = (8, 4, 3, 2)
PARTS = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # how many bits of a code go into planes together, the lowest first
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Codes:
    """Quantized keys or values, packed.

    ``codes``: uint8 ``[B, H, N, D * bits // 8]``; the last dim is contiguous, the others may have any stride. ``format``: "int"; "e4m3" or
    "e5m2" for bytes that are 8-bit floats; "normal" for codes that number the levels of :func:`normal_levels`.
    ``scale``, ``zero``: float16 or float32, ``zero`` is the value of code 0, or None where codes are symmetric: then code ``2**(bits - 1)`` is
    zero (of floats, zero is). Their shape says what shares a scale:

    * ``axis="channel"``: ``[B, H, S, D]``; token ``n`` uses row ``group[b, h, n]``, or row ``n // group_size`` if ``group`` is None.
    * ``axis="token"``: ``[B, H, N, D // group_size]``; channel ``d`` of a token uses column ``d // group_size``.

    ``group``: int32 ``[B, H, N]`` or None; given once eviction has made the groups uneven.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    axis: str
    group_size: int
    group: Tensor | None = None
    format: str = "int"

    @property
    def head_dim(self) -> int:
        return self.codes.shape[-1] * 8 // self.bits


@dataclass(frozen=True)
class Places:
    """Where keys stand that are turned by their place when they are read (RoPE, arXiv 2104.09864; halves of the first R channels are pairs).

    ``waves``: float32 ``[P, R]``, the cosines of a place and then the sines. ``columns``: int32 ``[1 or B, 1 or H, N]``, each key's place; None: ``start``,
    ``start + 1``, ...
    """

    waves: Tensor
    columns: Tensor | None = None
    start: int = 0


def check_packs(dim: int, bits: int) -> None:
    """Raise ``ValueError`` unless a head of ``dim`` numbers fills whole bytes at every plane."""
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} must be one of {WIDTHS}")
    multiple = 8 // min(PARTS[bits])
    if dim % multiple:
        raise ValueError(f"head dim {dim} cannot be packed at {bits} bits: it must be a multiple of {multiple}")


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., D]`` with values under ``2**bits`` -> uint8 ``[..., D * bits // 8]``. Raises ``ValueError`` if ``D`` does not fill bytes."""
    if bits == 8:
        return codes
    check_packs(codes.shape[-1], bits)
    packed, done = [], 0
    for part in PARTS[bits]:
        field = (codes >> done) & (2**part - 1) if len(PARTS[bits]) > 1 else codes
        first, *others = field.chunk(8 // part, dim=-1)
        first = first.clone()
        for i, plane in enumerate(others, start=1):
            first |= plane << (i * part)
        packed.append(first)
        done += part
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack`."""
    if bits == 8:
        return packed
    dim, start, done = packed.shape[-1] * 8 // bits, 0, 0
    whole: Tensor | None = None
    for part in PARTS[bits]:
        width, fields = dim * part // 8, 8 // part
        bytes_ = packed[..., start : start + width]
        low = [(bytes_ >> (i * part)) & (2**part - 1) for i in range(fields - 1)]
        field = torch.cat([*low, bytes_ >> (8 - part)], dim=-1)
        whole = field if whole is None else whole | (field << done)
        start, done = start + width, done + part
    assert whole is not None
    return whole


@functools.cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """The ``2**bits`` numbers, rising, that say a standard normal number with the least squared error (Lloyd 1982; Max 1960).

    Each level is the mean of the numbers that are nearest to it: repeated until nothing moves.
    """
    if bits not in (2, 3, 4):
        raise ValueError(f"bits={bits} is not one of 2, 3, 4")
    half = 2 ** (bits - 1)  # symmetric: only the positive levels are sought
    levels = [(i + 0.5) * 2.5 / half for i in range(half)]
    for _ in range(2000):
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        masses = [(math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2 for a, b in itertools.pairwise(edges)]
        heights = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges]
        new = [(a - b) / mass for a, b, mass in zip(heights, heights[1:], masses, strict=False)]
        moved, levels = max(abs(a - b) for a, b in zip(levels, new, strict=True)), new
        if moved < 1e-12:
            break
    return (*(-level for level in reversed(levels)), *levels)


def dequantize(x: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, H, N, D]`` in ``dtype``: the plain reading of :class:`Codes`, the reference for every fast path."""
    if x.format in FLOATS:
        code = x.codes.view(FLOATS[x.format]).to(torch.float32)
    elif x.format == "normal":
        code = torch.tensor(normal_levels(x.bits), device=x.codes.device)[unpack(x.codes, x.bits).int()]
    else:
        code = unpack(x.codes, x.bits).to(torch.float32)
        if x.zero is None:
            code -= 2 ** (x.bits - 1)
    scale, zero = x.scale.float(), None if x.zero is None else x.zero.float()
    scale = _spread(x, scale, code.shape)
    return (code * scale if zero is None else code * scale + _spread(x, zero, code.shape)).to(dtype)


def _spread(x: Codes, numbers: Tensor, shape: torch.Size) -> Tensor:
    """A scale or zero point for each number."""
    if x.axis == "token":
        return numbers.repeat_interleave(x.group_size, -1)
    if x.group is not None:
        return numbers.gather(2, x.group.long()[..., None].expand(*shape))
    return numbers[:, :, torch.arange(shape[2], device=numbers.device) // x.group_size]
