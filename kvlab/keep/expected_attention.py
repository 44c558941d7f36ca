"""ExpectedAttention: the tokens that queries still to come are likely to look at (arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.keep.base import Budgeted, Held, KeepState, budget, recent, sinks
from kvlab.rope import Rope
from kvlab.strategy import param


@dataclass(frozen=True)
class ExpectedAttention(Budgeted):
    """``budget`` tokens per layer and KV head: those with the largest attention to be expected from the next ``ahead`` positions, times their values' length.

    Queries, their turn by position undone, are taken as normally distributed, with the mean and covariance of those seen so far (the first four of a
    text apart). Turned to the positions to come, on average, a query's expected weight on a key has a closed form. The mean over the query heads that
    share a key counts. No attention weights are needed. Queries of drafts that were taken back stay in the mean.
    """

    title = "expected attention"
    paper = "ExpectedAttention, arXiv 2510.00636"

    budget: int = budget()
    recent: int = recent(0)
    sinks: int = sinks()
    ahead: int = param(512, low=1, high=8192, step=64, unit="tokens", help="How many positions to come are averaged over.")
    covariance: bool = param(True, help="Queries vary around their mean; otherwise each is its mean.")
    lengths: bool = param(
        True, title="values' lengths", help="A weight on a short value says little: multiply by the value's length."
    )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"queries", "keys", "rope", "evict"})

    def state(self, heads: int, kv_heads: int, batch: int, dim: int, rope: Rope | None, layer: int) -> KeepState:
        return Moments(rope)

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        return {"evidence": 4.0 * batch * (1 + heads * dim * (1 + dim))}

    def worth(self, held: Held) -> Tensor:
        assert held.keys is not None and held.values is not None
        keys = held.keys()
        b, h, n, d = keys.shape
        mean, spread = held.state.ahead(held.seen, self.ahead)  # [B, Hq, D], [B, Hq, D, D]
        shared = keys.repeat_interleave(mean.shape[1] // h, 1)
        scores = (shared * mean.unsqueeze(2)).sum(-1) / d**0.5
        if self.covariance:
            scores += ((shared @ spread) * shared).sum(-1) / (2 * d)
        scores = scores.masked_fill(held.positions.expand(b, h, n).repeat_interleave(mean.shape[1] // h, 1) < 0, float("-inf"))
        weights = scores.softmax(-1).nan_to_num_(0.0).view(b, h, -1, n).mean(2)
        return weights * held.values().norm(dim=-1) if self.lengths else weights


class Moments(KeepState):
    """Mean and covariance of one layer's queries before their turn."""

    SKIP = 4  # the first queries of a text are unlike all others

    def __init__(self, rope: Rope | None) -> None:
        self.rope = rope
        self.count, self.sum, self.outer = (Buffer("evidence") for _ in range(3))

    def meet(self, query: Tensor, columns: Tensor, places: Tensor) -> None:
        b, h, _, d = query.shape
        if not len(self.count):
            for buffer, shape in ((self.count, (b, 1, 1, 1)), (self.sum, (b, h, 1, d)), (self.outer, (b, h, d, d))):
                buffer.set(torch.zeros(shape, device=query.device))
        x = query.float() if self.rope is None else self.rope.turn(query, columns, back=True)
        weight = (places >= self.SKIP).float()[:, None, :, None]
        x = x * weight
        self.count.set(self.count.view() + weight.sum(2, keepdim=True))
        self.sum.set(self.sum.view() + x.sum(2, keepdim=True))
        self.outer.set(self.outer.view() + x.mT @ x)

    def ahead(self, seen: int, positions: int) -> tuple[Tensor, Tensor]:
        """Mean ``[B, Hq, D]`` and covariance ``[B, Hq, D, D]`` of queries at the ``positions`` places after ``seen``, turned there on average."""
        count = self.count.view().clamp(min=1)
        mean = self.sum.view() / count
        spread = self.outer.view() / count - mean.mT @ mean
        if self.rope is not None:
            turn = self.rope.average(seen, seen + positions, mean.shape[-1], mean.device)
            mean, spread = mean @ turn.mT, turn @ spread @ turn.mT
        return mean.squeeze(2), spread

    def buffers(self) -> list[Buffer]:
        return [self.count, self.sum, self.outer]
