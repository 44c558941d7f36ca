"""Fp8: eight-bit floats with a scale for each token and head (FP8 formats, arXiv 2209.05433)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.store.base import LayerShape, Store, StoreState
from kvlab.store.coded import CodedState, Flush
from kvlab.store.codes import Coding, QuantizedSide
from kvlab.strategy import param


@dataclass(frozen=True)
class Fp8(Store):
    """Eight-bit floats. Each token of each head has a scale of its own, taken from that token: a later, larger token is never clipped.

    A float's steps are finer near zero, an integer's are the same everywhere; 1 byte a number either way.
    """

    title = "8-bit floats"
    paper = "arXiv 2209.05433"

    format: str = param(
        "e4m3", choices=("e4m3", "e5m2"), help="Bits of exponent and mantissa: e4m3 is finer, e5m2 reaches further."
    )
    residual: int = param(0, low=0, high=4096, step=32, unit="tokens", covers=True, help="The newest tokens that stay plain.")

    def state(self, shape: LayerShape) -> StoreState:
        coding = Coding(8, torch.float16, format=self.format)
        sides = [QuantizedSide(coding, "token", dim) for dim in (shape.key_dim, shape.value_dim)]
        return CodedState(shape, sides[0], sides[1], Flush(residual=self.residual))

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        heads, coded = shape.batch * shape.kv_heads, max(0, rows - self.residual)
        both = shape.key_dim + shape.value_dim
        plain = heads * (rows - coded) * both * shape.dtype.itemsize
        return {"codes": float(heads * coded * both), "scales": heads * coded * 2 * 2.0, "residual": float(plain)}
