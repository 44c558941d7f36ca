"""What became of every token of a text: when each head let it go, on what evidence, and how much attention that cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.lab import Lab, Progress
from kvlab.layer import Layer
from kvlab.measure.quality import read
from kvlab.strategy import Strategy

SINKS = 4
STAGE = "reading with the strategy"
PAUSE = 1.0  # seconds between two parts of a river that is being read


@dataclass(frozen=True)
class River:
    """One text of ``n`` tokens read through a strategy, and once more through the full cache. L layers, H KV heads.

    ``gone``: how many tokens had been read when a token left a head; 0: it never did. int32 ``[L, H, n]``.
    ``worth``, ``floor``: what it was worth then, and the least an unprotected token that stayed was worth, by the method's own measure; NaN where it
    never left. float32 ``[L, H, n]``.
    ``lost``: of each query, the share of the full cache's attention that lies on tokens this strategy no longer had. float32 ``[L, H, n]``, a
    mean over the query heads that share a KV head.
    ``sinks``: the share of all attention of the full cache that the first four tokens get, float32 ``[L, H]``.
    ``prefill``, ``step``: how the text was read.
    """

    strategy: Strategy
    words: tuple[str, ...]
    prefill: int
    step: int
    gone: Tensor
    worth: Tensor
    floor: Tensor
    lost: Tensor
    sinks: Tensor

    @property
    def tokens(self) -> int:
        return len(self.words)

    @property
    def heads(self) -> int:
        """Layers times KV heads."""
        return self.gone.shape[0] * self.gone.shape[1]

    @property
    def times(self) -> Tensor:
        """How many tokens had been read after each step, int64 ``[steps]``."""
        return torch.tensor(
            [self.prefill, *range(min(self.prefill + self.step, self.tokens), self.tokens, self.step), self.tokens]
        ).unique()

    def held(self, time: int) -> Tensor:
        """By which heads each token is held once ``time`` tokens were read: bool ``[L, H, n]``, False for those that come later."""
        return ((self.gone == 0) | (self.gone > time)) & (torch.arange(self.tokens) < time)

    def survival(self) -> Tensor:
        """The share of all tokens that each head holds in the end, float32 ``[L, H]``."""
        return self.held(self.tokens).float().mean(2)

    def reach(self) -> Tensor:
        """How far back each head still sees in the end: the mean age of what it holds, in tokens, float32 ``[L, H]``."""
        held = self.held(self.tokens).float()
        ages = self.tokens - 1 - torch.arange(self.tokens, dtype=torch.float32)
        return (held * ages).sum(2) / held.sum(2).clamp(min=1)

    def overlap(self) -> Tensor:
        """How alike the choices of two layers are: tokens held by both over tokens held by either, mean over heads of one number. float32 ``[L, L]``."""
        held = self.held(self.tokens).float()
        both = torch.einsum("ahn,bhn->abh", held, held)
        count = held.sum(2)
        either = count[:, None] + count[None] - both
        return (both / either.clamp(min=1)).mean(2)

    def lost_by_time(self) -> Tensor:
        """Mean of ``lost`` over layers and heads, for each query: float32 ``[n]``."""
        return self.lost.mean((0, 1))

    def left(self, token: int) -> list[tuple[int, int, int, float, float]]:
        """Every head that let ``token`` go, earliest first: layer, head, tokens read then, its worth, the least worth of those that stayed.

        Raises ``ValueError`` for a token that is not in the text.
        """
        if not 0 <= token < self.tokens:
            raise ValueError(f"token={token} is out of range (allowed: 0 to {self.tokens - 1})")
        found = [
            (
                layer,
                head,
                int(self.gone[layer, head, token]),
                float(self.worth[layer, head, token]),
                float(self.floor[layer, head, token]),
            )
            for layer, head in self.gone[:, :, token].nonzero().tolist()
        ]
        return sorted(found, key=lambda one: (one[2], one[0], one[1]))


@dataclass(frozen=True)
class _Seen:
    """What some queries of one layer gave the keys: ``own`` ``[H, q, n]``, mean over the query heads of a KV head; ``columns`` ``[n]`` and ``at`` ``[q]``: which."""

    own: Tensor
    columns: Tensor
    at: Tensor


class _Watch:
    """Hands on the full cache's attention, of one layer."""

    def __init__(self, layer: int, then: Callable[[_Seen], None]) -> None:
        self.layer, self._then = layer, then

    def take(self, layer: Layer, weights: Tensor, q_len: int, first: int, last: int) -> None:
        own = weights[0].mean(1).float().cpu()
        start, new = layer.seen - q_len, own.shape[2] - len(layer.store)
        columns = layer.columns_with(torch.arange(start, start + new))[0, 0].cpu()  # a layer's own window may have dropped some
        self._then(_Seen(own, columns, start + torch.arange(first, last)))


class _Lost:
    """Sums the full cache's attention on tokens that were gone, of one layer."""

    def __init__(self, gone: Tensor) -> None:
        self.gone = gone
        self.lost, self.reads = torch.zeros(gone.shape), torch.zeros(gone.shape[1])
        self.sinks = torch.zeros(gone.shape[0])

    def add(self, seen: _Seen) -> None:
        own, columns, at = seen.own, seen.columns, seen.at
        gone = self.gone[:, None, columns]
        away = (gone > 0) & (gone <= at[None, :, None])
        self.lost[:, at] += (own * away).sum(2)
        self.reads[at] += 1  # more than one where layers share keys and values
        self.sinks += (own * (columns < SINKS)).sum((1, 2))

    def shares(self) -> tuple[Tensor, Tensor]:
        """Of each query what was lost ``[H, n]``, and of all of them what the sinks got ``[H]``."""
        return self.lost / self.reads.clamp(min=1), self.sinks / self.reads.sum().clamp(min=1)


@dataclass(frozen=True)
class Attended:
    """All of the full cache's attention on a text, so that many rivers on it need only one: by layer. It takes ``L H n²`` numbers of 4 bytes."""

    ids: Tensor
    prefill: int
    step: int
    layers: dict[int, list[_Seen]]


def attended(lab: Lab, ids: Tensor, *, prefill: int, step: int = 16, progress: Progress | None = None) -> Attended:
    """Read ``ids`` ``[1, n]`` through the full cache, and keep its attention. Raises ``ValueError`` as :func:`river`."""
    full = KVCache(lab.model)
    layers: dict[int, list[_Seen]] = {layer.number: [] for layer in full.layers}
    for number, seen in layers.items():
        full.watch(_Watch(number, seen.append))  # type: ignore[arg-type]
    read(lab, ids, full, prefill, step, progress=progress, stage="reading with the full cache", last=True)
    return Attended(ids, prefill, step, layers)


def river(
    lab: Lab,
    strategy: Strategy,
    ids: Tensor,
    *,
    prefill: int | None = None,
    step: int = 16,
    progress: Progress | None = None,
    full: Attended | None = None,
    part: Callable[[River], None] | None = None,
) -> River:
    """Read ``ids`` ``[1, n]`` through ``strategy`` with its history recorded, ``prefill`` tokens (half unless given) and then ``step`` at a time; then
    through the full cache, to see how much of its attention falls on what was gone.

    ``full``: what the full cache attended to, where that is known; then ``part`` is given the river of what has been read so far, about once a second.

    Raises ``ValueError`` unless the text has 2 tokens or more and ``1 <= prefill < n``, or if ``full`` is of another text or other steps.
    """
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids have the shape {tuple(ids.shape)} (allowed: [1, n])")
    n = ids.shape[1]
    if n < 2:
        raise ValueError(f"the text has {n} token(s) (allowed: 2 or more)")
    prefill = n // 2 if prefill is None else prefill
    if full is not None and not (torch.equal(full.ids, ids) and (full.prefill, full.step) == (prefill, step)):
        raise ValueError(
            f"full is of {full.ids.shape[1]} tokens, prefill={full.prefill}, step={full.step} (allowed: the same text, {prefill} and {step})"
        )
    words = tuple(lab.tokenizer.decode([token]) for token in ids[0].tolist())
    cache = KVCache(lab.model, strategy)
    history = cache.history()
    shown = time.monotonic()

    def made(tokens: int, seen: Callable[[dict[int, _Lost]], None]) -> River:
        """Of the first ``tokens``; ``seen`` adds what the full cache attended to, for each layer."""
        there = [layer for layer in cache.layers if layer.is_initialized]
        heads = {layer.shape.kv_heads for layer in there}
        if len(heads) != 1:
            raise ValueError(
                f"the layers of {lab.name} have different numbers of KV heads ({sorted(heads)}); this view needs one number"
            )
        (count,) = heads
        gone, worth, floor = (
            torch.stack([table(layer.number, tokens, count) for layer in there])
            for table in (history.gone, history.worth, history.floor)
        )
        sums = {layer.number: _Lost(own) for layer, own in zip(there, gone, strict=True)}
        seen(sums)
        shares = [sum_.shares() for sum_ in sums.values()]
        lost, sinks = (torch.stack(side) for side in zip(*shares, strict=True))
        return River(strategy, words[:tokens], prefill, step, gone, worth, floor, lost, sinks)

    def known(sums: dict[int, _Lost]) -> None:
        assert full is not None
        for layer, sum_ in sums.items():
            for seen in full.layers[layer]:
                if seen.at[-1] < sum_.gone.shape[1]:
                    sum_.add(seen)

    def measured(sums: dict[int, _Lost]) -> None:
        exact = KVCache(lab.model)
        for layer, sum_ in sums.items():
            exact.watch(_Watch(layer, sum_.add))  # type: ignore[arg-type]
        read(lab, ids, exact, prefill, step, progress=progress, stage="reading with the full cache", last=True)

    def told(stage: str, done: int, total: int) -> None:
        nonlocal shown
        if progress is not None:
            progress(stage, done, total)
        known_so_far = full is not None and stage == STAGE and done > prefill
        if part is not None and known_so_far and time.monotonic() - shown > PAUSE:
            part(made(done, known))
            shown = time.monotonic()

    try:
        read(lab, ids, cache, prefill, step, chunk=strategy.chunk, progress=told, stage=STAGE, last=True)
        return made(n, measured if full is None else known)
    finally:
        cache.close()
