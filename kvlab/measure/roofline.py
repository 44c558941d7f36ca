"""The roofline of a whole step: what a strategy makes it read and compute on chosen hardware. Predictions, floors that nothing beats."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab import geometry, hardware
from kvlab.geometry import Geometry
from kvlab.hardware import Hardware
from kvlab.keep.quest import Quest
from kvlab.measure.memory import held, predict
from kvlab.place.resident import Resident
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Point:
    """One step of all sequences. ``flops``: computed; ``bytes``: read from the devices' memory; ``moved``: bytes over the link to where a cache waits.
    ``compute_seconds``, ``memory_seconds``, ``link_seconds``: how long each would take alone; the step takes the longest.
    """

    name: str
    flops: float
    bytes: float
    moved: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.link_seconds)

    @property
    def bound(self) -> str:
        """What it waits for: "memory", "compute" or "link"."""
        times = {"memory": self.memory_seconds, "compute": self.compute_seconds, "link": self.link_seconds}
        return max(times, key=times.__getitem__)

    @property
    def rate(self) -> float:
        """FLOP a second, at best."""
        return self.flops / self.seconds


def decode(
    shape: Geometry,
    kind: Hardware,
    strategy: Strategy,
    context: int,
    *,
    requests: int = 1,
    devices: int = 1,
    weight_bits: int = 16,
    name: str = "",
) -> Point:
    """One new token for each of ``requests`` sequences of ``context`` tokens.

    Raises ``ValueError`` for hardware that does not compute, a model of unknown size, or a strategy that does not fit the model.
    """
    rows = held(shape, strategy, context)
    cached = sum(predict(shape, strategy, context).values()) * requests
    floor = hardware.decode_time(
        shape, kind, context, requests=requests, devices=devices, weight_bits=weight_bits, kept_tokens=rows if rows < context else None
    )  # fmt: skip
    read = weights(shape, requests, weight_bits) + cached * _looked_at(strategy, context)
    moved = 0.0 if isinstance(strategy.place, Resident) or not kind.link else cached * _looked_at(strategy, context)
    link = hardware.transfer_time(round(moved), kind.link) / devices if moved and kind.link else 0.0
    return Point(name or str(strategy), floor.flops, read, moved, floor.compute_seconds, read / (kind.bandwidth * devices), link)


def prefill(shape: Geometry, kind: Hardware, context: int, *, devices: int = 1, weight_bits: int = 16) -> Point:
    """Reading a prompt of ``context`` tokens at once: two FLOP a weight and token, causal attention; the weights are read once."""
    if kind.flops is None:
        raise ValueError(
            f"{kind.name} is a {kind.kind}: it does not compute; choose of: {', '.join(hardware.names('gpu', 'cpu'))}"
        )
    flops = 2.0 * (shape.active_parameters or 0) * context + context * hardware.attention_flops(shape, context) / 2
    read = weights(shape, context, weight_bits) + sum(predict(shape, Strategy(), context).values())
    return Point(
        f"prefill of {context:,}", flops, read, 0.0, flops / (kind.flops * devices), read / (kind.bandwidth * devices), 0.0
    )


def weights(shape: Geometry, sequences: int, weight_bits: int = 16) -> int:
    """Bytes of weights that a step of ``sequences`` tokens reads."""
    share = hardware.weights_read(shape, sequences) / (shape.parameters or 1)
    return round(geometry.weight_bytes(shape, weight_bits) * share)


def _looked_at(strategy: Strategy, context: int) -> float:
    """The share of what is kept that a query reads."""
    if not isinstance(strategy.keep, Quest):
        return 1.0
    budget = strategy.keep.budget
    return min(1.0, budget if isinstance(budget, float) else budget / context)
