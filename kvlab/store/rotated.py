"""Rotated: a rotation of each head, or of several, before another store, so that no channel is large (QuaRot, arXiv 2404.00456)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import Around, LayerShape, Layout, Store, StoreState
from kvlab.store.int import Int
from kvlab.strategy import param
from kvlab_kernels.layout import Codes


@functools.cache
def rotation(dim: int, kind: str = "hadamard", seed: int = 0) -> Tensor:
    """An orthogonal matrix, float32 ``[dim, dim]``: ``x @ rotation(dim)`` spreads a large channel over all of them.

    "hadamard": entries of one size where ``dim`` is a power of two; otherwise its power-of-two part (Sylvester's construction) times a cosine
    transform of the odd rest. "random": the same after a random sign for each channel, so that no input is special.
    """
    odd, two = dim, 1
    while odd % 2 == 0:
        odd, two = odd // 2, two * 2
    base = torch.ones(1, 1, dtype=torch.float64)
    while base.shape[0] < two:
        base = torch.cat([torch.cat([base, base], 1), torch.cat([base, -base], 1)]) / math.sqrt(2)
    if odd > 1:
        k, n = torch.arange(odd, dtype=torch.float64)[:, None], torch.arange(odd, dtype=torch.float64)[None]
        cosine = torch.cos(math.pi * (n + 0.5) * k / odd) * math.sqrt(2 / odd)
        cosine[0] /= math.sqrt(2)
        base = torch.kron(base, cosine.T.contiguous())
    if kind == "random":
        generator = torch.Generator().manual_seed(seed)
        base = (torch.randint(0, 2, (dim, 1), generator=generator) * 2.0 - 1.0) * base
    return base.float()


@dataclass(frozen=True)
class Rotated(Store):
    """Keys and values are rotated by an orthogonal matrix and written down by ``inner``.

    A few channels of keys are far larger than the others; after a rotation none is, so one scale for a whole token loses little. Queries are
    rotated alike, so scores do not change, and what attention gives is rotated back. Keys come after RoPE; ``PreRope(Rotated(...))`` rotates them
    before it. ``PreRope(Rotated(Int(bits=2, key_axis="token", clip=0.8, sinks_exact=4), heads=...))`` is RotateKV's recipe,
    ``Rotated(Int(bits=3, key_axis="token", levels="normal", symmetric=True), kind="random")`` is TurboQuant's first stage (arXiv 2504.19874).
    """

    title = "rotated"
    paper = "QuaRot, arXiv 2404.00456; RotateKV, arXiv 2501.16383"

    inner: Any = param(Int(bits=4, key_axis="token"), title="written as", help="How the rotated numbers are written down.")
    kind: str = param("hadamard", choices=("hadamard", "random"), help="A Hadamard matrix, or one behind random signs.")
    keys: bool = param(True, help="Rotate keys.")
    values: bool = param(True, help="Rotate values.")
    heads: int = param(
        1,
        low=1,
        high=64,
        step=1,
        title="heads together",
        help="How many KV heads are rotated as one; every head must then keep the same tokens.",
    )
    block: int = param(
        0,
        low=0,
        high=4096,
        step=16,
        unit="channels",
        help="Channels that are rotated together, within the head or heads. 0: all of them.",
    )
    reorder: bool = param(
        False, help="Deal channels to the blocks by their size in the first tokens, so that no block gets all the large ones."
    )

    def check(self) -> None:
        if isinstance(self.inner, Rotated) or "rope" in self.inner.needs:
            what = (
                "rotate twice"
                if isinstance(self.inner, Rotated)
                else "undo a turn of keys that are rotated already: put it around"
            )
            raise ValueError(f"Rotated: inner={type(self.inner).__name__}(...) would {what} (allowed: any other store)")
        if not (self.keys or self.values):
            raise ValueError("Rotated: keys=False with values=False rotates nothing (allowed: one of them True)")
        if self.reorder and not self.block:
            raise ValueError(
                "Rotated: reorder=True changes nothing with block=0, where all channels are mixed (allowed: a block of channels)"
            )

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.offers) - {"rewrite"} if self.heads == 1 else frozenset()

    def state(self, shape: LayerShape) -> StoreState:
        return RotatedState(self, shape)

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        parts: dict[str, float] = self.inner.predict(rows, self.within(shape), evicting)
        dims = (shape.key_dim * self.keys + shape.value_dim * self.values) * self.heads
        return parts | {"tables": parts.get("tables", 0.0) + 4.0 * dims} if self.reorder and rows else parts

    def within(self, shape: LayerShape) -> LayerShape:
        """What ``inner`` sees of a layer: heads that are rotated together are one."""
        if shape.kv_heads % self.heads:
            fits = [n for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0]
            raise ValueError(
                f"Rotated: heads={self.heads} does not divide the model's {shape.kv_heads} KV heads (allowed: {', '.join(map(str, fits))})"
            )
        for dim in (shape.key_dim, shape.value_dim):
            if self.block and dim * self.heads % self.block:
                fits = [n for n in range(2, dim * self.heads + 1) if dim * self.heads % n == 0]
                raise ValueError(
                    f"Rotated: block={self.block} does not divide {dim * self.heads} channels (allowed: 0, {', '.join(map(str, fits))})"
                )
        n = self.heads
        return replace(shape, kv_heads=shape.kv_heads // n, key_dim=shape.key_dim * n, value_dim=shape.value_dim * n)


@functools.cache
def blocks(dim: int, size: int, kind: str, device: torch.device) -> Tensor:
    """``[dim, dim]``: a rotation for each ``size`` channels. One for all layers and caches, so no cache counts it as its own."""
    return torch.block_diag(*[rotation(size, kind, seed) for seed in range(dim // size)]).to(device)


class Turn:
    """The rotation of keys or of values, with the order of channels that the first tokens give."""

    def __init__(self, settings: Rotated, dim: int, device: torch.device) -> None:
        size = settings.block or dim
        self.which = (dim, size, settings.kind, device)
        self.count, self.reorder = dim // size, settings.reorder
        self.order = Buffer("tables", shared=True)  # int32 [1, 1, dim, 1]; nothing unless reorder

    def look(self, x: Tensor) -> None:
        """Choose the order from the first tokens ``[B, H, n, dim]``: the largest channels go to different blocks."""
        if self.reorder and not len(self.order):
            rank = x.float().abs().mean((0, 1, 2)).argsort(descending=True)
            self.order.set(torch.cat([rank[block :: self.count] for block in range(self.count)]).int().view(1, 1, -1, 1))

    def there(self, x: Tensor) -> Tensor:
        """``x`` ``[..., dim]`` rotated, float32."""
        x = x.float()
        return (x[..., self._order()] if self.reorder else x) @ blocks(*self.which)

    def back(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`there`."""
        x = x.float() @ blocks(*self.which).T
        return x[..., self._order().argsort()] if self.reorder else x

    def _order(self) -> Tensor:
        return self.order.view().flatten().long()


class RotatedState(Around):
    """Everything is the inner store's, in rotated coordinates."""

    def __init__(self, settings: Rotated, shape: LayerShape) -> None:
        self.settings = settings
        super().__init__(shape, settings.inner.state(self.within(shape)))
        inner = self.inner.shape
        self.turns = (
            Turn(settings, inner.key_dim, shape.device) if settings.keys else None,
            Turn(settings, inner.value_dim, shape.device) if settings.values else None,
        )

    def within(self, shape: LayerShape) -> LayerShape:
        return self.settings.within(shape)

    def write(self, number: int, x: Tensor) -> Tensor:
        # [B, H / heads, n, heads * D]
        turn, x = self.turns[number], _join(x, self.settings.heads)
        return x if turn is None else turn.there(x).to(x.dtype)

    def form(self, number: int) -> str:
        return "" if self.turns[number] is None else "once rotated"

    def read(self, number: int, x: Tensor) -> Tensor:
        """The inverse of :meth:`write`."""
        turn = self.turns[number]
        return _part(x if turn is None else turn.back(x).to(x.dtype), self.settings.heads)

    def append(self, keys: Tensor, values: Tensor) -> None:
        for turn, x in zip(self.turns, (keys, values), strict=True):
            if turn is not None:
                turn.look(_join(x, self.settings.heads))
        self.inner.append(self.write(0, keys), self.write(1, values))

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        turn, turned = self.turns[0], _spread(query.float(), self.settings.heads)
        turned = turned if turn is None else turn.there(turned)
        return self.inner.score(turned.to(query.dtype), start, stop).reshape(*query.shape[:3], stop - start)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        b, h, m, n = weights.shape
        heads = self.settings.heads
        mixed = self.inner.mix(weights.reshape(b, h // heads, heads * m, n), start, stop)
        turn = self.turns[1]
        mixed = mixed if turn is None else turn.back(mixed)
        return _own(mixed, heads)

    def key_rows(self, start: int, stop: int) -> Tensor:
        return self.read(0, self.inner.key_rows(start, stop))

    def value_rows(self, start: int, stop: int) -> Tensor:
        return self.read(1, self.inner.value_rows(start, stop))

    def truncate(self, rows: int) -> None:
        self.inner.truncate(rows)
        for turn in self.turns:
            if turn is not None and not rows:
                turn.order.clear()

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        if self.settings.heads > 1:
            return super().rows_at(index)
        keys, values = self.inner.rows_at(index)
        return self.read(0, keys), self.read(1, values)

    def layout(self) -> Layout | None:
        found = self.inner.layout()
        if found is None or self.settings.heads > 1:
            return None
        keys, values = self.turns
        return replace(
            found,
            turned=(keys.there if keys is not None else None, values.there if values is not None else None),
            back=values.back if values is not None else None,
        )

    def keys_at(self, start: int, stop: int) -> tuple[Tensor | Codes, int] | None:
        as_they_are = self.turns[0] is None and self.settings.heads == 1
        return self.inner.keys_at(start, stop) if as_they_are else None

    def buffers(self) -> list[Buffer]:
        return [*self.inner.buffers(), *(turn.order for turn in self.turns if turn is not None and turn.reorder)]

    def dense(self) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.dense()
        return self.read(0, keys), self.read(1, values)


def _join(x: Tensor, heads: int) -> Tensor:
    """``[B, H, n, D]`` -> ``[B, H / heads, n, heads * D]``."""
    if heads == 1:
        return x
    b, h, n, d = x.shape
    return x.view(b, h // heads, heads, n, d).transpose(2, 3).reshape(b, h // heads, n, heads * d)


def _part(x: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`_join`."""
    if heads == 1:
        return x
    b, h, n, d = x.shape
    return x.view(b, h, n, heads, d // heads).transpose(2, 3).reshape(b, h * heads, n, d // heads)


def _spread(query: Tensor, heads: int) -> Tensor:
    """``[B, H, M, D]`` -> ``[B, H / heads, heads * M, heads * D]``: each head's queries, zero where the others' channels are."""
    if heads == 1:
        return query
    b, h, m, d = query.shape
    out = query.new_zeros(b, h // heads, heads, m, heads, d)
    for i in range(heads):
        out[:, :, i, :, i] = query.view(b, h // heads, heads, m, d)[:, :, i]
    return out.view(b, h // heads, heads * m, heads * d)


def _own(mixed: Tensor, heads: int) -> Tensor:
    """``[B, H / heads, heads * M, heads * D]`` -> ``[B, H, M, D]``: of each head's rows its own channels."""
    if heads == 1:
        return mixed
    b, h, m, d = mixed.shape
    split = mixed.view(b, h, heads, m // heads, heads, d // heads)
    return torch.stack([split[:, :, i, :, i] for i in range(heads)], 2).view(b, h * heads, m // heads, d // heads)
