"""Quantized keys or quantized values of one layer: write, score, mix, drop. ``Int`` joins two of these with a plain tail."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes, dequantize, pack


def quantize(x: Tensor, bits: int, dims: tuple[int, ...], scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Asymmetric min/max codes of ``x``; what varies over ``dims`` shares a scale. -> uint8 codes, scale, zero (dims kept as 1).

    Codes are taken against the *rounded* scale and zero, so rounding those adds no error of its own but at the range's edge.
    Raises ``ValueError`` if the range cannot be written as ``scale_dtype`` (infinite, NaN, or beyond its largest number).
    """
    x = x.float()
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    scale, zero = ((high - low) / (2**bits - 1)).to(scale_dtype), low.to(scale_dtype)
    if not bool(torch.isfinite(scale).all() & torch.isfinite(zero).all()):
        raise ValueError(
            f"keys or values up to {x.abs().amax().item():.3g} cannot be quantized with {scale_dtype} scales (NaN, infinite or too large)"
        )
    step = scale.float()
    codes = ((x - zero.float()) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, zero


class QuantizedSide:
    """Keys (``axis`` channel, token or tensor) or values (token) of one layer as packed codes.

    Per channel and per tensor, ``group_size`` tokens share a scale; rows come in whole groups. Per token, ``group_size`` channels
    do. Eviction makes channel groups uneven: then ``table`` says which scale row a token uses, and once more than twice the scale
    rows needed are alive, the groups under half occupancy are packed anew, together (``repacked`` counts their tokens).
    """

    def __init__(self, bits: int, axis: str, group_size: int, scale_dtype: torch.dtype) -> None:
        self.bits, self.axis, self.group_size, self.scale_dtype = bits, axis, group_size, scale_dtype
        self.codes, self.scale, self.zero, self.table = (
            Buffer("codes"),
            Buffer("scales"),
            Buffer("scales"),
            Buffer("tables", shared=True),
        )
        self.repacked = 0

    def __len__(self) -> int:
        return len(self.codes)

    def buffers(self) -> list[Buffer]:
        return [self.codes, self.scale, self.zero, self.table]

    # writing

    def append(self, x: Tensor) -> None:
        """Quantize ``[B, H, n, D]`` for good; ``n`` is a multiple of ``group_size`` unless scales are per token."""
        packed, scale, zero = self._encode(x)
        if len(self.table):
            first = len(self.scale)
            rows = first + torch.arange(x.shape[2], device=x.device, dtype=torch.int32) // self.group_size
            self.table.append(rows.expand(*self.table.shape[:2], -1))
        self.codes.append(packed)
        self.scale.append(scale)
        self.zero.append(zero)

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, h, n, d = x.shape
        if self.axis == "token":
            grouped, dims = x.unflatten(3, (d // self.group_size, self.group_size)), (4,)
        else:
            grouped, dims = x.unflatten(2, (n // self.group_size, self.group_size)), (3,) if self.axis == "channel" else (1, 3, 4)
        codes, scale, zero = quantize(grouped, self.bits, dims, self.scale_dtype)
        if self.axis == "token":
            scale, zero = scale.squeeze(4), zero.squeeze(4)
        else:
            scale, zero = scale.squeeze(3), zero.squeeze(3)
        return pack(codes.reshape(b, h, n, d), self.bits), scale, zero

    # reading

    def layout(self, start: int = 0, stop: int | None = None) -> Codes:
        """Rows ``start:stop`` as :class:`kvlab_kernels.layout.Codes` (views; ``start`` on a group boundary)."""
        stop = len(self) if stop is None else stop
        codes, scale, zero, group = self.codes.view()[:, :, start:stop], self.scale.view(), self.zero.view(), None
        axis = "token" if self.axis == "token" else "channel"
        if axis == "token":
            scale, zero = scale[:, :, start:stop], zero[:, :, start:stop]
        elif len(self.table):
            group = self.table.view()[:, :, start:stop].expand(*codes.shape[:3])
        else:
            first, last = start // self.group_size, -(-stop // self.group_size)
            scale, zero = scale[:, :, first:last], zero[:, :, first:last]
        if self.axis == "tensor":
            shape = (*codes.shape[:2], scale.shape[2], codes.shape[3] * 8 // self.bits)
            scale, zero = scale.expand(shape), zero.expand(shape)
        return Codes(codes, scale, zero, self.bits, axis, self.group_size, group)

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start:stop`` as float32."""
        return dequantize(self.layout(start, stop))

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        """float32 ``query`` ``[B, H, M, D]`` -> ``[B, H, M, stop - start]``."""
        keys = self.layout(start, stop)
        return cpu.score(query, keys) if cpu.serves(query, keys) else query @ dequantize(keys).transpose(-1, -2)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """float32 ``weights`` ``[B, H, M, stop - start]`` -> ``[B, H, M, D]``."""
        values = self.layout(start, stop)
        return cpu.mix(weights, values) if self.axis == "token" and cpu.serves(weights, values) else weights @ dequantize(values)

    # dropping

    def select(self, index: Tensor) -> None:
        """Keep rows ``index`` ``[1 or B, 1 or H, m]``. Codes of the kept rows do not change, save in a repack."""
        if self.axis == "token":
            for buffer in (self.codes, self.scale, self.zero):
                buffer.select(index)
            return
        if not len(self.table):
            rows = torch.arange(len(self), device=index.device, dtype=torch.int32) // self.group_size
            self.table.append(rows.view(1, 1, -1))
        self.codes.select(index)
        self.table.select(index)
        needed = -(-len(self) // self.group_size)
        if len(self.scale) > 2 * needed:
            self._repack()

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` (whole groups unless per token); only before any eviction."""
        self.codes.truncate(rows)
        scales = rows if self.axis == "token" else rows // self.group_size
        self.scale.truncate(scales)
        self.zero.truncate(scales)

    def clear(self) -> None:
        for buffer in self.buffers():
            buffer.clear()

    def batch(self, change: Callable[[Tensor], Tensor]) -> None:
        for buffer in self.buffers():
            buffer.batch(change)

    def _repack(self) -> None:
        """Give the tokens of groups under half occupancy new groups, and drop the scale rows nobody uses."""
        table, size = self.table.view().long(), self.group_size
        alive = torch.zeros((*table.shape[:2], len(self.scale)), dtype=torch.int64, device=table.device)
        alive.scatter_add_(2, table, torch.ones_like(table))
        stays = alive * 2 >= size
        moves = ~stays.gather(2, table)  # tokens to pack anew
        moving, staying = int(moves.sum(2).max()), int(stays.sum(2).max())
        rank = stays.cumsum(2) - 1  # the new row of a group that stays
        new_table = torch.where(moves, 0, rank.gather(2, table))
        kept = _first(stays, max(staying, 1))
        scale, zero = _rows(self.scale.view(), kept), _rows(self.zero.view(), kept)
        if moving:
            # heads move different counts: short lists are padded by repeating their last token, which changes no minimum
            padded = -(-moving // size) * size
            place = _first(moves, moving)
            count = moves.sum(2, keepdim=True)
            order = torch.arange(padded, device=table.device).expand(*table.shape[:2], -1).minimum((count - 1).clamp(min=0))
            where = place.gather(2, order.clamp(max=moving - 1))
            packed, more_scale, more_zero = self._encode(_rows(self.dense(), where))
            codes = self.codes.view()
            # written are the live rows only: a padded list repeats a place, and which of two writes wins would be chance
            live = (torch.arange(padded, device=table.device) < count).expand(*codes.shape[:2], -1)
            b, h, i = live.nonzero(as_tuple=True)
            self.codes.dirty = True
            codes[b, h, where.expand(*codes.shape[:2], -1)[b, h, i]] = packed[b, h, i]
            first = scale.shape[2]
            slot = first + torch.arange(padded, device=table.device) // size
            number = moves.cumsum(2) - 1
            new_table = torch.where(moves, slot[number.clamp(0, padded - 1)], new_table)
            scale, zero = torch.cat([scale, more_scale], 2), torch.cat([zero, more_zero], 2)
            self.repacked += int(moves.sum()) * (1 if table.shape[:2] == codes.shape[:2] else codes.shape[0] * codes.shape[1])
        self.scale.set(scale)
        self.zero.set(zero)
        self.table.set(new_table.int())


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` ``[1 or B, 1 or H, m]`` of ``[B, 1 or H, n, ...]``."""
    b, h = max(index.shape[0], x.shape[0]), max(index.shape[1], x.shape[1])
    return x.expand(b, h, -1, -1).gather(2, index.expand(b, h, -1)[..., None].expand(-1, -1, -1, x.shape[3]))


def _first(flags: Tensor, count: int) -> Tensor:
    """The places of the first ``count`` true flags along dim 2, in order (false ones follow where there are fewer)."""
    return (~flags).to(torch.uint8).sort(dim=2, stable=True).indices[..., :count]
