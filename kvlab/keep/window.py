"""Window: the newest tokens and the first few, the attention sinks (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvlab.keep.base import LONGEST, Held, Keep, Room
from kvlab.strategy import param


@dataclass(frozen=True)
class Window(Keep):
    """The newest ``size`` tokens, and the first ``sinks`` real ones.

    ``positions``: "true" leaves every token where it stood in the text, so the sinks fall further and further behind. "cache" reads the sinks as if they
    stood right before the window (StreamingLLM): then nothing is ever further away than ``size + sinks``, and a text may be longer than the model's
    context. It is the queries that are turned back by the gap when they meet a sink, which comes to the same: keys stay as they were written, in any store.
    """

    title = "window + sinks"
    paper = "StreamingLLM, arXiv 2309.17453"

    size: int = param(
        256,
        low=1,
        high=LONGEST,
        step=16,
        unit="tokens",
        covers=True,
        title="window",
        help="How many of the newest tokens stay.",
    )
    sinks: int = param(
        4, low=0, high=64, step=1, unit="tokens", help="How many of the first tokens stay. Without them a window falls apart."
    )

    positions: str = param(
        "true",
        choices=("true", "cache"),
        help="Where a sink is seen: at its place in the text, or right before the window (then a text may go on for ever).",
    )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"evict", "rope"} if self.shifted else {"evict"})

    @property
    def endless(self) -> bool:
        return self.positions == "cache" or not self.sinks

    @property
    def shifted(self) -> int:
        return self.sinks if self.positions == "cache" else 0

    def limit(self, room: Room) -> int:
        return self.size + self.sinks

    @property
    def protected(self) -> int:
        return self.size + self.sinks

    def priority(self, held: Held) -> Tensor:
        return held.protect(held.columns.float(), self.sinks, self.size)
