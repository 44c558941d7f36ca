"""Int: integer codes. Keys per channel or per token, values per token, the newest tokens plain (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvlab.store.base import LayerShape, Store, StoreState
from kvlab.store.coded import CodedState, Flush
from kvlab.store.codes import Coding, QuantizedSide
from kvlab.strategy import param
from kvlab_kernels.layout import check_packs

SCALES = {"float16": torch.float16, "float32": torch.float32}
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Int(Store):
    """Integer codes with a scale and, unless ``symmetric``, a zero point a group (minimum to maximum), really packed.

    Keys have a few channels of large size, so they are scaled per channel, over ``group_size`` tokens; values per token, over
    ``group_size`` channels (the whole head where it is smaller). Tokens wait in a plain tail of at least ``residual`` tokens until a
    whole group can be written; a code written does not change.
    """

    title = "integer codes"
    paper = "KIVI, arXiv 2402.02750"

    bits: int = param(8, choices=(8, 4, 3, 2), unit="bits", help="Bits of one code. Scales and zero points come on top.")
    group_size: int = param(
        64, low=8, high=1024, step=8, unit="numbers", title="group size", help="How many numbers share one scale."
    )
    key_axis: str = param(
        "channel",
        choices=("channel", "token", "tensor"),
        title="keys scaled per",
        help="What shares a key's scale: a channel over several tokens, a token's channels, or everything (the control that fails).",
    )
    residual: int = param(
        0, low=0, high=4096, step=32, unit="tokens", covers=True, help="The newest tokens that stay plain, at least."
    )
    sinks_exact: int = param(
        0, low=0, high=64, step=1, unit="tokens", title="exact sinks", help="How many of the first tokens stay plain for good."
    )
    symmetric: bool = param(False, help="Codes around zero: half the scales' bytes, one code of each group unused.")
    clip: float = param(
        1.0, low=0.5, high=1.0, step=0.05, help="The share of a group's range that the codes cover; what lies outside is cut off."
    )
    levels: str = param(
        "even",
        choices=("even", "normal"),
        help="What codes stand for: even steps from the least to the largest number, or the steps that suit normal numbers best (Lloyd-Max).",
    )
    scales: str = param("float16", choices=tuple(SCALES), help="The format of scales and zero points.")

    plain: str = param(
        "model",
        choices=("model", *FLOATS),
        title="plain tokens as",
        help="The format of plain tokens: the model's, or 16 bits where the model has 32.",
    )

    kivi: ClassVar[bool] = False  # the flush rule, see Flush

    def state(self, shape: LayerShape) -> StoreState:
        for dim in (shape.key_dim, shape.value_dim):
            self._channels(dim)
        coding = self.coding
        key_group = self._channels(shape.key_dim) if self.key_axis == "token" else self.group_size
        keys = QuantizedSide(coding, self.key_axis, key_group)
        values = QuantizedSide(coding, "token", self._channels(shape.value_dim))
        return CodedState(shape, keys, values, self.flush, FLOATS.get(self.plain))

    @property
    def flush(self) -> Flush:
        return Flush(1 if self.key_axis == "token" else self.group_size, self.residual, self.sinks_exact, self.kivi)

    @property
    def coding(self) -> Coding:
        return Coding(self.bits, SCALES[self.scales], self.symmetric, self.clip, "int" if self.levels == "even" else self.levels)

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"evict", "rewrite"} if self.residual else {"evict"})

    def check(self) -> None:
        if self.levels == "normal" and (self.bits == 8 or self.clip < 1):
            wrong = f"bits={self.bits}" if self.bits == 8 else f"clip={self.clip}"
            raise ValueError(
                f"{type(self).__name__}: {wrong} with levels='normal' (allowed: 4, 3 or 2 bits and no clipping: the levels clip by themselves)"
            )

    def _channels(self, dim: int) -> int:
        """Channels that share a per-token scale in a head of ``dim``. Raises ``ValueError`` where the group does not divide it."""
        name, size = type(self).__name__, min(self.group_size, dim)
        if dim % size:
            fits = [d for d in range(8, dim + 1) if dim % d == 0]
            raise ValueError(
                f"{name}: group_size={self.group_size} does not divide the head dim {dim} (allowed: {', '.join(map(str, fits))} or more)"
            )
        try:
            check_packs(dim, self.bits)
        except ValueError as error:
            raise ValueError(f"{name}: bits={self.bits}: {error}") from None
        return size

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        heads, numbers = shape.batch * shape.kv_heads, SCALES[self.scales].itemsize * (1 if self.symmetric else 2)
        tail = max(0, rows - self.sinks_exact)
        keys, values = float(self.flush.keys(tail)), float(self.flush.values(tail))
        grouped = self.key_axis != "token"
        if evicting and grouped:  # the tail is between empty and a whole group, and codes make room for it
            keys = values = max(0.0, keys - int(evicting * (self.group_size - 1)))
        codes = (keys * shape.key_dim + values * shape.value_dim) * self.bits / 8
        scales = values * shape.value_dim / self._channels(shape.value_dim) if shape.value_dim else 0.0
        if self.key_axis == "token":
            scales += keys * shape.key_dim / self._channels(shape.key_dim) if shape.key_dim else 0.0
        elif shape.key_dim:
            scales += keys / self.group_size * (shape.key_dim if self.key_axis == "channel" else 1 / shape.kv_heads)
        plain = ((rows - keys) * shape.key_dim + (rows - values) * shape.value_dim) * FLOATS.get(self.plain, shape.dtype).itemsize
        parts = {"codes": heads * codes, "scales": heads * scales * numbers, "residual": heads * plain}
        return parts | {"tables": heads * keys * 4.0} if evicting and grouped else parts
