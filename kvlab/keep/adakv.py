"""AdaKV: heads of a layer share one budget, and take of it what their evidence asks for (arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.keep.base import PROTECTED, Around, Held
from kvlab.keep.snapkv import SnapKV
from kvlab.strategy import param


@dataclass(frozen=True)
class AdaKV(Around):
    """``inner``'s evidence, and its budget on average: the KV heads of a layer hold together as many tokens as with ``inner``, the worthiest of all heads.

    Heads that look everywhere hold more, heads that look at few tokens hold less; each holds at least the share ``floor`` of the average, and what is
    protected. It frees memory only in a store where heads may hold different numbers of tokens (``store.Paged``).
    """

    title = "heads share a budget"
    paper = "AdaKV, arXiv 2407.11550"
    instead = "Use store.Paged()."
    ragged = True  # type: ignore[assignment]
    differs = "head"  # type: ignore[assignment]

    inner: Any = param(SnapKV(), title="evidence of", help="Whose evidence and budget; the budget is the heads' average.")
    floor: float = param(
        0.2, low=0.0, high=1.0, step=0.05, help="The share of the average budget that every head has for itself."
    )

    def check(self) -> None:
        self.evidence_of(
            lambda one: bool({"attention", "queries"} & one.needs),
            "has no evidence that heads can be compared by",
            "methods that go by attention",
        )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs) | {"ragged"}

    def priority(self, held: Held) -> Tensor:
        worth = self.inner.priority(held).masked_fill(held.positions < 0, -PROTECTED)
        least = min(int(self.floor * (held.limit or 0)), worth.shape[2])
        if least:
            best = worth.sort(dim=2, stable=True).indices[..., -least:]
            worth = torch.where(torch.zeros_like(worth, dtype=torch.bool).scatter_(2, best, True), PROTECTED, worth)
        return worth
