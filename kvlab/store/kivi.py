"""KIVI: two bits with keys per channel, values per token and the newest tokens plain (arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvlab.store.int import Int
from kvlab.strategy import param


@dataclass(frozen=True)
class KIVI(Int):
    """``Int`` with the paper's settings and its rule for when plain tokens become codes.

    Keys gather in a buffer of ``residual`` tokens and are all written when it is full; values leave a window of the newest ``residual`` one by
    one. Which tokens are codes then differs between keys and values, so nothing can be evicted from it.
    """

    title = "KIVI"
    offers = frozenset()
    kivi: ClassVar[bool] = True

    bits: int = param(2, choices=(4, 2), unit="bits", help="Bits of one code. Scales and zero points come on top.")
    group_size: int = param(
        32, low=8, high=1024, step=8, unit="numbers", title="group size", help="How many numbers share one scale."
    )
    residual: int = param(
        128,
        low=8,
        high=4096,
        step=32,
        unit="tokens",
        covers=True,
        help="Keys wait until so many are there; so many of the newest values stay plain.",
    )

    def check(self) -> None:
        super().check()
        if self.residual % self.group_size:
            raise ValueError(
                f"KIVI: residual={self.residual} is no multiple of group_size={self.group_size} (the buffer is written in whole groups)"
            )

    def covering(self, tokens: int) -> Self | None:
        return super().covering(-(-tokens // self.group_size) * self.group_size)  # the buffer is whole groups
