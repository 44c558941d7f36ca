"""Looking into a run: where every head of one layer looked, and how far the keys and values it kept are from the exact ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvlab.attention import Watch
from kvlab.cache import KVCache
from kvlab.layer import Layer

BINS = 256  # the side of a picture, at most
Array = np.ndarray


@dataclass(frozen=True)
class Attention:
    """Where each query head of one layer looked, pooled: ``tokens`` columns in ``bins`` bins, tokens / bins to a bin.

    ``whole`` float32 ``[heads, bins, bins]`` (query, key): the mean share of a query's attention that went to the keys of a bin;
    NaN where no query was, and for keys that come after it. ``whole_evicted``: bool, the keys of the bin had all been evicted.
    ``steps`` ``[heads, steps, bins]`` and ``steps_evicted``: the same for each query that came alone, at decode; they ask at the
    columns ``first_step``, + 1, ... ``sink_share``, ``sink_share_steps``: float ``[heads]``, the share that went to the first
    ``sinks`` tokens.
    """

    layer: int
    tokens: int
    sinks: int
    whole: Array
    whole_evicted: Array
    steps: Array
    steps_evicted: Array
    first_step: int
    sink_share: Array
    sink_share_steps: Array

    @property
    def heads(self) -> int:
        return len(self.whole)

    @property
    def bins(self) -> int:
        return self.whole.shape[2]


class Heads(Watch):
    """A `Watch` of all query heads of a layer at once, so that another head can be looked at without another run."""

    def __init__(self, layer: int, tokens: int, bins: int = BINS, sinks: int = 4) -> None:
        super().__init__(layer, 0, tokens, bins, sinks)
        self._whole: Tensor | None = None
        self._held = torch.zeros(1)
        self._steps: list[Tensor] = []
        self._steps_held: list[Tensor] = []
        self._sink_steps: list[Tensor] = []
        self._first_step = 0

    def take(self, layer: Layer, weights: Tensor, q_len: int, first: int, last: int) -> None:
        own = weights[0].float().cpu()  # [KV heads, group, queries, keys]
        hk, group, rows, n = own.shape
        start = layer.seen - q_len
        columns = layer.columns_with(torch.arange(start, start + n - len(layer.store), device=weights.device))[0].cpu()
        columns = columns.expand(hk, -1).contiguous()
        # columns ascend, so a bin is a range of them and its sum a difference of running sums
        edges = torch.searchsorted(self._bin(columns), torch.arange(self.bins + 1).expand(hk, -1).contiguous())
        sums = torch.cat([own.new_zeros(hk, group, rows, 1), own.cumsum(-1)], -1)
        at = sums.gather(-1, edges[:, None, None, :].expand(-1, group, rows, -1))
        pooled = at.diff(dim=-1).clamp_(min=0)
        held = edges.diff(dim=-1).float()
        sink = (own * (columns < self.sinks)[:, None, None, :]).sum((2, 3))
        if self._whole is None:
            self._whole = torch.zeros(hk, group, self.bins, self.bins)
            self._held, self._sink = torch.zeros(hk, self.bins, self.bins), torch.zeros(hk, group)
        bins = self._bin(torch.arange(start + first, start + last))
        self._whole.index_add_(2, bins, pooled)
        self._held.index_add_(1, bins, held[:, None, :].expand(-1, rows, -1).contiguous())
        self._sink += sink
        self.queries.index_add_(0, bins, torch.ones(rows))
        if q_len == 1 and len(self._steps) < BINS:
            self._first_step = self._first_step if self._steps else start
            self._steps.append(pooled[:, :, 0])
            self._steps_held.append(held)
            self._sink_steps.append(sink)

    def attention(self) -> Attention:
        """The pictures of what was recorded. Raises ``ValueError`` if nothing was."""
        if self._whole is None:
            raise ValueError(f"layer {self.layer} has recorded nothing: pass the watch to cache.watch(...) before the run")
        hk, group = self._whole.shape[:2]
        heads, here = hk * group, torch.arange(self.bins)
        queries = self.queries[:, None]
        whole = (self._whole / queries).flatten(0, 1).masked_fill_(here[None, :] > here[:, None], float("nan"))
        evicted = (self._held == 0) & (here[None, :] <= here[:, None]) & (queries > 0)
        steps, steps_gone = torch.zeros(heads, 0, self.bins), torch.zeros(heads, 0, self.bins, dtype=torch.bool)
        if self._steps:
            asks = self._bin(torch.arange(self._first_step, self._first_step + len(self._steps)))
            steps = torch.stack(self._steps, 2).flatten(0, 1).masked_fill_(here[None, :] > asks[:, None], float("nan"))
            gone = (torch.stack(self._steps_held, 1) == 0) & (here[None, :] <= asks[:, None])
            steps_gone = gone.repeat_interleave(group, 0)
        return Attention(
            layer=self.layer,
            tokens=self.tokens,
            sinks=self.sinks,
            whole=whole.numpy(),
            whole_evicted=evicted.repeat_interleave(group, 0).numpy(),
            steps=steps.numpy(),
            steps_evicted=steps_gone.numpy(),
            first_step=self._first_step,
            sink_share=(self._sink.flatten() / self.queries.sum().clamp(min=1)).numpy(),
            sink_share_steps=(sum(self._sink_steps, torch.zeros(hk, group)).flatten() / max(1, len(self._sink_steps))).numpy(),
        )


@dataclass(frozen=True)
class Error:
    """How far what one layer keeps of the prompt is from what a full cache keeps: mean absolute differences.

    ``keys`` ``[KV heads, key dim, bins]`` and ``values``: float32, NaN where a bin was wholly evicted; ``tokens`` columns.
    ``key_share``, ``value_share`` ``[KV heads]``: the mean difference as a share of the mean size of the exact numbers.
    """

    layer: int
    tokens: int
    keys: Array
    values: Array
    key_share: Array
    value_share: Array


def error(cache: KVCache, exact: KVCache, layer: int, tokens: int, bins: int = BINS) -> Error:
    """Compare layer ``layer`` of ``cache`` with the full cache ``exact`` of the same text, over the first ``tokens`` columns."""
    own_keys, own_values, columns = _layer(cache, layer).dense()
    full_keys, full_values, _ = _layer(exact, layer).dense()
    at = columns[0].expand(own_keys.shape[1], -1)
    known = at < tokens
    bins = min(bins, tokens)
    where = (at.clamp(max=tokens - 1) * bins // tokens).long()
    pictures, shares = [], []
    for own, full in ((own_keys, full_keys), (own_values, full_values)):
        true = full[0].gather(1, at.clamp(max=full.shape[2] - 1)[..., None].expand(-1, -1, full.shape[3])).float()
        off = (own[0].float() - true).abs() * known[..., None]
        heads, _, dim = off.shape
        sums = torch.zeros(heads, bins, dim, device=off.device).scatter_add_(1, where[..., None].expand(-1, -1, dim), off)
        count = torch.zeros(heads, bins, device=off.device).scatter_add_(1, where, known.float())
        pictures.append((sums / count[..., None]).transpose(1, 2).cpu().numpy())
        size = (true.abs() * known[..., None]).sum((1, 2))
        shares.append((off.sum((1, 2)) / size.clamp(min=1e-30)).cpu().numpy())
    return Error(layer, tokens, *pictures, *shares)


def _layer(cache: KVCache, number: int) -> Layer:
    if not 0 <= number < len(cache.layers):
        raise ValueError(f"layer={number} is out of range (allowed: 0 to {len(cache.layers) - 1})")
    found = cache.layers[number]
    assert isinstance(found, Layer)
    return found
