"""PreRope: keys with their rotary turn undone, written by another store, turned again when read (KVQuant, arXiv 2401.18079)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlab.store.base import Around, LayerShape, Layout, Store, StoreState, block_rows, split
from kvlab.store.int import Int
from kvlab.strategy import param
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes, Places


@dataclass(frozen=True)
class PreRope(Store):
    """Keys are turned back to position 0 before ``inner`` writes them down, and turned again, block by block, when they are read.

    Before the turn a channel keeps nearly one size over all tokens, and keys lie near a small subspace; the turn mixes pairs of channels by position.
    So fewer bits, or a lower rank, lose less. The price is time: keys are rebuilt at every step. Layers without a rotary turn (GPT-2, OPT, Llama-4's
    layers without positions) are written as they are.
    """

    title = "before RoPE"
    paper = "KVQuant, arXiv 2401.18079"
    needs = frozenset({"rope"})

    inner: Any = param(Int(bits=4), title="written as", help="How keys without their turn, and values, are written down.")

    def check(self) -> None:
        if "rope" in self.inner.needs:
            raise ValueError(f"PreRope: inner={type(self.inner).__name__}(...) undoes the turn itself (allowed: any other store)")

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.offers) - {"rewrite"}

    def state(self, shape: LayerShape) -> StoreState:
        return before_rope(self.inner.state(shape))

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        return self.inner.predict(rows, shape, evicting)  # type: ignore[no-any-return]


def before_rope(inner: StoreState) -> StoreState:
    """``inner`` with keys turned back, or itself in a layer that does not turn them."""
    return inner if inner.shape.rope is None else PreRopeState(inner)


class PreRopeState(Around):
    """Everything is the inner store's, but for the keys' turn.

    The angle is that of the column, padding counted: a row of a padded batch is off by one angle for all its keys, which nothing here depends on.
    """

    def __init__(self, inner: StoreState) -> None:
        super().__init__(inner.shape, inner)

    def _turn(self, keys: Tensor, start: int, back: bool = False) -> Tensor:
        rope, stop = self.shape.rope, start + keys.shape[2]
        assert rope is not None
        if len(self.columns):
            columns = self.columns.view()[:, :, start:stop].long()
        else:
            columns = torch.arange(start, stop, device=keys.device).view(1, 1, -1)
            return rope.turn(keys, columns, back, max(stop - 1, 0))
        return rope.turn(keys, columns, back)

    def write(self, number: int, x: Tensor) -> Tensor:
        return x if number else self._turn(x, 0, back=True).to(x.dtype)

    def form(self, number: int) -> str:
        return "" if number else "before RoPE"

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.inner.append(self._turn(keys, len(self), back=True).to(keys.dtype), values)

    def key_rows(self, start: int, stop: int) -> Tensor:
        return self._turn(self.inner.key_rows(start, stop), start)

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.rows_at(index)
        rope = self.shape.rope
        assert rope is not None
        columns = self.columns.take(index).long() if len(self.columns) else index
        return rope.turn(keys, columns), values

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        found = self._compiled(query.shape[2], start, stop)
        if found is None or not cpu.serves(query, found[0]):
            return query.float() @ self.key_rows(start, stop).mT
        keys, begin = found
        rope = self.shape.rope
        assert rope is not None
        columns = self.columns.view()[:, :, begin:stop] if len(self.columns) else None
        last = stop if columns is None else int(columns[..., -1].max()) + 1
        places = Places(rope.table(last, query.device), columns, begin)
        return cpu.score(query, keys, places)[..., start - begin :]

    def layout(self) -> Layout | None:
        found, rope = self.inner.layout(), self.shape.rope
        assert rope is not None
        if found is None or rope.interleaved or found.turned[0] is not None or found.table is not None:
            return None
        front, plain = found.front, found.plain
        coded = len(self) - (0 if plain is None else plain[0].shape[2])
        columns = self.columns.view()[:, :, front : front + coded] if len(self.columns) else None
        last = len(self) if columns is None else int(columns[..., -1].max()) + 1
        if plain is not None:
            first, rest = plain[0].split((front, plain[0].shape[2] - front), 2)
            keys = [self._turn(x, start).to(x.dtype) for x, start in ((first, 0), (rest, front + coded)) if x.shape[2]]
            plain = (torch.cat(keys, 2), plain[1])
        return replace(found, plain=plain, places=Places(rope.table(last, self.shape.device), columns, front))

    def _compiled(self, rows: int, start: int, stop: int) -> tuple[Tensor | Codes, int] | None:
        """The inner store's keys as they lie and where they begin, if machine code can turn and multiply them in one sweep."""
        rope = self.shape.rope
        fits = rope is not None and not rope.interleaved and rope.dims % 16 == 0 and rows <= cpu.MAX_ROWS
        return self.inner.keys_at(start, stop) if fits and self.shape.device.type == "cpu" and cpu.available() else None

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        for start, stop in self.inner.blocks(rows):
            if self._compiled(rows, start, stop) is not None:
                yield start, stop
            else:
                yield from split(start, stop, block_rows(self.shape))

    def dense(self) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.dense()
        return self._turn(keys, 0).to(self.shape.dtype), values
