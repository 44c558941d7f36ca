"""PyramidKV: more tokens for the lower layers, fewer for the higher ones (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.keep.base import Around, Room
from kvlab.keep.snapkv import SnapKV
from kvlab.strategy import param


@dataclass(frozen=True)
class PyramidKV(Around):
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
        self.evidence_of(why="has no budget to spread")

    def limit(self, room: Room) -> int:
        mean, always = self.inner.limit(room), self.protected + self.slack
        if room.layers == 1:
            return int(mean)
        free = mean - always
        last = free / self.beta
        return always + round(free + (free - last) * (1 - 2 * room.layer / (room.layers - 1)))
