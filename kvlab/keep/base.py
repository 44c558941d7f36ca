"""What a keep must say: how many tokens a head may hold, and how much each held token is worth. The cache does the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.strategy import Method

PROTECTED = float("inf")


@dataclass(frozen=True)
class Held:
    """The tokens of one layer when the keep is asked, oldest first. ``b`` and ``h`` are 1 where all rows or heads agree.

    ``columns``: int64 ``[b, h, n]``, each token's column in the padded sequence.
    ``positions``: int64 ``[b, h, n]``, its number among the real tokens of its row (negative: padding).
    ``seen``: tokens the cache has seen, padding included; the newest has the column ``seen - 1``.
    ``mass``: float32 ``[B, H, n]``, the attention each key received from all queries so far, summed over the query heads that
    share it; None unless the method ``needs`` it.
    """

    columns: Tensor
    positions: Tensor
    seen: int
    mass: Tensor | None = None

    def protect(self, priority: Tensor, sinks: int, recent: int) -> Tensor:
        """``priority`` with the first ``sinks`` real tokens and the newest ``recent`` ones beyond reach."""
        safe = (self.positions < sinks) | (self.columns >= self.seen - recent)
        return torch.where(safe, PROTECTED, priority)


class Keep(Method, abstract=True):
    """Settings of a keep."""

    axis = "keep"

    def limit(self) -> int | None:
        """Tokens a head may hold after each step; None for no limit."""
        return None

    def priority(self, held: Held) -> Tensor:
        """float32 ``[b, h, n]``: who stays when room is short, the highest first, ties to the newest. ``PROTECTED`` never goes.

        Padding needs no care: it goes first, whatever is said here.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Visible(Keep, abstract=True):
    """A model's own window: what its attention can still see of a layer. No setting of a strategy, the cache uses it by itself."""

    size: int = 1

    def limit(self) -> int:
        return self.size

    def priority(self, held: Held) -> Tensor:
        return held.columns.float()
