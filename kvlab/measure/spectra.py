"""How many directions keys and values need: the spectra of one layer, and the rank that keeps a share of the variance in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.lab import Progress
from kvlab.measure.inspect import Array, Recorded, check
from kvlab.store.base import LayerShape, Store
from kvlab.store.lowrank import spectrum

KINDS = ("before", "after", "values")


@dataclass(frozen=True)
class Spectra:
    """What the first directions of one layer keep: of its keys before RoPE, of its keys as they come (after RoPE), and of its values.

    ``before``, ``after`` float64 ``[key dim + 1]``, ``values`` float64 ``[value dim + 1]``: at ``r`` the share (0 to 1) of the variance that the
    first ``r`` directions of each head keep. The variance is that around each head's mean over the tokens, the squared singular values of all heads
    added up; a layer without any counts as kept. In a layer that does not turn its keys (no RoPE) ``before`` equals ``after``.
    """

    layer: int
    before: Array
    after: Array
    values: Array

    def kind(self, kind: str) -> Array:
        """Raises ``ValueError`` unless ``kind`` is "before", "after" or "values"."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not one of {', '.join(map(repr, KINDS))}")
        return {"before": self.before, "after": self.after, "values": self.values}[kind]

    def dim(self, kind: str) -> int:
        """How many directions there are."""
        return len(self.kind(kind)) - 1

    def share(self, kind: str, rank: int) -> float:
        """The share that the first ``rank`` directions keep. Raises ``ValueError`` for a rank that is not there."""
        check("rank", rank, 0, self.dim(kind))
        return float(self.kind(kind)[rank])

    def rank(self, kind: str, share: float) -> int:
        """The fewest directions that keep ``share``. (``LowRank`` with ``energy`` takes the next multiple of 8.)"""
        check_share(share)
        return int(np.argmax(self.kind(kind) >= share - 1e-9))


def spectra(recorded: Recorded, layer: int, skip: int = 0) -> Spectra:
    """Of the tokens of the text, as ``store.LowRank`` makes its basis when it writes them at once. ``skip``: how many of the first are left out, as
    the store leaves out its ``sinks_exact``. Raises ``ValueError`` for a layer that is not there, or where no token is left."""
    check("layer", layer, 0, len(recorded.layers) - 1)
    check("skip", skip, 0, recorded.layers[layer][0].shape[2] - 1)
    (keys, values), rope = (x[:, :, skip:] for x in recorded.layers[layer]), recorded.ropes[layer]
    after = _kept(keys)
    if rope is None:
        return Spectra(layer, after, after, _kept(values))
    first = recorded.first[layer] + skip
    columns = torch.arange(first, first + keys.shape[2], device=keys.device).view(1, 1, -1)
    return Spectra(layer, _kept(rope.turn(keys, columns, back=True).to(keys.dtype)), after, _kept(values))


def every_layer(recorded: Recorded, skip: int = 0, progress: Progress | None = None) -> tuple[Spectra, ...]:
    """:func:`spectra` of each layer."""
    found = []
    for layer in range(len(recorded.layers)):
        if progress:
            progress("spectra", layer, len(recorded.layers))
        found.append(spectra(recorded, layer, skip))
    return tuple(found)


@dataclass(frozen=True)
class Ranks:
    """The fewest directions that keep ``share`` of the variance in each layer: int ``[layers]``, as in :class:`Spectra`.

    ``dims``: how many directions a key and a value have, the largest of all layers.
    """

    share: float
    before: Array
    after: Array
    values: Array
    dims: tuple[int, int]

    def mean(self, kind: str) -> float:
        return float({"before": self.before, "after": self.after, "values": self.values}[kind].mean())


def ranks(layers: Sequence[Spectra], share: float) -> Ranks:
    """From the spectra of every layer. Raises ``ValueError`` for a share that is not above 0 and at most 1, or for no layers."""
    check_share(share)
    if not layers:
        raise ValueError("layers=() has no layer (allowed: the spectra of one or more)")
    before, after, values = (np.array([one.rank(kind, share) for one in layers]) for kind in KINDS)
    return Ranks(
        share, before, after, values, (max(one.dim("after") for one in layers), max(one.dim("values") for one in layers))
    )


def bits(recorded: Recorded, store: Store, layer: int, tokens: int | None = None) -> dict[str, float]:
    """What ``store`` should take in one layer at ``tokens`` tokens (None: those of the text): part -> bits a number, keys and values together.

    A plain number has the model's own width. Raises ``ValueError`` for a layer that is not there, or fewer tokens than one.
    """
    check("layer", layer, 0, len(recorded.layers) - 1)
    keys, values = recorded.layers[layer]
    rows = keys.shape[2] if tokens is None else tokens
    if rows < 1:
        raise ValueError(f"tokens={rows} is out of range (allowed: 1 or more)")
    heads, dims = keys.shape[1], (keys.shape[3], values.shape[3])
    shape = LayerShape(layer, len(recorded.layers), 1, heads, *dims, keys.dtype, keys.device, recorded.ropes[layer])
    numbers = heads * rows * sum(dims)
    return {part: 8 * size / numbers for part, size in store.predict(rows, shape).items() if size}


def check_share(share: float) -> None:
    """Raise ``ValueError`` that names the value and the allowed range unless it is above 0 and at most 1."""
    if isinstance(share, bool) or not isinstance(share, int | float | np.floating) or not 0 < share <= 1:
        raise ValueError(f"share={share!r} is out of range (allowed: above 0, up to 1)")


def _kept(x: Tensor) -> Array:
    """``[1, H, n, D]`` -> float64 ``[D + 1]``, the share of the variance kept by 0, 1, ..., D directions a head."""
    x = x.float()
    sizes = spectrum(x - x.mean(2, keepdim=True))[0].double().sum((0, 1)).cpu().numpy()
    total = float(sizes.sum())
    if total <= 1e-12 * float(x.double().square().sum()):  # float32's rounding, no variance
        return np.ones(len(sizes) + 1)
    kept = np.concatenate([[0.0], sizes.cumsum() / total])
    kept[-1] = 1.0
    return kept
