"""A recipe, layer by layer: quantize, then evict, then offload; what each saves and what it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.cache import KVCache, forward
from kvlab.lab import Lab, Progress
from kvlab.measure.quality import Control, compared, read
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Step:
    """The cache with all layers of the recipe up to this one. ``device``: bytes on the compute device between two steps; ``bytes``: on all of them;
    ``high_water``: the most that the device held; ``reference``: of a 16-bit dense cache. ``kl`` in nats, ``agreement`` and ``perplexity_change`` against the
    full cache; ``per_token``: median seconds of a decode step after the text.
    """

    name: str
    strategy: Strategy
    device: int
    bytes: int
    high_water: int
    reference: int
    kl: float
    agreement: float
    perplexity_change: float
    per_token: float


def recipe(
    lab: Lab, layers: Mapping[str, Strategy], against: Control, *, steps: int = 8, progress: Progress | None = None
) -> list[Step]:
    """Read the control's text with the full cache and with each strategy of ``layers`` (name -> the recipe so far), then decode ``steps`` tokens.

    Raises ``ValueError`` for no layer or fewer than 1 step.
    """
    if not layers:
        raise ValueError("recipe: no layer is given (allowed: one or more)")
    if steps < 1:
        raise ValueError(f"steps={steps} is out of range (allowed: 1 or more)")
    made = []
    for name, strategy in {"full cache": Strategy(), **layers}.items():
        cache = KVCache(lab.model, strategy)
        try:
            with lab.replaying():
                logits = read(
                    lab, against.ids, cache, against.prefill, against.step, chunk=strategy.chunk, progress=progress, stage=name
                )
            memory = cache.memory()
            loss, full, kl, agree = compared(logits, against)
            times = []
            for _ in range(steps + 1):
                start = time.perf_counter()
                forward(lab.model, against.ids[:, :1], cache, last=True)
                times.append(time.perf_counter() - start)
        finally:
            cache.close()
        change = float(loss.double().mean().exp() / full.double().mean().exp()) - 1
        device = memory.by_device().get(lab.device.type, 0)
        made.append(
            Step(
                name,
                strategy,
                device,
                memory.allocated,
                memory.high_water,
                memory.reference,
                float(kl.double().mean()),
                float(agree.double().mean()),
                change,
                statistics.median(times[1:]),
            )
        )
    return made
