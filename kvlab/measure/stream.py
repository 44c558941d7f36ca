"""Endless streaming: a text far longer than the model's context, read through one cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.cache import KVCache, forward
from kvlab.lab import Lab, Progress
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Stream:
    """``loss``: nats of each token after the first, float32 ``[n - 1]``. ``points``: (tokens read, bytes allocated), after every few steps."""

    strategy: Strategy
    loss: Tensor
    points: tuple[tuple[int, int], ...]

    def smooth(self, window: int = 256) -> Tensor:
        """Mean loss of each ``window`` tokens in turn, float32 ``[(n - 1) // window]``. Raises ``ValueError`` for a window of 0 or longer than the text."""
        if not 1 <= window <= len(self.loss):
            raise ValueError(f"window={window} is out of range (allowed: 1 to {len(self.loss)})")
        whole = len(self.loss) // window * window
        return self.loss[:whole].view(-1, window).mean(1)


def stream(
    lab: Lab, strategy: Strategy, ids: Tensor, *, step: int = 64, every: int = 8, progress: Progress | None = None
) -> Stream:
    """Read ``ids`` ``[1, n]`` from the first token on, ``step`` at a time, and score each token by what came before. The text may be of any length:
    where a model's context ends, this goes on, which is what is to be seen.

    Raises ``ValueError`` for fewer than 2 tokens, or a step below 1 or longer than the context.
    """
    n = ids.shape[1]
    if n < 2:
        raise ValueError(f"the text has {n} token(s) (allowed: 2 or more)")
    if every < 1:
        raise ValueError(f"every={every} is out of range (allowed: 1 or more steps)")
    if not isinstance(step, int) or not 1 <= step <= lab.context:
        raise ValueError(f"step={step} is out of range (allowed: 1 to {lab.context} tokens)")
    cache = KVCache(lab.model, strategy)
    losses, points = [], []
    before = None
    for number, start in enumerate(range(0, n, step)):
        if progress:
            progress("streaming", start, n)
        piece = ids[:, start : start + step]
        logits = forward(lab.model, piece, cache)[0].float()
        rows = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        wanted = piece[0] if before is not None else piece[0, 1:]
        losses.append(F.cross_entropy(rows, wanted, reduction="none"))
        before = logits[-1:]
        if number % every == every - 1 or start + step >= n:
            points.append((cache.get_seq_length(), cache.memory().allocated))
    cache.close()
    return Stream(strategy, torch.cat(losses), tuple(points))
