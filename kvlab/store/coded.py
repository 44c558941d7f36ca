"""Tokens of one layer written down, with some plain ones before and after them: what ``Int``, ``KIVI``, ``Fp8`` and ``LowRank`` are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Layout, StoreState, block_rows, split
from kvlab.store.side import Side, to_format
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes


@dataclass(frozen=True)
class Flush:
    """When plain tokens become codes. ``group``: tokens that must be written together (1 where each has its own scales).

    ``residual``: the newest tokens that stay plain. ``first``: the first tokens that stay plain for good. ``kivi``: keys wait until
    ``residual`` of them are there and are then all written, values leave one by one behind a window of ``residual`` (KIVI, arXiv 2402.02750);
    otherwise both go in groups as soon as ``residual`` newer ones are there. ``start``: nothing is written before so many are due.
    """

    group: int = 1
    residual: int = 0
    first: int = 0
    kivi: bool = False
    start: int = 0

    def keys(self, tail: int) -> int:
        """How many of ``tail`` plain keys, the first tokens apart, are to be written now."""
        if self.kivi:
            size = max(self.residual, self.group)
            return tail // size * size
        return max(0, tail - self.residual) // self.group * self.group

    def values(self, tail: int) -> int:
        return max(0, tail - self.residual) if self.kivi else self.keys(tail)


class CodedState(StoreState):
    """``first`` plain rows, codes, a plain tail. Keys and values are the same rows; under KIVI's rule the border to the tail differs.

    ``plain``: the format of plain rows; None is the model's.
    """

    def __init__(self, shape: LayerShape, keys: Side, values: Side, flush: Flush, plain: torch.dtype | None = None) -> None:
        super().__init__(shape)
        self.sides, self.flush, self.plain = (keys, values), flush, plain or shape.dtype
        self.first = (Buffer("residual"), Buffer("residual"))
        self.tail = (Buffer("residual"), Buffer("residual"))
        self.opened = False  # whether anything was written: from then on the first tokens are fixed

    @property
    def keys(self) -> Side:
        return self.sides[0]

    @property
    def values(self) -> Side:
        return self.sides[1]

    def __len__(self) -> int:
        return len(self.first[0]) + len(self.keys) + len(self.tail[0])

    @property
    def borders(self) -> list[int]:
        first, total = len(self.first[0]), len(self)
        return sorted({first, *(first + len(side) for side in self.sides)} - {0, total})

    @property
    def repacked(self) -> int:
        return self.keys.repacked + self.values.repacked

    def append(self, keys: Tensor, values: Tensor) -> None:
        for tail, rows in zip(self.tail, (keys, values), strict=True):
            tail.append(to_format(rows, self.plain))

    def settle(self) -> None:
        waiting = 0 if self.opened else self.flush.first
        due = [rule(len(tail) - waiting) for rule, tail in zip((self.flush.keys, self.flush.values), self.tail, strict=True)]
        if max(due) <= 0 or (not self.opened and max(due) < self.flush.start):
            return
        if not self.opened:
            real = self.real(waiting, waiting + max(due))
            if real is not None and self.flush.start and int(real.sum(2).min()) < self.flush.start:
                return  # a row of the batch that is mostly padding says too little yet
            for side, tail in zip(self.sides, self.tail, strict=True):
                side.learn(tail.view()[:, :, waiting : waiting + max(due)], real)
        if waiting:
            for first, tail in zip(self.first, self.tail, strict=True):
                first.set(tail.view()[:, :, :waiting].clone())
                _drop(tail, waiting)
        self.opened = True
        for side, tail, count in zip(self.sides, self.tail, due, strict=True):
            if count > 0:
                side.append(tail.view()[:, :, :count])
                _drop(tail, count)

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        rows = self._plain(0, start, stop)
        first = len(self.first[0])
        return self.keys.score(query.float(), start - first, stop - first) if rows is None else query.float() @ rows.float().mT

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        rows = self._plain(1, start, stop)
        first = len(self.first[0])
        return self.values.mix(weights.float(), start - first, stop - first) if rows is None else weights.float() @ rows.float()

    def _plain(self, which: int, start: int, stop: int) -> Tensor | None:
        """Plain rows ``start:stop`` of keys (0) or values (1); None where they are codes. A block never crosses a border."""
        first, coded = len(self.first[which]), len(self.sides[which])
        if start < first:
            return self.first[which].view()[:, :, start:stop]
        if start < first + coded:
            return None
        return self.tail[which].view()[:, :, start - first - coded : stop - first - coded]

    def key_rows(self, start: int, stop: int) -> Tensor:
        rows = self._plain(0, start, stop)
        first = len(self.first[0])
        return self.keys.rows(start - first, stop - first) if rows is None else rows.float()

    def value_rows(self, start: int, stop: int) -> Tensor:
        rows = self._plain(1, start, stop)
        first = len(self.first[1])
        return self.values.rows(start - first, stop - first) if rows is None else rows.float()

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self._take(0, index), self._take(1, index)

    def _take(self, which: int, index: Tensor) -> Tensor:
        """Single rows of keys (0) or values (1), from wherever each lies."""
        out, begin = None, 0
        parts: tuple[Buffer | Side, ...] = (self.first[which], self.sides[which], self.tail[which])
        for part in parts:
            count = len(part)
            if count:
                mine = (index >= begin) & (index < begin + count)
                rows = part.take((index - begin).masked_fill(~mine, -1)).float()
                out = rows if out is None else torch.where(mine[..., None], rows, out)
            begin += count
        assert out is not None
        return out

    @property
    def plain_from(self) -> int:
        return max(len(first) + len(side) for first, side in zip(self.first, self.sides, strict=True))

    def rewrite(self, first: int, keys: Tensor, values: Tensor) -> None:
        for tail, rows in zip(self.tail, (keys, values), strict=True):
            if rows.shape[2]:
                tail.view()[:, :, len(tail) - rows.shape[2] :] = to_format(rows, self.plain)
                tail.touch(len(tail) - rows.shape[2])

    def keys_at(self, start: int, stop: int) -> tuple[Tensor | Codes, int] | None:
        rows = self._plain(0, start, stop)
        if rows is not None:
            return rows, start
        first = len(self.first[0])
        found = self.keys.lies(start - first, stop - first)
        return None if found is None else (found[0], found[1] + first)

    def layout(self) -> Layout | None:
        if not self.opened:
            return Layout(*self._tails())
        coded = min(map(len, self.sides))
        if not coded:
            return None
        read = [side.layout(0, coded) for side in self.sides]
        if read[0] is None or read[1] is None:
            return None
        plain = []
        for first, side, tail in zip(self.first, self.sides, self.tail, strict=True):
            parts = [first.view()] if len(first) else []
            parts += [side.rows(coded)] if len(side) > coded else []  # KIVI writes values down sooner than keys
            parts += [tail.view()] if len(tail) else []
            plain.append([part.to(self.shape.dtype) for part in parts])
        beside = (_joined(plain[0]), _joined(plain[1])) if plain[0] else None
        return Layout(read[0], read[1], beside, len(self.first[0]))

    def _tails(self) -> tuple[Tensor, Tensor]:
        keys, values = (tail.view().to(self.shape.dtype) for tail in self.tail)
        return keys, values

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        size = block_rows(self.shape)
        if self.keys.axis != "token":
            size = -(-size // self.keys.group_size) * self.keys.group_size
        if rows <= cpu.MAX_ROWS and self.shape.device.type == "cpu" and cpu.available():  # nothing is unpacked: one sweep
            size = max(size, len(self))
        edges = [0, *self.borders, len(self)]
        for begin, end in itertools.pairwise(edges):
            yield from split(begin, end, size)

    def select(self, index: Tensor) -> None:
        edges = [0, len(self.first[0]), len(self.first[0]) + len(self.keys), len(self)]
        cuts = [int((index[0, 0] < edge).sum()) for edge in edges]
        for number in (0, 1):
            parts: tuple[Buffer | Side, ...] = (self.first[number], self.sides[number], self.tail[number])
            for part, low, high, edge, end in zip(parts, cuts, cuts[1:], edges, edges[1:], strict=False):
                if low == high:
                    part.clear()
                elif high - low < end - edge:
                    part.select(index[..., low:high] - edge)

    def truncate(self, rows: int) -> None:
        for number, side in enumerate(self.sides):
            first, tail = self.first[number], self.tail[number]
            head = len(first)
            if rows >= head + len(side):
                tail.truncate(rows - head - len(side))
                continue
            inside = max(0, rows - head)
            whole = inside if side.axis == "token" else inside // side.group_size * side.group_size
            cut = side.rows(whole, inside).to(self.plain) if inside > whole else None
            side.truncate(whole)
            tail.clear()
            if cut is not None:
                tail.append(cut)
            side.repacked += inside - whole
            if rows < head:  # nothing but first tokens is left: they may still become codes, as at the start
                tail.set(first.view()[:, :, :rows].clone())
                first.clear()
        self.opened = bool(len(self.keys) or len(self.values) or len(self.first[0]))
        if not rows:
            for side in self.sides:
                side.forget()

    def thaw(self) -> None:
        dense = self.dense()
        for side in self.sides:
            side.repacked += len(side)
        for number, rows in enumerate(dense):
            self.first[number].clear()
            self.sides[number].clear()
            self.tail[number].set(rows.to(self.plain))

    def buffers(self) -> list[Buffer]:
        return [*self.first, *self.keys.buffers(), *self.values.buffers(), *self.tail]

    def counts(self) -> dict[str, int]:
        return {"opened": int(self.opened), "repacked": self.keys.repacked, "values_repacked": self.values.repacked}

    def recount(self, counts: dict[str, int]) -> None:
        self.opened, self.keys.repacked, self.values.repacked = (
            bool(counts["opened"]),
            counts["repacked"],
            counts["values_repacked"],
        )

    def dense(self) -> tuple[Tensor, Tensor]:
        out = []
        for first, side, tail in zip(self.first, self.sides, self.tail, strict=True):
            parts = [first.view()] if len(first) else []
            parts += [side.rows()] if len(side) else []
            parts += [tail.view()] if len(tail) else []
            out.append(torch.cat([part.to(self.shape.dtype) for part in parts], 2))
        return out[0], out[1]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _drop(buffer: Buffer, count: int) -> None:
    """Forget the oldest ``count`` rows."""
    if count == len(buffer):
        buffer.clear()
    else:
        buffer.set(buffer.view()[:, :, count:].clone())
