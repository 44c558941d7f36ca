"""Quest: every token stays, but a query reads only the pages that may matter to it (arXiv 2406.10774)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.keep.base import Keep, KeepState
from kvlab.rope import Rope
from kvlab.strategy import param

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

    budget: int = param(
        256, low=16, high=8192, step=16, unit="tokens", covers=True, help="Tokens that a query reads, the newest page included."
    )
    page: int = param(16, low=4, high=256, step=4, unit="tokens", help="Tokens of a page.")
    dense: int = param(
        2, low=0, high=256, step=1, unit="layers", title="dense layers", help="How many of the first layers read everything."
    )

    def check(self) -> None:
        if self.budget < 2 * self.page:
            raise ValueError(f"Quest: budget={self.budget} is less than two pages (allowed: {2 * self.page} or more)")

    def state(self, heads: int, kv_heads: int, batch: int, dim: int, rope: Rope | None, layer: int) -> KeepState:
        return KeepState() if layer < self.dense else Pages(self.page, self.budget // self.page)

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        return {} if layer < self.dense else {"pages": 2.0 * 2 * batch * kv_heads * -(-rows // self.page) * dim}


class Pages(KeepState):
    """Least and largest number of each key channel, a page a row, in 16 bits."""

    def __init__(self, size: int, wanted: int) -> None:
        self.size, self.wanted = size, wanted
        self.least, self.largest = Buffer("pages"), Buffer("pages")

    def write(self, keys: Tensor, start: int) -> None:
        if keys.dtype == torch.float32:  # a bound need not be sharp to the last digit
            keys = keys.clamp(-HALF, HALF).half()
        inside = min(-start % self.size, keys.shape[2])  # these go into the page that is not full yet
        if inside:
            for buffer, of in ((self.least, torch.amin), (self.largest, torch.amax)):
                page = buffer.view()[:, :, -1:]
                page.copy_(of(torch.cat([page, keys[:, :, :inside]], 2), 2, keepdim=True))
                buffer.dirty = True
        rest = keys[:, :, inside:]
        whole = rest.shape[2] // self.size
        for buffer, of in ((self.least, torch.amin), (self.largest, torch.amax)):
            if whole:
                buffer.append(of(rest[:, :, : whole * self.size].unflatten(2, (whole, self.size)), 3))
            if rest.shape[2] > whole * self.size:
                buffer.append(of(rest[:, :, whole * self.size :], 2, keepdim=True))

    def bound(self, query: Tensor) -> Tensor:
        """The most that any key of each page can score with queries ``[B, H, G, q, D]`` -> float32 ``[B, H, G, q, pages]``."""
        query = query.float()
        least, largest = (buffer.view().float().unsqueeze(2).mT for buffer in (self.least, self.largest))
        return query.clamp(min=0) @ largest + query.clamp(max=0) @ least

    def look(self, query: Tensor, tokens: int) -> Tensor | None:
        pages = -(-tokens // self.size)
        if pages <= self.wanted:
            return None
        bound = self.bound(query).amax(2)
        bound[..., -1] = float("inf")
        best = bound.topk(self.wanted, -1).indices
        chosen = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, best, True)
        return chosen.repeat_interleave(self.size, -1)[..., :tokens]

    def truncate(self, rows: int) -> None:
        for buffer in self.buffers():  # the last page's bounds may be too wide now; they still hold
            buffer.truncate(-(-rows // self.size))

    def buffers(self) -> list[Buffer]:
        return [self.least, self.largest]
