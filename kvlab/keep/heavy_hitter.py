"""HeavyHitter: the tokens that attention has favoured so far (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Held, Keep
from kvlab.strategy import param


@dataclass(frozen=True)
class HeavyHitter(Keep):
    """``budget`` tokens per layer and KV head: the first ``sinks``, the newest ``recent``, and those with the largest attention mass.

    The mass of a key is the softmax weight it received, summed over all queries so far and over the query heads that share it.
    A budget that covers the sequence keeps everything.
    """

    title = "heavy hitters"
    paper = "H2O, arXiv 2306.14048"
    needs = frozenset({"mass", "evict"})

    budget: int = param(
        256, low=1, high=8192, step=16, unit="tokens", covers=True, help="Tokens a head may hold, the protected ones included."
    )
    recent: int = param(64, low=0, high=8192, step=16, unit="tokens", help="How many of the newest tokens are always kept.")
    sinks: int = param(4, low=0, high=64, step=1, unit="tokens", help="How many of the first tokens are always kept.")

    def check(self) -> None:
        if self.budget < self.recent + self.sinks:
            raise ValueError(
                f"HeavyHitter: budget={self.budget} is below recent + sinks = {self.recent + self.sinks} (allowed: {self.recent + self.sinks} or more)"
            )

    def limit(self) -> int:
        return self.budget

    def priority(self, held: Held) -> Tensor:
        assert held.mass is not None
        return held.protect(held.mass, self.sinks, self.recent)
