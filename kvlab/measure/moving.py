"""What an offloaded cache moves in a decode step, when, and what of it the model waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache, forward
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


def fill(cache: KVCache, layers: Layers) -> None:
    """Give a new cache the keys and values of a text as if it had read it, without computing: they are written down, and put away, as always.

    Raises ``ValueError`` for a cache that has read something, another number of layers, or a keep that judges by attention or queries.
    """
    if cache.get_seq_length():
        raise ValueError(f"fill: the cache has read {cache.get_seq_length()} tokens (allowed: a new one)")
    if len(layers) != len(cache.layers):
        raise ValueError(f"fill: keys and values of {len(layers)} layers, the model has {len(cache.layers)}")
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
    if steps < 1:
        raise ValueError(f"steps={steps} is out of range (allowed: 1 or more)")
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
