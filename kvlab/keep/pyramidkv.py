"""PyramidKV: more tokens for the lower layers, fewer for the higher ones (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlab.keep.base import Budgeted, Held, Keep, Room
from kvlab.keep.snapkv import SnapKV
from kvlab.strategy import param


@dataclass(frozen=True)
class PyramidKV(Keep):
    """``inner``'s evidence and its budget on average, but falling linearly from the first layer to the last.

    With a budget of B tokens beside the protected ones, the last layer holds B / ``beta`` of them and the first 2 B - B / ``beta``.
    """

    title = "PyramidKV"
    paper = "PyramidKV, arXiv 2406.02069"

    inner: Any = param(SnapKV(), title="evidence of", help="Whose evidence and budget; the budget is the layers' average.")
    beta: int = param(
        20, low=1, high=100, step=1, help="The last layer holds one in so many of the average budget. 1: all layers alike."
    )

    def check(self) -> None:
        if not isinstance(self.inner, Budgeted):
            raise ValueError(
                f"PyramidKV: inner={type(self.inner).__name__} has no budget to spread (allowed: methods with a budget)"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs)

    @property
    def carries(self) -> bool:  # type: ignore[override]
        return bool(self.inner.carries)

    @property
    def differs(self) -> str:  # type: ignore[override]
        return str(self.inner.differs)

    @property
    def slack(self) -> int:
        return int(self.inner.slack)

    @property
    def protected(self) -> int:
        return int(self.inner.protected)

    def limit(self, room: Room) -> int:
        mean, always = self.inner.limit(room), self.protected + self.slack
        if room.layers == 1:
            return int(mean)
        free = mean - always
        last = free / self.beta
        return always + round(free + (free - last) * (1 - 2 * room.layer / (room.layers - 1)))

    def observe(self, weights: Tensor, after: int) -> Tensor:
        return self.inner.observe(weights, after)  # type: ignore[no-any-return]

    def priority(self, held: Held) -> Tensor:
        return self.inner.priority(held)  # type: ignore[no-any-return]
