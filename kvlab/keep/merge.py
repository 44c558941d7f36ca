"""Merge: what is evicted is folded into what stays, instead of being dropped (CaM; D2O, arXiv 2406.13035; KVMerger, arXiv 2407.08454)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.keep.base import Around, Held
from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.keep.random import chance
from kvlab.strategy import param


@dataclass(frozen=True)
class Merge(Around):
    """``inner`` says who stays; ``how`` says what becomes of the others.

    - "cam" (CaM, ICML 2024): the value of a token that goes is shared out among the ``spread`` kept ones after it, with a probability that is the
      attention it gets over theirs on average, at most 1, so that what it would have said is still said, on average. Attention is a token's evidence
      over its age: older tokens have had more time to collect. Keys do not change. It needs evidence of attention.
    - "d2o" (D2O): key and value are added to those of the kept token whose key is most alike, if their cosine is at least ``threshold``; the more
      alike, the larger their share (softmax of the cosines, the kept token counting itself with 1).
    - "clusters" (KVMerger): a token joins the nearest kept one along the text if their keys' cosine is at least ``threshold``; a cluster's key and
      value are means weighted by a Gaussian of the distance to the kept key, as wide as the mean distance.

    A token that stands for c others is scored with log(c) more, as c equal tokens would be: "d2o" and "clusters" count. Tokens written down as codes
    cannot change: then merging reaches only those that are still plain.
    """

    title = "evicted tokens are merged"
    paper = "D2O, arXiv 2406.13035"
    instead = "Use store.Dense(), or store.Int(residual=...) so that tokens stay plain for a while."
    merges = True

    inner: Any = param(HeavyHitter(), title="who stays", help="Whose evidence and budget.")
    how: str = param("d2o", choices=("d2o", "clusters", "cam"), help="Into which tokens, and with what weight.")
    threshold: float = param(0.6, low=-1.0, high=1.0, step=0.05, help="The least cosine of two keys that may be merged.")
    spread: int = param(
        32, low=1, high=512, step=1, unit="tokens", help="Among how many kept tokens a value is shared out (cam)."
    )
    weigh: bool = param(True, help="Count merged tokens by the log of their number in the scores; otherwise each weighs as one.")
    seed: int = param(0, low=0, high=65535, step=1, help="Chance for cam.")

    def check(self) -> None:
        self.evidence_of(lambda one: not self.inner.ragged, "evicts by no evidence, or heads hold different numbers of tokens")
        if self.how == "cam" and "attention" not in self.inner.needs:
            raise ValueError(
                f"Merge: how='cam' needs evidence of attention, which {type(self.inner).__name__} does not collect (allowed: HeavyHitter, TOVA, SnapKV, Scissorhands)"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inner.needs) | {"rewrite", "keys"}

    def beside(self, batch: int, kv_heads: int) -> float:
        counted = self.weigh and self.how != "cam"
        return super().beside(batch, kv_heads) + 4.0 * batch * kv_heads * counted

    def predict(self, rows: int, layer: int, batch: int, heads: int, kv_heads: int, dim: int) -> dict[str, float]:
        own = self.inner.predict(rows, layer, batch, heads, kv_heads, dim)
        counted = self.weigh and self.how != "cam"
        return own | ({"counts": 4.0 * batch * kv_heads * rows} if counted else {})

    def fold(self, held: Held, stay: Tensor, first: int, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert held.keys is not None and held.values is not None
        keys, values = held.keys(), held.values()
        b, h, n, _ = keys.shape
        goes = torch.ones((b, h, n), dtype=torch.bool, device=keys.device).scatter_(2, stay, False)
        lost = goes & (held.positions >= 0).expand(b, h, n)
        leave = goes.nonzero()[:, 2].view(b, h, -1)  # as many in every head
        real = lost.gather(2, leave)
        may = (stay >= first) & (held.positions.expand(b, h, n).gather(2, stay) >= 0)
        kept = tuple(_rows(x, stay) for x in (keys, values))
        gone = tuple(_rows(x, leave) for x in (keys, values))
        heavy = counts.gather(2, stay)
        if self.how == "cam":
            share = self._shares(held, stay, leave, real, may)
            return kept[0], kept[1] + share.mT @ gone[1], heavy
        likeness = F.normalize(gone[0], dim=-1) @ F.normalize(kept[0], dim=-1).mT  # [B, H, gone, stay]
        if self.how == "d2o":
            likeness = likeness.masked_fill(~may.unsqueeze(2), -2.0)
            best, to = likeness.max(-1)
        else:
            apart = (leave.unsqueeze(3) - stay.unsqueeze(2)).abs().double().masked_fill(~may.unsqueeze(2), float("inf"))
            to = apart.argmin(-1)
            best = likeness.gather(3, to.unsqueeze(3)).squeeze(3).masked_fill(~may.gather(2, to), -2.0)
        joins = real & (best >= self.threshold)
        heavier = counts.gather(2, leave)
        if self.how == "d2o":
            weight = (best - 1).exp()  # the kept token's own: exp(1 - 1)
        else:
            distance = (gone[0] - _rows(kept[0], to)).square().sum(-1)
            wide = (distance * joins).sum(-1, keepdim=True) / joins.sum(-1, keepdim=True).clamp(min=1)
            weight = (-distance / (2 * wide).clamp(min=1e-12)).exp()
        weight = weight * heavier * joins
        into = torch.zeros_like(likeness).scatter_(3, to.unsqueeze(3), weight.unsqueeze(3)).mT  # [B, H, stay, gone]
        total = heavy + into.sum(-1)
        out = [(x * heavy.unsqueeze(3) + into @ y) / total.unsqueeze(3) for x, y in zip(kept, gone, strict=True)]
        if self.weigh:
            heavy = heavy + torch.zeros_like(heavy).scatter_add_(2, to, heavier * joins)
        return out[0], out[1], heavy

    def _shares(self, held: Held, stay: Tensor, leave: Tensor, real: Tensor, may: Tensor) -> Tensor:
        """What share of each leaving value goes to each kept one, float32 ``[B, H, gone, stay]``."""
        assert held.evidence is not None
        after = (stay.unsqueeze(2) > leave.unsqueeze(3)) & may.unsqueeze(2)
        near = after & (after.cumsum(-1) <= self.spread)
        number = near.sum(-1).clamp(min=1)
        rate = held.evidence / (held.seen - held.columns).clamp(min=1)
        worth = rate.gather(2, leave)
        theirs = (near * rate.gather(2, stay).unsqueeze(2)).sum(-1) / number
        b, h = leave.shape[:2]
        drawn = chance(held.columns.expand(b, h, -1).gather(2, leave), self.seed)
        takes = real & (drawn < worth / theirs.clamp(min=1e-12))
        return near * (takes / number).unsqueeze(3)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
