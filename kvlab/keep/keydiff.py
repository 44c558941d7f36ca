"""KeyDiff: the tokens whose keys point elsewhere than most (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks


@dataclass(frozen=True)
class KeyDiff(Budgeted):
    """``budget`` tokens per layer and KV head: those whose keys are least like the mean direction of all keys that are held.

    Likeness is the cosine to the mean of the keys, each taken at length 1. No attention needs to be looked at.
    """

    title = "KeyDiff"
    paper = "KeyDiff, arXiv 2504.15364"
    needs = frozenset({"keys", "evict"})

    budget: int = budget()
    recent: int = recent()
    sinks: int = sinks(0)

    def worth(self, held: Held) -> Tensor:
        assert held.keys is not None
        keys = F.normalize(held.keys(), dim=-1)
        real = (held.positions >= 0)[..., None]
        mean = F.normalize((keys * real).sum(2, keepdim=True), dim=-1)
        return -(keys * mean).sum(-1)
