"""When each token left each head of each layer, and on what evidence."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.keep.base import PROTECTED


class History:
    """What ``KVCache.history()`` records: row 0 of a batch, every layer and KV head.

    Recording costs a few bytes a token and head, which no ``memory()`` counts: it is the lab's, not the cache's.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        layers = self._layers
        self._gone: list[Tensor | None] = [None] * layers
        self._worth: list[Tensor | None] = [None] * layers
        self._floor: list[Tensor | None] = [None] * layers

    def note(self, layer: int, columns: Tensor, index: Tensor, priority: Tensor, seen: int) -> None:
        """Called by a layer when rows ``index`` of those at ``columns`` stay and the others go, after ``seen`` tokens were read."""
        heads = max(x.shape[1] for x in (columns, index, priority))
        columns, index, priority = (x[0].expand(heads, -1).cpu() for x in (columns, index, priority))
        goes = columns >= 0
        head, row = (index >= 0).nonzero(as_tuple=True)
        goes[head, index[head, row]] = False
        gone = self._grow(self._gone, layer, heads, seen, 0, torch.int32)
        worth = self._grow(self._worth, layer, heads, seen, float("nan"), torch.float32)
        floor = self._grow(self._floor, layer, heads, seen, float("nan"), torch.float32)
        head, row = goes.nonzero(as_tuple=True)
        at = columns[head, row]
        gone[head, at] = seen
        worth[head, at] = priority[head, row].float()
        free = torch.where((priority == PROTECTED) | goes | (columns < 0), PROTECTED, priority.float())
        floor[head, at] = free.amin(1)[head]

    @staticmethod
    def _grow(tables: list[Tensor | None], layer: int, heads: int, columns: int, fill: float, dtype: torch.dtype) -> Tensor:
        old = tables[layer]
        if old is not None and old.shape[0] >= heads and old.shape[1] >= columns:
            return old
        if old is not None and old.shape[0] < heads:
            old = old.expand(heads, -1)
        wide = torch.full((heads, columns * 5 // 4 + 64), fill, dtype=dtype)
        if old is not None:
            wide[:, : old.shape[1]] = old
        tables[layer] = wide
        return wide

    def gone(self, layer: int, tokens: int, heads: int = 1) -> Tensor:
        """How many tokens had been read when each of the first ``tokens`` left each head; 0: it never did. int32 ``[heads, tokens]``."""
        return self._read(self._gone, layer, tokens, heads, 0, torch.int32)

    def worth(self, layer: int, tokens: int, heads: int = 1) -> Tensor:
        """What each token was worth when it left, by its keep's measure; NaN: it never did, minus infinity: padding. float32 ``[heads, tokens]``."""
        return self._read(self._worth, layer, tokens, heads, float("nan"), torch.float32)

    def floor(self, layer: int, tokens: int, heads: int = 1) -> Tensor:
        """The least that an unprotected token which stayed was worth at that moment; infinity: all others were protected. float32 ``[heads, tokens]``."""
        return self._read(self._floor, layer, tokens, heads, float("nan"), torch.float32)

    @staticmethod
    def _read(tables: list[Tensor | None], layer: int, tokens: int, heads: int, fill: float, dtype: torch.dtype) -> Tensor:
        if not 0 <= layer < len(tables):
            raise ValueError(f"layer={layer} is out of range (allowed: 0 to {len(tables) - 1})")
        table, out = tables[layer], torch.full((heads, tokens), fill, dtype=dtype)
        if table is not None:
            if table.shape[0] not in (1, heads):
                raise ValueError(f"heads={heads}: layer {layer} was recorded with {table.shape[0]} (allowed: that)")
            n = min(tokens, table.shape[1])
            out[:, :n] = table[:, :n]
        return out
