"""What a strategy should take, from the settings alone: the curve that measured points are drawn on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlab.geometry import Geometry
from kvlab.keep.base import Keep, Room, Visible
from kvlab.store.base import LayerShape, fitting
from kvlab.strategy import Strategy


def predict(geometry: Geometry, strategy: Strategy, tokens: int, *, batch: int = 1, bits: int = 16) -> dict[str, float]:
    """Predicted bytes by part after ``tokens`` tokens of a sequence, all layers and all of ``batch`` sequences; room to grow apart.

    Parts are named as in ``KVCache.memory()``. ``bits`` is the width of the model's own numbers (32 for a float32 run).

    Raises:
        ValueError: tokens below 0, batch below 1, bits other than 16 or 32, or a strategy that does not fit the model.
    """
    if tokens < 0:
        raise ValueError(f"tokens={tokens} is out of range (allowed: 0 or more)")
    if batch < 1:
        raise ValueError(f"batch={batch} is out of range (allowed: 1 or more)")
    if bits not in (16, 32):
        raise ValueError(f"bits={bits} is not one of 16, 32")
    out: dict[str, float] = {}
    for number, layer in enumerate(geometry.layers):
        if not layer.kv_heads:
            continue
        keep, shape, rows = _held(geometry, strategy, number, tokens, batch, bits)
        parts = strategy.store.predict(rows, shape, evicting=rows < tokens)
        if rows < tokens:
            parts["columns"] = rows * 4 * {"never": 1, "row": batch, "head": batch * layer.kv_heads}[keep.differs]
        if "attention" in keep.needs:
            parts["evidence"] = rows * 4 * batch * layer.kv_heads
        for part, size in keep.predict(rows, number, batch, geometry.query_heads, layer.kv_heads, layer.key_dim).items():
            if part != "counts" or rows < tokens:  # nothing is merged before something goes
                parts[part] = parts.get(part, 0.0) + size
        for part, size in parts.items():
            out[part] = out.get(part, 0.0) + size
    return out


def held(geometry: Geometry, strategy: Strategy, tokens: int, *, bits: int = 16) -> int:
    """How many of ``tokens`` tokens a head of the first layer that has a cache still holds."""
    number = next(i for i, layer in enumerate(geometry.layers) if layer.kv_heads)
    return _held(geometry, strategy, number, tokens, 1, bits)[2]


def _held(
    geometry: Geometry, strategy: Strategy, number: int, tokens: int, batch: int, bits: int
) -> tuple[Keep, LayerShape, int]:
    """What keeps a layer's tokens, its shape, and how many of ``tokens`` a head holds."""
    layer, layers = geometry.layers[number], len(geometry.layers)
    # a layer with a window of its own keeps what its attention can still see, whatever the strategy
    keep: Keep = strategy.keep if layer.window is None else Visible(size=max(1, layer.window - 1))
    dtype = torch.float32 if bits == 32 else torch.float16
    shape = LayerShape(number, layers, batch, layer.kv_heads, layer.key_dim, layer.value_dim, dtype, torch.device("cpu"))

    def rows_in(size: float) -> int:
        always = sum(keep.predict(0, number, batch, geometry.query_heads, layer.kv_heads, layer.key_dim).values())
        return fitting(strategy.store, shape, size - always, keep.beside(batch, layer.kv_heads))

    sharing = sum(1 for one in geometry.layers if one.kv_heads and one.window is None)
    limit = keep.limit(Room(number, layers, tokens, rows_in, sharing))
    return keep, shape, tokens if limit is None else min(tokens, limit)


def predict_curve(
    geometry: Geometry, strategy: Strategy, tokens: Iterable[int], *, batch: int = 1, bits: int = 16
) -> dict[str, list[float]]:
    """:func:`predict` at several lengths -> part -> bytes at each of them (0 where a part does not occur yet)."""
    points = [predict(geometry, strategy, t, batch=batch, bits=bits) for t in tokens]
    names = dict.fromkeys(name for point in points for name in point)
    return {name: [point.get(name, 0.0) for point in points] for name in names}
