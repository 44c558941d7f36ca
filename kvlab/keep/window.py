"""Window: the newest tokens and the first few, the attention sinks (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import Held, Keep
from kvlab.strategy import param


@dataclass(frozen=True)
class Window(Keep):
    """The newest ``size`` tokens, and the first ``sinks`` real ones. Every token keeps its true position."""

    title = "window + sinks"
    paper = "StreamingLLM, arXiv 2309.17453"
    needs = frozenset({"evict"})

    size: int = param(
        256, low=1, high=8192, step=16, unit="tokens", covers=True, title="window", help="How many of the newest tokens stay."
    )
    sinks: int = param(
        4, low=0, high=64, step=1, unit="tokens", help="How many of the first tokens stay. Without them a window falls apart."
    )

    def limit(self, layer: int = 0, layers: int = 1) -> int:
        return self.size + self.sinks

    @property
    def protected(self) -> int:
        return self.size + self.sinks

    def priority(self, held: Held) -> Tensor:
        return held.protect(held.columns.float(), self.sinks, self.size)
