"""Which layers, and which of keys and values, bear fewer bits: one at a time is written with few, all others with eight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlab.lab import Lab, Progress
from kvlab.measure.quality import control, quality
from kvlab.store.mixed import Mixed
from kvlab.strategy import Strategy
from kvlab.texts import reference_text
from kvlab_kernels.layout import WIDTHS


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL divergence to the full cache, nats, where only this layer's keys, or only its values, have few bits."""

    layer: int
    keys: float
    values: float


def sensitivity(
    lab: Lab,
    *,
    bits: int = 2,
    store: Mixed | None = None,
    text: str | None = None,
    protocol: tuple[int, int, int] = (192, 64, 16),
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """Measure every layer: two runs each of ``protocol`` (tokens of prefill, tokens scored, tokens a step) of ``text``.

    ``store``: group size, axis and residual to measure with (its own bits and layers do not count). Give the result to :func:`profile`.
    Raises ``ValueError`` for bits that codes cannot have or a text too short for the protocol.
    """
    if bits not in WIDTHS:
        raise ValueError(f"bits={bits} is not one of {', '.join(map(str, WIDTHS))}")
    prefill, scored, step = protocol
    ids = lab.encode(reference_text()[: 8 * (prefill + scored)] if text is None else text)
    if ids.shape[1] < prefill + scored:
        raise ValueError(f"the text has {ids.shape[1]} tokens (allowed: {prefill + scored} or more for this protocol)")
    against = control(lab, ids[:, : prefill + scored], prefill=prefill, step=step)
    base = {name: getattr(store or Mixed(), name) for name in Mixed.settings()} | {"bits": 8, "value_bits": 8}
    layers = len(lab.geometry.layers)
    found = []
    for layer in range(layers):
        if progress:
            progress("layers", layer, layers)
        both = [
            quality(lab, Strategy(store=Mixed(**base | {"layers": f"{layer}={pair}"})), against).mean_kl
            for pair in (f"{bits}/8", f"8/{bits}")
        ]
        found.append(Sensitivity(layer, *both))
    return found


def profile(found: Iterable[Sensitivity], *, mean: float, low: int = 2, high: int = 4) -> str:
    """The text of ``store.Mixed(layers=...)`` that gives ``high`` bits to what suffers most and ``low`` to the rest.

    ``mean``: bits a number over all layers, keys and values. Raises ``ValueError`` unless ``low <= mean <= high`` are widths that codes can have.
    """
    found = list(found)
    if low not in WIDTHS or high not in WIDTHS or not low <= mean <= high or low == high:
        raise ValueError(
            f"low={low}, mean={mean}, high={high} (allowed: low below high, of {', '.join(map(str, WIDTHS))}, mean between them)"
        )
    order = sorted(((x.keys, x.layer, 0) for x in found), reverse=True) + sorted(
        ((x.values, x.layer, 1) for x in found), reverse=True
    )
    order.sort(key=lambda one: -one[0])
    many = round((mean - low) / (high - low) * len(order))
    chosen = {(layer, side) for _, layer, side in order[:many]}
    parts: list[tuple[int, int, str]] = []
    for layer in sorted(x.layer for x in found):
        bits = "/".join(str(high if (layer, side) in chosen else low) for side in (0, 1))
        if parts and parts[-1][1] == layer - 1 and parts[-1][2] == bits:
            parts[-1] = (parts[-1][0], layer, bits)
        else:
            parts.append((layer, layer, bits))
    return ", ".join(f"{a}={bits}" if a == b else f"{a}-{b}={bits}" for a, b, bits in parts)
