"""Rotated: a rotation of each head before another store, so that no channel is large (QuaRot, arXiv 2404.00456; RotateKV, arXiv 2501.16383)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Store, StoreState
from kvlab.store.int import Int
from kvlab.strategy import param


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
    """Keys and values are rotated, each head by the same orthogonal matrix, and written down by ``inner``.

    A few channels of keys are far larger than the others; after a rotation none is, so one scale for a whole token loses little. Queries are
    rotated alike, so scores do not change, and what attention gives is rotated back. Keys come after RoPE, so this is the post-RoPE form.
    """

    title = "rotated"
    paper = "QuaRot, arXiv 2404.00456"

    inner: Any = param(Int(bits=4, key_axis="token"), title="written as", help="How the rotated numbers are written down.")
    kind: str = param("hadamard", choices=("hadamard", "random"), help="A Hadamard matrix, or one behind random signs.")
    values: bool = param(True, help="Rotate values too, not only keys.")

    def check(self) -> None:
        if isinstance(self.inner, Rotated):
            raise ValueError("Rotated: inner=Rotated(...) would rotate twice (allowed: any other store)")

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.offers)

    def state(self, shape: LayerShape) -> StoreState:
        return RotatedState(self, shape)

    def predict(self, rows: int, shape: LayerShape, evicting: bool = False) -> dict[str, float]:
        return self.inner.predict(rows, shape, evicting)  # type: ignore[no-any-return]


class RotatedState(StoreState):
    """Everything is the inner store's, in rotated coordinates."""

    def __init__(self, settings: Rotated, shape: LayerShape) -> None:
        super().__init__(shape)
        self.inner: StoreState = settings.inner.state(shape)
        self.turn_keys = rotation(shape.key_dim, settings.kind).to(shape.device)
        self.turn_values = rotation(shape.value_dim, settings.kind).to(shape.device) if settings.values else None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "shape" and "inner" in self.__dict__:
            self.inner.shape = value

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def borders(self) -> list[int]:
        return self.inner.borders

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.inner.append(_turn(keys, self.turn_keys), _turn(values, self.turn_values))

    def settle(self) -> None:
        self.inner.settle()

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.score(_turn(query, self.turn_keys), start, stop)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        return _turn(self.inner.mix(weights, start, stop), None if self.turn_values is None else self.turn_values.T)

    def layout(self) -> None:
        return None  # a kernel would have to rotate query and output

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        yield from self.inner.blocks(rows)

    def select(self, index: Tensor) -> None:
        self.inner.select(index)

    def truncate(self, rows: int) -> None:
        self.inner.truncate(rows)

    def thaw(self) -> None:
        self.inner.thaw()

    def buffers(self) -> list[Buffer]:
        return self.inner.buffers()

    def counts(self) -> dict[str, int]:
        return self.inner.counts()

    def recount(self, counts: dict[str, int]) -> None:
        self.inner.recount(counts)

    def dense(self) -> tuple[Tensor, Tensor]:
        keys, values = self.inner.dense()
        return _turn(keys, self.turn_keys.T), _turn(values, None if self.turn_values is None else self.turn_values.T)


def _turn(x: Tensor, matrix: Tensor | None) -> Tensor:
    return x if matrix is None else (x.float() @ matrix).to(x.dtype)
