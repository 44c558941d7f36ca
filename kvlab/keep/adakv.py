"""AdaKV: heads of a layer share one budget, and take of it what their evidence asks for (arXiv 2407.11550)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.keep.base import PROTECTED, Budgeted, Held, Keep, Room
from kvlab.keep.snapkv import SnapKV
from kvlab.strategy import param


@dataclass(frozen=True)
class AdaKV(Keep):
    """``inner``'s evidence, and its budget on average: the KV heads of a layer hold together as many tokens as with ``inner``, the worthiest of all heads.

    Heads that look everywhere hold more, heads that look at few tokens hold less; each holds at least the share ``floor`` of the average, and what is
    protected. It frees memory only in a store where heads may hold different numbers of tokens (``store.Paged``).
    """

    title = "heads share a budget"
    paper = "AdaKV, arXiv 2407.11550"
    instead = "Use store.Paged()."
    ragged = True
    differs = "head"

    inner: Any = param(SnapKV(), title="evidence of", help="Whose evidence and budget; the budget is the heads' average.")
    floor: float = param(
        0.2, low=0.0, high=1.0, step=0.05, help="The share of the average budget that every head has for itself."
    )

    def check(self) -> None:
        if not isinstance(self.inner, Budgeted) or not {"attention", "queries"} & self.inner.needs:
            raise ValueError(
                f"AdaKV: inner={type(self.inner).__name__} has no evidence that heads can be compared by (allowed: methods that go by attention)"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs) | {"ragged"}

    @property
    def carries(self) -> bool:  # type: ignore[override]
        return bool(self.inner.carries)

    @property
    def slack(self) -> int:
        return int(self.inner.slack)

    @property
    def protected(self) -> int:
        return int(self.inner.protected)

    def state(self, *shape: Any) -> Any:
        return self.inner.state(*shape)

    def limit(self, room: Room) -> int:
        return int(self.inner.limit(room))

    def observe(self, weights: Tensor, after: int) -> Tensor:
        return self.inner.observe(weights, after)  # type: ignore[no-any-return]

    def priority(self, held: Held) -> Tensor:
        worth = self.inner.priority(held).masked_fill(held.positions < 0, -PROTECTED)
        least = min(int(self.floor * (held.limit or 0)), worth.shape[2])
        if least:
            best = worth.sort(dim=2, stable=True).indices[..., -least:]
            worth = torch.where(torch.zeros_like(worth, dtype=torch.bool).scatter_(2, best, True), PROTECTED, worth)
        return worth
