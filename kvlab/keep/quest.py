"""Quest: every token stays, but a query reads only the pages that may matter to it (arXiv 2406.10774)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.keep.base import LONGEST, Keep, KeepState
from kvlab.rope import Rope
from kvlab.strategy import param


def _share(value: Any) -> bool:
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError("is no share of the pages (allowed: above 0.0 and up to 1.0)")
    return isinstance(value, float)


HALF = float(torch.finfo(torch.float16).max)


@dataclass(frozen=True)
class Quest(Keep):
    """Nothing is evicted, so nothing is lost for good: each query reads as many whole pages as ``budget`` has room for, the newest and the most promising.

    Of each page the least and the largest number of every key channel are kept. They bound what any of its keys can score: the sum over channels of
    the larger of query times least and query times largest. Of the query heads that share keys the highest bound counts. The first ``dense`` layers
    read everything, and so does a prompt while it is read in one piece.
    """

    title = "only the best pages are read"
    paper = "Quest, arXiv 2406.10774"
    looks = True

    budget: Any = param(
        256,
        low=16,
        high=LONGEST,
        step=16,
        unit="tokens",
        covers=True,
        help="Tokens that a query reads, the newest page included; or a share of the pages (0.25).",
        also=_share,
    )
    page: int = param(16, low=4, high=256, step=4, unit="tokens", help="Tokens of a page.")
    dense: int = param(
        2, low=0, high=256, step=1, unit="layers", title="dense layers", help="How many of the first layers read everything."
    )

    def check(self) -> None:
        if isinstance(self.budget, int) and self.budget < 2 * self.page:
            raise ValueError(f"Quest: budget={self.budget} is less than two pages (allowed: {2 * self.page} or more)")

    def state(self, heads: int, kv_heads: int, batch: int, dim: int, rope: Rope | None, layer: int) -> KeepState:
        return KeepState() if layer < self.dense else Pages(self.page, self.budget)

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        return {} if layer < self.dense else {"pages": 2.0 * 2 * batch * kv_heads * -(-rows // self.page) * dim}


class Pages(KeepState):
    """Least and largest number of each key channel, a page a row, in 16 bits."""

    def __init__(self, page: int, budget: int | float) -> None:
        self.page, self.budget = page, budget
        self.least, self.largest = Buffer("pages"), Buffer("pages")

    def write(self, keys: Tensor, start: int, real: Tensor | None) -> None:
        if keys.dtype == torch.float32:  # a bound need not be sharp to the last digit
            keys = keys.clamp(-HALF, HALF).half()
        inside = min(-start % self.page, keys.shape[2])  # these go into the page that is not full yet
        for buffer, of, never in ((self.least, torch.amin, HALF), (self.largest, torch.amax, -HALF)):
            mine = keys if real is None else keys.masked_fill(~real[..., None], never)  # padding says nothing of its page
            if inside:
                page = buffer.view()[:, :, -1:]
                page.copy_(of(torch.cat([page, mine[:, :, :inside]], 2), 2, keepdim=True))
                buffer.touch(len(buffer) - 1)
            rest = mine[:, :, inside:]
            whole = rest.shape[2] // self.page
            if whole:
                buffer.append(of(rest[:, :, : whole * self.page].unflatten(2, (whole, self.page)), 3))
            if rest.shape[2] > whole * self.page:
                buffer.append(of(rest[:, :, whole * self.page :], 2, keepdim=True))

    def bound(self, query: Tensor) -> Tensor:
        """The most that any key of each page can score with queries ``[B, H, G, q, D]`` -> float32 ``[B, H, G, q, pages]``."""
        query = query.float()
        least, largest = (buffer.view().float().unsqueeze(2).mT for buffer in (self.least, self.largest))
        return query.clamp(min=0) @ largest + query.clamp(max=0) @ least

    def wanted(self, tokens: int) -> int:
        """How many pages a query reads."""
        if isinstance(self.budget, float):
            return max(2, math.ceil(self.budget * -(-tokens // self.page) - 1e-9))
        return self.budget // self.page

    def chooses(self, tokens: int) -> bool:
        return -(-tokens // self.page) > self.wanted(tokens)

    def look(self, query: Tensor, tokens: int) -> Tensor | None:
        if not self.chooses(tokens):
            return None
        bound = self.bound(query).amax(2)
        bound[..., -1] = float("inf")
        best = bound.topk(self.wanted(tokens), -1).indices
        chosen = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, best, True)
        return chosen.repeat_interleave(self.page, -1)[..., :tokens]

    def truncate(self, rows: int) -> None:
        for buffer in self.buffers():  # the last page's bounds may be too wide now; they still hold
            buffer.truncate(-(-rows // self.page))

    def buffers(self) -> list[Buffer]:
        return [self.least, self.largest]
