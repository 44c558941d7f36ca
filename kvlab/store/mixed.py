"""Mixed: other bits for keys than for values, and for some layers than for the others (KVTuner, arXiv 2502.04420)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvlab.store.base import LayerShape, StoreState
from kvlab.store.coded import CodedState
from kvlab.store.codes import QuantizedSide
from kvlab.store.int import FLOATS, Int
from kvlab.strategy import param
from kvlab_kernels.layout import WIDTHS

_PART = re.compile(r"(\d+)(?:-(\d+))?=(\d+)/(\d+)")


@dataclass(frozen=True)
class Mixed(Int):
    """``Int`` with ``bits`` for keys and ``value_bits`` for values, but where ``layers`` says otherwise.

    ``layers`` is text such as ``"0-1=8/4, 29=4/4"``: layers 0 and 1 take 8 bits for keys and 4 for values, layer 29 takes 4 and 4.
    ``kvlab.measure.sensitivity`` finds which layers bear fewer bits, and writes it.
    """

    title = "mixed bits"
    paper = "KVTuner, arXiv 2502.04420"

    bits: int = param(4, choices=(8, 4, 3, 2), unit="bits", title="key bits", help="Bits of a key's code.")
    value_bits: int = param(2, choices=(8, 4, 3, 2), unit="bits", title="value bits", help="Bits of a value's code.")
    value_levels: str = param(
        "even",
        choices=("even", "normal"),
        title="value levels",
        help="What values' codes stand for, as `levels` says it for keys.",
    )
    layers: str = param("", help="Layers with bits of their own: 0-1=8/4, 29=4/4 (layers = key bits / value bits).")

    def check(self) -> None:
        for layer in (-1, *self.profile()):
            self._of(layer)  # what does not go together in one layer's Int is refused there

    def profile(self) -> dict[int, tuple[int, int]]:
        """layer -> bits of its keys and of its values, where ``layers`` names it."""
        found: dict[int, tuple[int, int]] = {}
        for text in filter(None, (part.strip() for part in self.layers.split(","))):
            match = _PART.fullmatch(text.replace(" ", ""))
            if not match:
                raise ValueError(
                    f"Mixed: layers={self.layers!r}: {text!r} is not of the form 3=8/4 or 0-2=8/4 (layers = key bits / value bits)"
                )
            first, last = int(match[1]), int(match[2] or match[1])
            bits = int(match[3]), int(match[4])
            if last < first or not set(bits) <= set(WIDTHS):
                raise ValueError(
                    f"Mixed: layers={self.layers!r}: {text!r} (allowed: first-last=bits/bits, bits of {', '.join(map(str, WIDTHS))})"
                )
            if twice := found.keys() & range(first, last + 1):
                raise ValueError(f"Mixed: layers={self.layers!r} names layer {min(twice)} twice (allowed: once)")
            found |= dict.fromkeys(range(first, last + 1), bits)
        return found

    def _of(self, layer: int) -> tuple[Int, Int]:
        """``Int`` for the keys and ``Int`` for the values of a layer."""
        shared = {name: getattr(self, name) for name in Int.settings() if name not in ("bits", "levels")}
        keys, values = self.profile().get(layer, (self.bits, self.value_bits))
        clip = {"clip": 1.0} if self.value_levels == "normal" else {}  # such levels clip by themselves
        return Int(bits=keys, levels=self.levels, **shared), Int(bits=values, levels=self.value_levels, **shared | clip)

    def state(self, shape: LayerShape) -> StoreState:
        beyond = [layer for layer in self.profile() if layer >= shape.layers]
        if beyond:
            raise ValueError(
                f"Mixed: layers={self.layers!r} names layer {beyond[0]}, the model has {shape.layers} (allowed: 0 to {shape.layers - 1})"
            )
        sides = []
        for number, (own, dim) in enumerate(zip(self._of(shape.layer), (shape.key_dim, shape.value_dim), strict=True)):
            axis = self.key_axis if number == 0 else "token"
            size = own._channels(dim)
            sides.append(QuantizedSide(own.coding, axis, self.group_size if axis != "token" else size))
        return CodedState(shape, sides[0], sides[1], self.flush, FLOATS.get(self.plain))

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        keys, values = self._of(shape.layer)
        none = [
            keys.predict(rows, replace(shape, value_dim=0), evicting),
            values.predict(rows, replace(shape, key_dim=0), evicting),
        ]
        total = {part: none[0].get(part, 0.0) + none[1].get(part, 0.0) for part in dict.fromkeys([*none[0], *none[1]])}
        if "tables" in total:
            total["tables"] = none[0]["tables"]  # one table, of the keys
        return total
