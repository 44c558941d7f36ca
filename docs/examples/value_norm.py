"""ValueNorm: the tokens with the largest values, which add most to what attention mixes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks


@dataclass(frozen=True)
class ValueNorm(Budgeted):
    """``budget`` tokens per layer and KV head: those whose values are longest. No attention needs to be looked at."""

    title = "value norm"
    needs = frozenset({"keys", "evict"})

    budget: int = budget()
    recent: int = recent()
    sinks: int = sinks(4)

    def worth(self, held: Held) -> Tensor:
        assert held.values is not None
        return held.values().norm(dim=-1)
