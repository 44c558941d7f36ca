"""Quality with the cache in the loop: the text is read through the compressed cache, a few tokens at a time.

One forward pass over the whole text never reads a cache, and so cannot show what one breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from kvlab.cache import KVCache, forward
from kvlab.lab import Lab, Progress
from kvlab.memory import Memory
from kvlab.strategy import Strategy

REFERENCE = (1024, 1024, 16)  # tokens of prefill, tokens scored, tokens a step: the protocol of every recorded row


@dataclass(frozen=True)
class Control:
    """The full cache's run of a text: what others are compared with. ``logits`` float32 ``[scored, vocabulary]``."""

    ids: Tensor
    prefill: int
    step: int
    logits: Tensor
    loss: Tensor  # nats per scored token, float32 [scored]

    @property
    def perplexity(self) -> float:
        return float(self.loss.double().mean().exp())


@dataclass(frozen=True)
class Quality:
    """A strategy's run of the same text, token by token. ``loss``, ``kl`` in nats, ``agree`` bool, each ``[scored]``."""

    loss: Tensor
    full_loss: Tensor
    kl: Tensor
    agree: Tensor
    first: int  # the column of the first scored token
    memory: Memory

    @property
    def perplexity(self) -> float:
        return float(self.loss.double().mean().exp())

    @property
    def full_perplexity(self) -> float:
        return float(self.full_loss.double().mean().exp())

    @property
    def perplexity_change(self) -> float:
        """Relative: 0.01 is 1% worse than the full cache."""
        return self.perplexity / self.full_perplexity - 1

    @property
    def mean_kl(self) -> float:
        """Mean KL divergence of the strategy's next-token distribution from the full cache's, nats."""
        return float(self.kl.double().mean())

    @property
    def agreement(self) -> float:
        """Share of tokens where both would say the same next token."""
        return float(self.agree.double().mean())


def control(
    lab: Lab, ids: Tensor, *, prefill: int = REFERENCE[0], step: int = REFERENCE[2], progress: Progress | None = None
) -> Control:
    """Read ``ids`` ``[1, n]`` through the full cache: ``prefill`` tokens at once, the rest ``step`` at a time.

    Raises ``ValueError`` unless ``1 <= prefill < n`` and ``step >= 1``.
    """
    logits = read(lab, ids, KVCache(lab.model), prefill, step, progress=progress, stage="reading with the full cache")
    return Control(ids, prefill, step, logits, _loss(logits, ids, prefill))


def quality(lab: Lab, strategy: Strategy, against: Control, *, progress: Progress | None = None) -> Quality:
    """Read the control's text again through ``strategy``, in the same steps, and compare token by token."""
    cache = KVCache(lab.model, strategy)
    logits = read(lab, against.ids, cache, against.prefill, against.step, chunk=strategy.chunk, progress=progress)
    return Quality(*compared(logits, against), against.prefill, cache.memory())


def compared(logits: Tensor, against: Control) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, the control's loss, KL divergence (nats) and agreement (bool) of ``logits`` ``[scored, vocabulary]``, each ``[scored]``."""
    kl, agree = [], []
    for start in range(0, len(logits), 128):  # in pieces: a vocabulary is wide
        full, own = against.logits[start : start + 128].float(), logits[start : start + 128].float()
        kl.append(F.kl_div(own.log_softmax(-1), full.log_softmax(-1), reduction="none", log_target=True).sum(-1))
        agree.append(full.argmax(-1) == own.argmax(-1))
    loss = _loss(logits, against.ids, against.prefill)
    return loss, against.loss, torch.cat(kl).clamp(min=0), torch.cat(agree)


def read(
    lab: Lab,
    ids: Tensor,
    cache: Cache,
    prefill: int,
    step: int,
    *,
    chunk: int = 0,
    progress: Progress | None = None,
    stage: str = "scoring",
    last: bool = False,
) -> Tensor:
    """Read ``ids`` ``[1, n]`` through any cache, ``prefill`` tokens and then ``step`` at a time -> the logits that predict the tokens from ``prefill`` on;
    ``last``: those after each step only, which takes less time.

    Raises ``ValueError`` unless ``1 <= prefill < n``, ``step >= 1`` and the model has room for ``n`` tokens.
    """
    n = ids.shape[1]
    if not 1 <= prefill < n:
        raise ValueError(f"prefill={prefill} is out of range (allowed: 1 to {n - 1}, one less than the text's tokens)")
    if step < 1:
        raise ValueError(f"step={step} is out of range (allowed: 1 or more tokens)")
    endless = isinstance(cache, KVCache) and cache.strategy.keep.endless and max(chunk or prefill, step) <= lab.context
    if n > lab.context and not endless:
        raise ValueError(f"the text has {n} tokens, more than the model's context (allowed: up to {lab.context} tokens)")
    rows = [lab.prefill(ids[:, :prefill], cache, chunk, progress)[0, -1:].float()]
    for start in range(prefill, n, step):
        if progress:
            progress(stage, start, n)
        rows.append(forward(lab.model, ids[:, start : start + step], cache, last=last)[0].float())
    # the last token is read, so that bytes are those of the whole text, but it predicts nothing that could be scored
    return torch.cat(rows)[:-1].clone()


def _loss(logits: Tensor, ids: Tensor, prefill: int) -> Tensor:
    loss = F.cross_entropy(logits.float(), ids[0, prefill:], reduction="none")
    if not bool(loss.isfinite().all()):
        bad = prefill + int((~loss.isfinite()).nonzero()[0])
        raise ValueError(
            f"the model's output is not finite where token {bad} is predicted: try bfloat16 or float32, or check the weights"
        )
    return loss
