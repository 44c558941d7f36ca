"""Replay: a prompt that many caches read is computed once.

While a prompt is read in one piece, attention is exact whatever the cache will make of it: every cache meets the same keys, values and queries. So they are
kept, and the next cache takes them in without the model: writing down, judging and dropping are its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCache, forward
from kvlab.layer import Read
from kvlab.strategy import Strategy

LIMIT = 1 << 30  # bytes of prompts that are kept


class Prompts:
    """The newest prompts of one model, up to ``limit`` bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._kept: OrderedDict[Any, tuple[list[Read], Tensor]] = OrderedDict()

    def serves(self, cache: Any) -> bool:
        """Whether this cache may read a prompt so: it is empty, and nobody watches attention."""
        return isinstance(cache, KVCache) and not cache.get_seq_length() and not cache.watching and cache.recorded is None

    def prefill(self, model: Any, ids: Tensor, cache: KVCache) -> Tensor:
        """Have ``cache`` read ``ids`` ``[1, n]`` in one piece -> logits of the last token ``[1, 1, vocabulary]``."""
        name = (_state(model), tuple(ids[0].tolist()))
        if name not in self._kept:
            whole = KVCache(model, Strategy())
            whole.tape = []
            logits = forward(model, ids, whole, last=True)
            tape, whole.tape = whole.tape, None
            self._keep(name, tape, logits)
        self._kept.move_to_end(name)
        tape, logits = self._kept[name]
        with torch.inference_mode():
            for read in tape:
                layer = cache.layers[read.layer]
                if read.keys is not None:
                    layer.update(read.keys, read.values)
                layer.follow(read.query, read.rule, *read.how)
        return logits

    def _keep(self, name: Any, tape: list[Read], logits: Tensor) -> None:
        self._kept[name] = (tape, logits)
        while len(self._kept) > 1 and sum(read.nbytes for tape, _ in self._kept.values() for read in tape) > self.limit:
            self._kept.popitem(last=False)


def _state(model: Any) -> int:
    """Changes whenever weights do: written in place, exchanged, moved, or of another dtype."""
    return hash(tuple((x.data_ptr(), x._version, x.dtype) for x in model.parameters() if not x.is_inference()))
