"""SnapKV: the tokens that the end of the prompt looks at, with their neighbours (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks
from kvlab.strategy import param


@dataclass(frozen=True)
class SnapKV(Budgeted):
    """``budget`` tokens per layer and KV head: the newest ``recent`` (the observation window), and those that its queries weigh most.

    A step's last ``recent`` queries observe; their weights, summed over them and over the query heads that share a key, are smoothed by the largest
    among ``pool`` neighbours, so that tokens stay in runs. The paper compresses once, at the end of the prompt, and then lets the cache grow; here the
    budget holds on: each new token observes, too. The question is blind where the text is read first and the question later (``chunk``, two turns), and
    aware where both come in one piece, which flatters the method.
    """

    title = "SnapKV"
    paper = "SnapKV, arXiv 2404.14469"

    budget: int = budget()
    recent: int = recent(32)
    sinks: int = sinks(0)
    pool: int = param(
        7, low=1, high=63, step=2, unit="tokens", help="Neighbours, itself included, of which the largest weight counts."
    )

    def check(self) -> None:
        super().check()
        if self.pool % 2 == 0:
            raise ValueError(f"SnapKV: pool={self.pool} is even (allowed: odd numbers, as many neighbours on either side)")
        if self.recent < 1:
            raise ValueError(f"SnapKV: recent={self.recent} observes nothing (allowed: 1 or more)")

    def observe(self, weights: Tensor, after: int) -> Tensor:
        watching = max(0, min(weights.shape[3], self.recent - after))
        return weights[..., weights.shape[3] - watching :, :].sum((2, 3))

    def counted(self, queries: int) -> int | None:
        return max(0, queries - self.recent) if type(self).observe is SnapKV.observe else None

    def worth(self, held: Held) -> Tensor:
        return F.max_pool1d(super().worth(held), self.pool, 1, self.pool // 2)
