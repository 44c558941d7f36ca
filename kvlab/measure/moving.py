"""What an offloaded cache moves in a decode step, when, and what of it the model waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCache, forward
from kvlab.geometry import Geometry
from kvlab.lab import Lab, Progress
from kvlab.strategy import Strategy
from kvlab.timeline import Timeline

Layers = Sequence[tuple[Tensor, Tensor]]  # keys and values [1, KV heads, n, dim] of each layer


@dataclass(frozen=True)
class Moved:
    """Decode steps of one strategy over a cache of ``tokens`` tokens. ``line``: what happened in them. ``seconds``: of each step. ``bytes``: a step's fetches,
    ``cache``: allocated bytes of the cache wherever they are, ``resident``: those on the compute device between two steps, ``high_water``: the most there
    ever were in these steps, ``layer``: bytes of the largest layer.
    """

    strategy: Strategy
    tokens: int
    line: Timeline
    seconds: tuple[float, ...]
    bytes: int
    cache: int
    resident: int
    high_water: int
    layer: int

    @property
    def step(self) -> float:
        """Median seconds of a decode step."""
        return statistics.median(self.seconds)


def lengths(model: Any) -> list[list[tuple[int, int, torch.dtype]] | None]:
    """KV heads, dim and dtype of keys and of values, for each layer; None where the configuration does not say."""
    try:
        shape = Geometry.from_config(model.config)
    except ValueError:
        return [None] * model.config.num_hidden_layers
    return [[(layer.kv_heads, dim, model.dtype) for dim in (layer.key_dim, layer.value_dim)] for layer in shape.layers]


def fill(cache: KVCache, layers: Layers) -> None:
    """Give a new cache the keys and values of a text as if it had read it, without computing: they are written down, and put away, as always.

    Raises ``ValueError`` for a cache that has read something, another number of layers, or a keep that judges by attention or queries.
    """
    if cache.get_seq_length():
        raise ValueError(f"fill: the cache has read {cache.get_seq_length()} tokens (allowed: a new one)")
    if len(layers) != len(cache.layers):
        raise ValueError(f"fill: keys and values of {len(layers)} layers, the model has {len(cache.layers)}")
    rows = {(x.shape[0], x.shape[2]) if x.dim() == 4 else () for both in layers for x in both}
    if len(rows) != 1 or () in rows or 0 in next(iter(rows)):
        raise ValueError(
            "fill: keys and values of all layers must have one batch and one number of tokens, [B, H, n, D], none of them 0"
        )
    known = lengths(cache.model)
    for number, (both, want) in enumerate(zip(layers, known, strict=True)):
        got = [(x.shape[1], x.shape[3], x.dtype) for x in both]
        if want is not None and got != want:
            raise ValueError(f"fill: layer {number} has keys and values {got}, the model {want} (KV heads, dim, dtype)")
    needs = sorted(cache.strategy.keep.needs & {"attention", "queries", "roles"})
    if needs:
        raise ValueError(
            f"fill: {cache.strategy.keep} judges by {', '.join(needs)}, which there is none of (allowed: other keeps)"
        )
    with torch.inference_mode():
        for layer, (keys, values) in zip(cache.layers, layers, strict=True):
            layer.take_in(keys, values)


def moved(
    lab: Lab, strategy: Strategy, layers: Layers, *, steps: int = 8, token: int = 0, progress: Progress | None = None
) -> Moved:
    """Fill a cache with ``layers`` and take ``steps`` decode steps; the first two do not count, they warm up.

    Raises ``ValueError`` as :func:`fill` does, and for fewer than 1 step.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is out of range (allowed: 1 or more)")
    cache = KVCache(lab.model, strategy)
    try:
        fill(cache, layers)
        ids = torch.full((1, 1), token, dtype=torch.int64, device=lab.device)
        for _ in range(2):
            forward(lab.model, ids, cache, last=True)
        cache.high_water = 0
        line, seconds = cache.timeline(), []
        for number in range(steps):
            if progress:
                progress("decoding", number, steps)
            began = time.perf_counter()
            forward(lab.model, ids, cache, last=True)
            if lab.device.type == "cuda":
                torch.cuda.synchronize()
            line.rest()
            seconds.append(time.perf_counter() - began)
        line.stop()
        memory = cache.memory()
        largest = max(sum(buffer.allocated for buffer in layer.buffers()) for layer in cache.layers)
        return Moved(
            cache.strategy,
            cache.get_seq_length(),
            line,
            tuple(seconds),
            line.bytes("fetch") // steps,
            memory.allocated,
            cache.resident - cache.place.in_flight,
            cache.high_water,
            largest,
        )
    finally:
        cache.close()
