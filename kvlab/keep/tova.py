"""TOVA: the tokens that the newest query looks at (Transformers are Multi-State RNNs, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Budgeted, Held, budget, recent, sinks


@dataclass(frozen=True)
class TOVA(Budgeted):
    """``budget`` tokens, one set for all heads of a layer: at every step the token goes that the newest query weighs least, on average over heads.

    The paper protects nothing, so ``recent`` and ``sinks`` are 0 unless set.
    """

    title = "TOVA"
    paper = "TOVA, arXiv 2401.06104"
    carries = False
    differs = "row"

    budget: int = budget()
    recent: int = recent(0)
    sinks: int = sinks(0)

    def observe(self, weights: Tensor, after: int) -> Tensor:
        last = weights[..., -1, :].mean(2)
        return last if not after else last.zero_()

    def worth(self, held: Held) -> Tensor:
        return super().worth(held).mean(1, keepdim=True)
