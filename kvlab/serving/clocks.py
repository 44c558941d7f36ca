"""Clocks: how long a step takes, without waiting for it. By the datasheets, or fitted to steps that were measured."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab import geometry, hardware
from kvlab.geometry import Geometry
from kvlab.hardware import Hardware
from kvlab.serving.request import Sampling
from kvlab.serving.scheduler import Plan
from kvlab.strategy import Strategy

if TYPE_CHECKING:
    from kvlab.lab import Lab

#: Seconds of a step, from its plan.
Clock = Callable[[Plan], float]


@dataclass(frozen=True)
class Fitted:
    """A clock by measurement: seconds for a step, for each of its requests and tokens, and for each token of cache that is read."""

    step: float
    request: float
    token: float
    read: float

    def __call__(self, plan: Plan) -> float:
        return self.step + self.request * len(plan.work) + self.token * plan.tokens + self.read * plan.read


def fit(steps: Sequence[tuple[int, int, int, float]]) -> Fitted:
    """A clock from measured steps ``(requests, tokens, tokens of cache read, seconds)``: least squares of the relative error, nothing below zero.

    Raises ``ValueError`` for fewer than 4 steps.
    """
    import numpy as np

    if len(steps) < 4:
        raise ValueError(f"{len(steps)} steps are too few to fit a clock (allowed: 4 or more)")
    if wrong := [step for step in steps if not 0 < step[3] < float("inf")]:
        raise ValueError(f"a step of {wrong[0][3]!r} seconds cannot be (allowed: above 0)")
    seconds = np.array([taken for *_, taken in steps])
    table = np.array([[1.0, *what] for *what, _ in steps]) / seconds[:, None]
    kept = list(range(4))
    while True:
        found = np.linalg.lstsq(table[:, kept], np.ones(len(steps)), rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    whole = dict(zip(kept, found, strict=True))
    return Fitted(*(max(0.0, float(whole.get(number, 0.0))) for number in range(4)))


def calibrate(
    lab: Lab, strategy: Strategy | None = None, *, most: int = 16, tokens: int = 512, new: int = 12, **how: Any
) -> Fitted:
    """Measure steps of an :class:`Engine` on this machine and fit a clock to them: up to ``most`` requests at once, of up to ``tokens`` tokens, each making
    ``new`` more; ``how``: the engine's settings. Takes the time of some hundred steps. Raises ``ValueError`` as the engine does.
    """
    from kvlab.serving.engine import Engine

    for name, value, least in (("most", most, 1), ("tokens", tokens, 1), ("new", new, 2)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} is out of range (allowed: {least} or more)")
    if tokens + new > lab.context:
        raise ValueError(f"tokens={tokens} and new={new} are more than the model's context (allowed: {lab.context} together)")
    engine = Engine(lab, strategy, **{"prefix_caching": False, "max_running": max(most, 1)} | how)
    words = lab.model.config.get_text_config(decoder=True).vocab_size
    seen: dict[tuple[int, int, int], list[tuple[int, float]]] = {}  # by requests, tokens, prompt length
    for turn in range(2):  # the first steps of a process are slow, and not counted
        for count in [1] if not turn else sorted({1, most} | {1 << power for power in range(most.bit_length())}):
            for length in sorted({max(1, tokens // part) for part in (8, 2, 1)}):
                if (length + new) * count > engine.pool.blocks * engine.pool.block_size or count * length > 4 * tokens:
                    continue
                for number in range(count):
                    prompt = [(number * 7919 + place * 31) % words for place in range(length)]
                    engine.add(prompt, Sampling(max_new_tokens=new, ignore_eos=True))
                while engine.busy:
                    begun = time.perf_counter()
                    engine.step()
                    taken, plan = time.perf_counter() - begun, engine.plan
                    if turn:
                        seen.setdefault((len(plan.work), plan.tokens, length), []).append((plan.read, taken))
    return fit(
        [
            (requests, count, round(statistics.median(read for read, _ in same)), statistics.median(taken for _, taken in same))
            for (requests, count, _), same in seen.items()
        ]
    )


@dataclass(frozen=True)
class Roofline:
    """A clock by the datasheets: weights once a step, the cache of each request once, two FLOP a weight and token, attention; whichever takes longest.

    ``overhead``: seconds of a step for what is neither.
    """

    shape: Geometry
    kind: Hardware
    token_bytes: float  # of cache
    devices: int = 1
    weight_bits: int = 16
    overhead: float = 0.0
    window: int | None = None  # tokens that a query sees at most

    @functools.cached_property
    def _attends(self) -> float:
        """FLOP for one query and one key, all layers."""
        return hardware.attention_flops(self.shape, 1)

    def _seen(self, tokens: float) -> float:
        return tokens if self.window is None else min(tokens, self.window)

    def __call__(self, plan: Plan) -> float:
        tokens, sequences = plan.tokens, len(plan.work)
        share = hardware.weights_read(self.shape, max(1, sequences)) / (self.shape.parameters or 1)
        read = geometry.weight_bytes(self.shape, self.weight_bits) * share
        read += self.token_bytes * sum(self._seen(work.start + work.count) for work in plan.work)
        flops = 2.0 * (self.shape.active_parameters or 0) * tokens
        flops += self._attends * sum(work.count * self._seen(work.start + work.count / 2) for work in plan.work)
        return self.overhead + max(read / (self.kind.bandwidth * self.devices), flops / ((self.kind.flops or 1) * self.devices))
