"""Quantized keys or quantized values of one layer: write, score, mix, drop. ``Int`` joins two of these with a plain tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.dispatch import backend, capturing
from kvlab.store.side import Side
from kvlab_kernels import cpu
from kvlab_kernels.layout import BITS, FLOATS, Codes, dequantize, normal_levels, pack


@dataclass(frozen=True)
class Coding:
    """How numbers become codes. ``format``: "int"; "e4m3" or "e5m2" (8-bit floats, no zero points); "normal" (the levels that suit normal numbers best).

    ``symmetric``: codes around zero without zero points, one code of each group unused. ``clip``: the share of a group's range that is covered;
    what lies outside takes the nearest code.
    """

    bits: int = 8
    scale_dtype: torch.dtype = torch.float16
    symmetric: bool = False
    clip: float = 1.0
    format: str = "int"

    @property
    def zeros(self) -> bool:
        return self.format not in FLOATS and not self.symmetric


def quantize(x: Tensor, coding: Coding, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of ``x``; what varies over ``dims`` shares a scale. -> uint8 codes, scale, zero or None (dims kept as 1).

    Codes are taken against the *rounded* scale and zero, so rounding those adds no error of its own but at the range's edge.
    Raises ``ValueError`` if the range cannot be written as the scales' format (infinite, NaN, or beyond its largest number).
    """
    x = x.float()
    zero = None
    if coding.format == "normal":
        return _normal(x, coding, dims)
    if coding.zeros:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        middle, half = (low + high) / 2, (high - low) / 2 * coding.clip
        low = low if coding.clip == 1.0 else middle - half
        scale, zero = (2 * half / (2**coding.bits - 1)).to(coding.scale_dtype), low.to(coding.scale_dtype)
    else:
        top = torch.finfo(FLOATS[coding.format]).max if coding.format in FLOATS else 2 ** (coding.bits - 1) - 1
        scale = (x.abs().amax(dims, keepdim=True) * (coding.clip / top)).to(coding.scale_dtype)
    _check(x, coding, scale, zero)
    step = scale.float()
    step = torch.where(step > 0, step, torch.inf)  # a group of one number: code 0, as the kernels write it
    if coding.format in FLOATS:
        kind = FLOATS[coding.format]
        top = torch.finfo(kind).max
        return (x / step).clamp_(-top, top).to(kind).view(torch.uint8), scale, None
    if zero is None:
        top, middle = 2 ** (coding.bits - 1) - 1, 2 ** (coding.bits - 1)
        return ((x / step).round_().clamp_(-top, top) + middle).to(torch.uint8), scale, None
    codes = ((x - zero.float()) / step).round_().clamp_(0, 2**coding.bits - 1)
    return codes.to(torch.uint8), scale, zero


def _check(x: Tensor, coding: Coding, scale: Tensor, zero: Tensor | None = None) -> None:
    if not capturing(x.device) and not bool(torch.isfinite(scale).all() and (zero is None or torch.isfinite(zero).all())):
        raise ValueError(
            f"keys or values up to {x.abs().amax().item():.3g} cannot be quantized with {coding.scale_dtype} scales (NaN, infinite or too large)"
        )


def _normal(x: Tensor, coding: Coding, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes by the nearest level, for numbers of standard deviation 1, and the scale at which they keep their length along ``x``.

    The scale of least error would be smaller: what is lost is then at right angles to what is written, so everything comes back shorter. Attention
    adds up many tokens, where errors either way average out and a common shortening does not.
    """
    mean = x.mean(dims, keepdim=True) if coding.zeros else torch.zeros((), device=x.device)
    own = x - mean
    size = own.square().mean(dims, keepdim=True)
    levels = torch.tensor(normal_levels(coding.bits), device=x.device)
    codes = torch.bucketize(own / size.sqrt().clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)
    said = levels[codes]
    along = (own * said).mean(dims, keepdim=True)
    scale = torch.where(along > 0, size / along.clamp(min=1e-30), 0.0).to(coding.scale_dtype)
    zero = (x - scale.float() * said).mean(dims, keepdim=True).to(coding.scale_dtype) if coding.zeros else None
    _check(x, coding, torch.where(size.isfinite(), scale, size), zero)
    return codes.to(torch.uint8), scale, zero


class QuantizedSide(Side):
    """Keys (``axis`` channel, token or tensor) or values (token) of one layer as packed codes.

    Per channel and per tensor, ``group_size`` tokens share a scale; rows come in whole groups. Per token, ``group_size`` channels
    do. Eviction makes channel groups uneven: then ``table`` says which scale row a token uses, and once more than twice the scale
    rows needed are alive, the groups under half occupancy are packed anew, together (``repacked`` counts their tokens).
    """

    def __init__(self, coding: Coding, axis: str, group_size: int) -> None:
        self.coding, self.axis, self.group_size = coding, axis, group_size
        self.codes, self.scale, self.zero, self.table = (
            Buffer("codes"),
            Buffer("scales"),
            Buffer("scales"),
            Buffer("tables", shared=True),
        )

    def __len__(self) -> int:
        return len(self.codes)

    def buffers(self) -> list[Buffer]:
        return [self.codes, self.scale, self.zero, self.table]

    # writing

    def append(self, x: Tensor) -> None:
        if len(self.table):
            first = len(self.scale)
            rows = first + torch.arange(x.shape[2], device=x.device, dtype=torch.int32) // self.group_size
            self.table.append(rows.expand(*self.table.shape[:2], -1))
        if self._written(x):
            return
        packed, scale, zero = self._encode(x)
        self.codes.append(packed)
        self.scale.append(scale)
        if zero is not None:
            self.zero.append(zero)

    def _written(self, x: Tensor) -> bool:
        """Have the Triton kernel write ``x`` straight into the buffers, where it runs and knows the coding; its codes are the same, bit for bit."""
        coding, (b, h, n, d) = self.coding, x.shape
        plain = (
            coding.format == "int"
            and not coding.symmetric
            and coding.clip == 1.0
            and coding.bits in BITS
            and self.axis in ("channel", "token")
        )
        if (
            not plain
            or (self.axis == "channel" and self.group_size > 1024)
            or backend(x.device) != "triton"
            or x.dtype == torch.float64
        ):
            return False
        if not capturing(x.device) and not bool(x.abs().amax() < torch.finfo(coding.scale_dtype).max):
            return False  # torch's way says what cannot be written
        from kvlab_kernels.quantize import quantize as fused

        numbers = torch.empty(0, dtype=coding.scale_dtype, device=x.device)
        shape = (b, h, n // self.group_size, d) if self.axis == "channel" else (b, h, n, d // self.group_size)
        packed = self.codes.extend((b, h, n, d * coding.bits // 8), torch.empty(0, dtype=torch.uint8, device=x.device))
        scale, zero = (buffer.extend(shape, numbers) for buffer in (self.scale, self.zero))
        into = Codes(packed, scale, zero, coding.bits, self.axis, self.group_size)
        fused(x, coding.bits, self.axis, self.group_size, coding.scale_dtype, into)
        return True

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        b, h, n, d = x.shape
        if self.axis == "token":
            grouped, dims = x.unflatten(3, (d // self.group_size, self.group_size)), (4,)
        else:
            grouped, dims = x.unflatten(2, (n // self.group_size, self.group_size)), (3,) if self.axis == "channel" else (1, 3, 4)
        codes, scale, zero = quantize(grouped, self.coding, dims)
        dim = 4 if self.axis == "token" else 3
        return pack(codes.reshape(b, h, n, d), self.coding.bits), scale.squeeze(dim), None if zero is None else zero.squeeze(dim)

    # reading

    def layout(self, start: int = 0, stop: int | None = None) -> Codes:
        """Rows ``start:stop`` as :class:`kvlab_kernels.layout.Codes` (views; ``start`` on a group boundary)."""
        stop = len(self) if stop is None else stop
        codes, group = self.codes.view()[:, :, start:stop], None
        axis = "token" if self.axis == "token" else "channel"
        numbers = [buffer.view() for buffer in (self.scale, self.zero) if len(buffer)]
        if axis == "token":
            numbers = [x[:, :, start:stop] for x in numbers]
        elif len(self.table):
            group = self.table.view()[:, :, start:stop].expand(*codes.shape[:3])
        else:
            first, last = start // self.group_size, -(-stop // self.group_size)
            numbers = [x[:, :, first:last] for x in numbers]
        if self.axis == "tensor":
            shape = (*codes.shape[:2], numbers[0].shape[2], codes.shape[3] * 8 // self.coding.bits)
            numbers = [x.expand(shape) for x in numbers]
        zero = numbers[1] if self.coding.zeros else None
        return Codes(codes, numbers[0], zero, self.coding.bits, axis, self.group_size, group, self.coding.format)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        begin = self._begin(start)
        return dequantize(self.layout(begin, stop))[:, :, start - begin :]

    def take(self, index: Tensor) -> Tensor:
        rows = index
        if self.axis != "token":
            rows = self.table.take(index).long() if len(self.table) else index // self.group_size  # -1 stays below 0
        numbers = [buffer.take(rows) for buffer in (self.scale, self.zero) if len(buffer)]
        codes = self.codes.take(index)
        if self.axis == "tensor":
            numbers = [x.expand(*x.shape[:3], codes.shape[3] * 8 // self.coding.bits) for x in numbers]
        # each row with its own scales: groups of one token, or of channels
        axis, size = ("token", self.group_size) if self.axis == "token" else ("channel", 1)
        zero = numbers[1] if self.coding.zeros else None
        return dequantize(Codes(codes, numbers[0], zero, self.coding.bits, axis, size, None, self.coding.format))

    def lies(self, start: int, stop: int) -> tuple[Codes, int]:
        begin = self._begin(start)
        return self.layout(begin, stop), begin

    def _begin(self, start: int) -> int:
        """Where the group of row ``start`` begins, if rows lie in groups."""
        return start if self.axis == "token" or len(self.table) else start // self.group_size * self.group_size

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        begin = self._begin(start)
        keys = self.layout(begin, stop)
        scores = cpu.score(query, keys) if cpu.serves(query, keys) else query @ dequantize(keys).transpose(-1, -2)
        return scores[..., start - begin :]

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        values = self.layout(start, stop) if self.axis == "token" else None
        return cpu.mix(weights, values) if values and cpu.serves(weights, values) else weights @ self.rows(start, stop)

    # dropping

    def select(self, index: Tensor) -> None:
        """Keep rows ``index``. Their codes do not change, save in a repack."""
        if self.axis == "token":
            for buffer in (self.codes, self.scale, self.zero):
                if len(buffer):
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
        self.codes.truncate(rows)
        scales = rows if self.axis == "token" else rows // self.group_size
        self.scale.truncate(scales)
        self.zero.truncate(scales)

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
        scale = _rows(self.scale.view(), kept)
        zero = _rows(self.zero.view(), kept) if len(self.zero) else None
        if moving:
            # heads move different counts: short lists are padded by repeating their last token, which changes no minimum
            padded = -(-moving // size) * size
            place = _first(moves, moving)
            count = moves.sum(2, keepdim=True)
            order = torch.arange(padded, device=table.device).expand(*table.shape[:2], -1).minimum((count - 1).clamp(min=0))
            where = place.gather(2, order.clamp(max=moving - 1))
            packed, more_scale, more_zero = self._encode(_rows(self.rows(), where))
            codes = self.codes.view()
            # written are the live rows only: a padded list repeats a place, and which of two writes wins would be chance
            live = (torch.arange(padded, device=table.device) < count).expand(*codes.shape[:2], -1)
            b, h, i = live.nonzero(as_tuple=True)
            self.codes.touch()
            codes[b, h, where.expand(*codes.shape[:2], -1)[b, h, i]] = packed[b, h, i]
            first = scale.shape[2]
            slot = first + torch.arange(padded, device=table.device) // size
            number = moves.cumsum(2) - 1
            new_table = torch.where(moves, slot[number.clamp(0, padded - 1)], new_table)
            both = (*scale.shape[:2], -1, -1)  # one scale for all heads of a row, where keys share it
            scale = torch.cat([scale, more_scale.expand(both)], 2)
            zero = torch.cat([zero, more_zero.expand(both)], 2) if zero is not None and more_zero is not None else None
            self.repacked += int(moves.sum()) * (1 if table.shape[:2] == codes.shape[:2] else codes.shape[0] * codes.shape[1])
        self.scale.set(scale)
        if zero is not None:
            self.zero.set(zero)
        self.table.set(new_table.int())


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` ``[1 or B, 1 or H, m]`` of ``[B, 1 or H, n, ...]``."""
    b, h = max(index.shape[0], x.shape[0]), max(index.shape[1], x.shape[1])
    return x.expand(b, h, -1, -1).gather(2, index.expand(b, h, -1)[..., None].expand(-1, -1, -1, x.shape[3]))


def _first(flags: Tensor, count: int) -> Tensor:
    """The places of the first ``count`` true flags along dim 2, in order (false ones follow where there are fewer)."""
    return (~flags).to(torch.uint8).sort(dim=2, stable=True).indices[..., :count]
