"""HeavyHitter: the tokens that attention has favoured so far (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.keep.base import Budgeted, budget, recent, sinks
from kvlab.strategy import param


@dataclass(frozen=True)
class HeavyHitter(Budgeted):
    """``budget`` tokens per layer and KV head: the first ``sinks``, the newest ``recent``, and those with the largest attention mass.

    The mass of a key is the softmax weight it received, summed over all queries so far and over the query heads that share it.
    A budget that covers the sequence keeps everything.
    """

    title = "heavy hitters"
    paper = "H2O, arXiv 2306.14048"

    budget: int = budget()
    recent: int = recent()
    sinks: int = sinks()
    every: int = param(1, low=1, high=512, step=1, unit="tokens", help="Evict only every so many tokens, and then as many.")

    @property
    def slack(self) -> int:
        return self.every - 1
