"""Scissorhands: the tokens that were important again and again (persistence of importance, arXiv 2305.17118)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Budgeted, budget, recent, sinks
from kvlab.strategy import param


@dataclass(frozen=True)
class Scissorhands(Budgeted):
    """``budget`` tokens per layer and KV head: the newest ``recent``, and those that most queries gave more than an equal share.

    A query counts for a key where its weight is above 1 / (keys it sees); counted are the last ``history`` queries of each step, over the query heads
    that share the key. How large a weight is beyond that does not matter: that is the difference to HeavyHitter.
    """

    title = "Scissorhands"
    paper = "Scissorhands, arXiv 2305.17118"

    budget: int = budget()
    recent: int = recent()
    sinks: int = sinks(0)
    history: int = param(400, low=1, high=8192, step=16, unit="queries", help="How many of a step's last queries count.")

    def observe(self, weights: Tensor, after: int) -> Tensor:
        counting = max(0, min(weights.shape[3], self.history - after))
        last = weights[..., weights.shape[3] - counting :, :]
        seen = (last > 0).sum(-1, keepdim=True).clamp(min=1)
        return (last * seen > 1).sum((2, 3)).float()
