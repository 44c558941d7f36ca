"""Random: any tokens, the control that shows what evidence is worth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks
from kvlab.strategy import param


@dataclass(frozen=True)
class Random(Budgeted):
    """``budget`` tokens by chance, the same for all heads and layers, decided once for each token: who wins a step wins all later ones against the same.

    Not a method, a control: whatever does not beat it has learned nothing about the tokens.
    """

    title = "by chance"
    needs = frozenset({"evict"})
    differs = "never"

    budget: int = budget()
    recent: int = recent(0)
    sinks: int = sinks(0)
    seed: int = param(0, low=0, high=65535, step=1, help="Another number, other tokens.")

    def worth(self, held: Held) -> Tensor:
        return chance(held.columns, self.seed)


def chance(columns: Tensor, seed: int) -> Tensor:
    """A number from 0 to 1 for each token, float32: a hash of its column (Knuth's and Wang's constants), without state and the same on every device."""
    x = (columns + 1) * 2654435761 + seed * 40503 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 73244475 & 0xFFFFFFFF
    return ((x ^ x >> 16) & 0xFFFFFF).float() / 0x1000000
