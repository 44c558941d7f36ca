"""What a strategy should take, from the settings alone: the curve that measured points are drawn on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvlab.attention import scratch
from kvlab.buffer import SLACK_ROWS, SLACK_SHARE
from kvlab.geometry import Geometry
from kvlab.keep.base import Keep, Room, Visible
from kvlab.place.base import Place
from kvlab.store.base import LayerShape, fitting
from kvlab.strategy import Strategy

CYCLE = 256  # tokens in which a plain tail has been full at least once


def predict(
    geometry: Geometry, strategy: Strategy, tokens: int, *, batch: int = 1, bits: int = 16, tail: float = 0.5
) -> dict[str, float]:
    """Predicted bytes by part after ``tokens`` tokens of a sequence, all layers and all of ``batch`` sequences; room to grow apart.

    Parts are named as in ``KVCache.memory()``. ``bits`` is the width of the model's own numbers (32 for a float32 run). Where tokens are evicted from codes that
    share scales along a group, between none and a whole group of the newest are plain at any moment; ``tail`` says how much of it is assumed (0 to 1).

    Raises:
        ValueError: tokens below 0, batch below 1, bits other than 16 or 32, or a strategy that does not fit the model.
    """
    if tokens < 0:
        raise ValueError(f"tokens={tokens} is out of range (allowed: 0 or more)")
    if batch < 1:
        raise ValueError(f"batch={batch} is out of range (allowed: 1 or more)")
    if bits not in (16, 32):
        raise ValueError(f"bits={bits} is not one of 16, 32")
    if not 0.0 <= tail <= 1.0:
        raise ValueError(f"tail={tail} is out of range (allowed: 0.0 to 1.0)")
    out: dict[str, float] = {}
    for number, layer in enumerate(geometry.layers):
        if layer.kv_heads:
            for part, size in _parts(geometry, strategy, number, tokens, batch, bits, tail=tail)[0].items():
                out[part] = out.get(part, 0.0) + size
    return out


def _parts(
    geometry: Geometry,
    strategy: Strategy,
    number: int,
    tokens: int,
    batch: int,
    bits: int,
    at_once: bool = False,
    tail: float = 0.5,
) -> tuple[dict[str, float], int]:
    """Bytes of one layer by part, and how many tokens a head of it holds. ``at_once``: all tokens came in one piece, so only survivors were written
    down. ``tail``: how full the plain tail of a group is, once tokens were evicted."""
    layer = geometry.layers[number]
    keep, shape, rows = _held(geometry, strategy, number, tokens, batch, bits)
    parts = strategy.store.predict(
        rows, shape, evicting=max(tail, 1e-9) if rows < tokens and (keep.ragged or not at_once) else 0.0
    )
    if rows < tokens:
        parts["columns"] = rows * 4 * {"never": 1, "row": batch, "head": batch * layer.kv_heads}[keep.differs]
    if "attention" in keep.needs:
        parts["evidence"] = rows * 4 * batch * layer.kv_heads
    for part, size in keep.predict(rows, number, batch, geometry.query_heads, layer.kv_heads, layer.key_dim).items():
        if part != "counts" or rows < tokens:  # nothing is merged before something goes
            parts[part] = parts.get(part, 0.0) + size
    return parts, rows


def predict_high_water(
    geometry: Geometry,
    strategy: Strategy,
    prompt: int,
    tokens: int | None = None,
    *,
    step: int = 1,
    batch: int = 1,
    bits: int = 16,
    fused: bool = False,
) -> float:
    """Predicted ``memory().high_water``: the most bytes that the compute device holds while ``prompt`` tokens are read at once (in pieces of the strategy's
    ``chunk``), and then ``step`` more at a time up to ``tokens``. Attention's scores are counted, half of the room to grow too.

    A layer takes its new tokens as they are and writes them down afterwards, so the last layer's prompt lies beside all layers that are written already.
    ``fused``: kernels serve attention, which hold no scores (a GPU).

    Raises:
        ValueError: ``prompt`` or ``step`` below 1, ``tokens`` below ``prompt``, and as :func:`predict`.
    """
    last = prompt if tokens is None else tokens
    for name, value, low in (("prompt", prompt, 1), ("step", step, 1), ("tokens", last, prompt)):
        if value < low:
            raise ValueError(f"{name}={value} is out of range (allowed: {low} or more)")
    predict(geometry, strategy, 0, batch=batch, bits=bits)  # its checks
    size = min(prompt, strategy.chunk or prompt)
    moments = [(0, size), (max(0, prompt - size), prompt)]
    if last > prompt:
        moments.append((prompt, min(prompt + step, last)))
        begin = prompt + max(0, last - prompt - CYCLE) // step * step
        moments += [(before, min(before + step, last)) for before in range(begin, last, step)]
    return max(_moment(geometry, strategy, *moment, batch, bits, fused) for moment in dict.fromkeys(moments))


def _moment(geometry: Geometry, strategy: Strategy, before: int, after: int, batch: int, bits: int, fused: bool) -> float:
    """The most bytes while a step takes the cache from ``before`` to ``after`` tokens."""
    numbers = [number for number, layer in enumerate(geometry.layers) if layer.kv_heads]
    place: Place = strategy.place

    def sizes(number: int, tokens: int) -> tuple[float, float, int]:
        """Of one layer: bytes when it is at hand, bytes that stay when it is put away, and rows."""
        if not tokens:
            return 0.0, 0.0, 0
        parts, rows = _parts(geometry, strategy, number, tokens, batch, bits, at_once=not before, tail=1.0)
        room = 1 + 0.5 * max(1 / SLACK_SHARE, SLACK_ROWS / max(1, rows)) if before else 1.0
        return room * sum(parts.values()), room * place.stays(number, rows, parts), rows

    old, new = ({number: sizes(number, tokens) for number in numbers} for tokens in (before, after))
    most = 0.0
    for at, number in enumerate(numbers):
        layer = geometry.layers[number]
        others = sum(new[i][1] for i in numbers[:at]) + sum(old[i][1] for i in numbers[at + 1 :])
        ahead = [numbers[(at + i) % len(numbers)] for i in range(1, min(place.ahead, len(numbers) - 1) + 1)]
        coming = sum(sizes_[0] - sizes_[1] for i in ahead for sizes_ in [(new if i < number else old)[i]])
        fresh = (after - before) * batch * layer.kv_heads * (layer.key_dim + layer.value_dim) * (4 if bits == 32 else 2)
        scores = 0.0
        if not fused and (before or "attention" in strategy.keep.needs):
            scores = scratch(batch * geometry.query_heads, after - before, old[number][2])
        most = max(most, others + coming + fresh + max(old[number][0] + scores, new[number][0]))
    return most


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
