"""How codes lie in memory: the one description that stores write, torch reads and Triton kernels read.

A tensor ``x`` of shape ``[B, H, N, D]`` (batch, KV heads, tokens, head dim) is written as unsigned codes with
``x ≈ code * scale + zero``. Codes of fewer than eight bits are packed along the head dim in *planes*: with ``F = 8 // bits``
fields a byte, byte ``j`` of a token holds the channels ``j, j + D/F, j + 2D/F, …``, the first in the lowest bits. So a token's
row is a row of bytes (tokens can be gathered, paged and dropped one by one), and unpacking is a shift and a mask with no
interleaving: ``q @ x.T`` is the sum over planes of ``q[plane] @ field.T``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (8, 4, 2)


@dataclass(frozen=True)
class Codes:
    """Quantized keys or values, packed.

    ``codes``: uint8 ``[B, H, N, D * bits // 8]``; the last dim is contiguous, the others may have any stride.
    ``scale``, ``zero``: float16 or float32, ``zero`` is the value of code 0. Their shape says what shares a scale:

    * ``axis="channel"``: ``[B, H, S, D]``; token ``n`` uses row ``group[b, h, n]``, or row ``n // group_size`` if ``group`` is None.
    * ``axis="token"``: ``[B, H, N, D // group_size]``; channel ``d`` of a token uses column ``d // group_size``.

    ``group``: int32 ``[B, H, N]`` or None; given once eviction has made the groups uneven.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    axis: str
    group_size: int
    group: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.codes.shape[-1] * 8 // self.bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., D]`` with values under ``2**bits`` -> uint8 ``[..., D * bits // 8]``. ``D`` must be a multiple of ``8 // bits``."""
    if bits == 8:
        return codes
    fields = 8 // bits
    if codes.shape[-1] % fields:
        raise ValueError(f"head dim {codes.shape[-1]} cannot be packed at {bits} bits: it must be a multiple of {fields}")
    planes = codes.chunk(fields, dim=-1)
    packed = planes[0].clone()
    for i, plane in enumerate(planes[1:], start=1):
        packed |= plane << (i * bits)
    return packed


def planes(packed: Tensor, bits: int) -> list[Tensor]:
    """uint8 ``[..., D * bits // 8]`` -> ``8 // bits`` uint8 tensors of that shape; concatenated they are the ``D`` channels."""
    if bits == 8:
        return [packed]
    mask, fields = 2**bits - 1, 8 // bits
    low = [(packed >> (i * bits)) & mask for i in range(fields - 1)]
    return [*low, packed >> (8 - bits)]


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack`."""
    return packed if bits == 8 else torch.cat(planes(packed, bits), dim=-1)


def dequantize(x: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, H, N, D]`` in ``dtype``: the plain reading of :class:`Codes`, the reference for every fast path."""
    code = unpack(x.codes, x.bits).to(torch.float32)
    scale, zero = x.scale.float(), x.zero.float()
    if x.axis == "token":
        size = x.group_size
        scale, zero = scale.repeat_interleave(size, -1), zero.repeat_interleave(size, -1)
    elif x.group is not None:
        row = x.group.long()[..., None].expand(*code.shape)
        scale, zero = scale.gather(2, row), zero.gather(2, row)
    else:
        row = torch.arange(code.shape[2], device=code.device) // x.group_size
        scale, zero = scale[:, :, row], zero[:, :, row]
    return (code * scale + zero).to(dtype)
