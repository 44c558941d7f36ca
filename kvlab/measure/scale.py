"""What a strategy would take, before any model has run: on this model over the tokens, and on a big one beside its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlab import geometry, hardware
from kvlab.geometry import Breakdown, Geometry
from kvlab.measure.memory import predict, predict_curve
from kvlab.place.resident import Resident
from kvlab.strategy import Strategy

DEVICES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Prediction:
    """Bytes of one sequence's cache over the tokens, as this run should take them; each list as long as ``tokens``.

    ``full``: the full cache in the run's own width; ``full16``: in 16 bits, what ratios refer to; ``parts``: the strategy.
    """

    tokens: list[int]
    full: list[float]
    full16: list[float]
    parts: dict[str, list[float]]

    @property
    def total(self) -> float:
        """The strategy's bytes at the last token."""
        return sum(values[-1] for values in self.parts.values())

    @property
    def ratio(self) -> float:
        """At the last token, against 16 bits."""
        return self.total / self.full16[-1] if self.full16[-1] else 0.0


def prediction(shape: Geometry, strategy: Strategy, tokens: int, bits: int = 32) -> Prediction:
    """The curve from 0 to ``tokens`` tokens. ``bits``: the width of the model's numbers, 16 or 32. `ValueError` as `predict`."""
    grid = geometry.grid(max(tokens, 1), 49)
    full = [sum(predict(shape, Strategy(), n, bits=bits).values()) for n in grid]
    return Prediction(grid, full, [value * 16 / bits for value in full], predict_curve(shape, strategy, grid, bits=bits))


@dataclass(frozen=True)
class Scaled:
    """A strategy on a big model: what lies on the devices, for requests of each length of ``tokens``.

    ``fits``: the longest request that fits (0: none, None: no limit was found); ``fits_full`` with the full cache. ``here``: the
    length looked at. ``elsewhere``: bytes of KV at ``here`` that wait off the devices, and ``moved`` the predicted seconds that
    streaming them once takes, at every decode step (None where nothing moves).
    """

    model: str
    hardware: str
    devices: int
    requests: int
    tokens: list[int]
    predicted: list[Breakdown]
    full: list[Breakdown]
    capacity: int
    fits: int | None
    fits_full: int | None
    here: int
    elsewhere: float
    moved: float | None

    def at(self, tokens: int) -> Breakdown:
        return self.predicted[self.tokens.index(tokens)]


def scaled(
    strategy: Strategy, model: str, device: str, *, devices: int = 1, requests: int = 1, here: int | None = None
) -> Scaled:
    """``requests`` requests at once on ``devices`` of a kind, the model and its cache in 16 bits before the strategy.

    A strategy that does not stay resident has two layers on the devices at a time, one at work and one arriving.

    Raises:
        ValueError: a name not in the tables, a number below 1, or a strategy that does not fit the model (a group size, say).
    """
    shape, kind = geometry.find(model), hardware.find(device)
    capacity = kind.capacity(devices)
    last = shape.context or 131_072
    here = min(here or last, last)
    away = not isinstance(strategy.place, Resident)

    def kv(how: Strategy, tokens: int) -> float:
        return sum(predict(shape, how, tokens, batch=requests).values())

    def on_device(tokens: int) -> Breakdown:
        plain, held = geometry.breakdown(shape, tokens, requests=requests), kv(strategy, tokens)
        return replace(plain, kv=round(held * _share(shape) if away else held))

    grid = geometry.grid(last, 33, include=[here])
    elsewhere = kv(strategy, here) if away else 0.0
    return Scaled(
        model=shape.name,
        hardware=kind.name,
        devices=devices,
        requests=requests,
        tokens=grid,
        predicted=[on_device(n) for n in grid],
        full=geometry.curve(shape, grid, requests=requests),
        capacity=capacity,
        fits=_longest(lambda n: on_device(n).total, capacity),
        fits_full=geometry.max_tokens(shape, kind, devices=devices, requests=requests),
        here=here,
        elsewhere=elsewhere,
        moved=hardware.transfer_time(round(elsewhere), kind.link) if elsewhere and kind.link else None,
    )


def devices_for(model: str, device: str) -> int:
    """The fewest devices, of 1, 2, 4, 8 or 16, on which as much room is left as the weights take; 16 where none is enough."""
    weights = geometry.weight_bytes(geometry.find(model))
    return next((n for n in DEVICES if hardware.find(device).capacity(n) >= 2 * weights), DEVICES[-1])


def _share(shape: Geometry) -> float:
    return min(1.0, 2 / max(1, len(shape.kv_layers)))


def _longest(total: Callable[[int], float], capacity: int, limit: int = 1 << 26) -> int | None:
    if total(1) > capacity:
        return 0
    low, high = 1, 2
    while total(high) <= capacity:
        low, high = high, 2 * high
        if high > limit:
            return None
    while high - low > max(1, low // 4096):  # to four digits: what is drawn needs no more
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= capacity else (low, middle)
    return low
