"""KeyNorm: the tokens whose keys are short (A Simple and Effective L2 Norm-Based Strategy, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks


@dataclass(frozen=True)
class KeyNorm(Budgeted):
    """``budget`` tokens per layer and KV head: those with the shortest keys, which attention tends to favour. No attention needs to be looked at."""

    title = "key norm"
    paper = "arXiv 2406.11430"
    needs = frozenset({"keys", "evict"})

    budget: int = budget()
    recent: int = recent()
    sinks: int = sinks(0)

    def worth(self, held: Held) -> Tensor:
        assert held.keys is not None
        return -held.keys().norm(dim=-1)
