"""What a keep must say: how many tokens a head may hold, and how much each held token is worth. The cache does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvlab.strategy import Method, param

PROTECTED = float("inf")


@dataclass(frozen=True)
class Held:
    """The tokens of one layer when the keep is asked, oldest first. ``b`` and ``h`` are 1 where all rows or heads agree.

    ``columns``: int64 ``[b, h, n]``, each token's column in the padded sequence.
    ``positions``: int64 ``[b, h, n]``, its number among the real tokens of its row (negative: padding).
    ``seen``: tokens the cache has seen, padding included; the newest has the column ``seen - 1``.
    ``evidence``: float32 ``[B, H, n]``, what :meth:`Keep.observe` has said of each; None unless the method ``needs`` attention.
    ``keys``: gives the keys as they are held, float32 ``[B, H, n, D]`` (a copy).
    """

    columns: Tensor
    positions: Tensor
    seen: int
    evidence: Tensor | None = None
    keys: Callable[[], Tensor] | None = None

    def protect(self, priority: Tensor, sinks: int, recent: int) -> Tensor:
        """``priority`` with the first ``sinks`` real tokens and the newest ``recent`` ones beyond reach."""
        safe = (self.positions < sinks) | (self.columns >= self.seen - recent)
        return torch.where(safe, PROTECTED, priority)


class Keep(Method, abstract=True):
    """Settings of a keep. One that ``needs`` "attention" is shown every step's attention weights in :meth:`observe`."""

    axis = "keep"
    carries: ClassVar[bool] = True  # what earlier steps observed is added to; False: each step's word replaces it
    differs: ClassVar[str] = "never"  # who may hold other tokens than another: "never", a "row" of the batch, a "head"

    def limit(self, layer: int = 0, layers: int = 1) -> int | None:
        """Tokens a head of this layer may hold after each step; None for no limit."""
        return None

    @property
    def slack(self) -> int:
        """How many tokens more than needed go when some must: then the next ones come without any going."""
        return 0

    @property
    def protected(self) -> int:
        """How many tokens a head always holds, whatever they are worth."""
        return 0

    def observe(self, weights: Tensor, after: int) -> Tensor:
        """What a block of queries says of the keys: softmax weights ``[B, H, G, q, n]`` (G query heads share a key) -> float32 ``[B, H, n]``.

        Blocks of one step are added up. ``after``: how many queries of the same step are newer than the block's last. Padded queries weigh nothing.
        """
        return weights.sum((2, 3))

    def priority(self, held: Held) -> Tensor:
        """float32 ``[b, h, n]``: who stays when room is short, the highest first, ties to the newest. ``PROTECTED`` never goes.

        Padding needs no care: it goes first, whatever is said here.
        """
        raise NotImplementedError


def budget(default: int = 256) -> int:
    """The setting of that name, alike for all methods that have it."""
    return param(  # type: ignore[no-any-return]
        default,
        low=1,
        high=8192,
        step=16,
        unit="tokens",
        covers=True,
        help="Tokens a head may hold, the protected ones included.",
    )


def recent(default: int = 64) -> int:
    return param(default, low=0, high=8192, step=16, unit="tokens", help="How many of the newest tokens are always kept.")  # type: ignore[no-any-return]


def sinks(default: int = 4) -> int:
    return param(default, low=0, high=64, step=1, unit="tokens", help="How many of the first tokens are always kept.")  # type: ignore[no-any-return]


class Budgeted(Keep, abstract=True):
    """A keep with ``budget``, ``recent`` and ``sinks``: whatever the evidence, those are held to."""

    budget: int
    recent: int
    sinks: int

    needs = frozenset({"attention", "evict"})
    differs = "head"

    def check(self) -> None:
        least = self.protected + self.slack
        if self.budget < max(1, least):
            why = "recent + sinks" + (" + every - 1" if self.slack else "")
            raise ValueError(f"{type(self).__name__}: budget={self.budget} is below {why} = {least} (allowed: {least} or more)")

    def limit(self, layer: int = 0, layers: int = 1) -> int | None:
        return self.budget

    @property
    def protected(self) -> int:
        return self.recent + self.sinks

    def priority(self, held: Held) -> Tensor:
        return held.protect(self.worth(held), self.sinks, self.recent)

    def worth(self, held: Held) -> Tensor:
        """float32 ``[b, h, n]``: what each token is worth by this method's evidence, protection apart."""
        assert held.evidence is not None
        return held.evidence


@dataclass(frozen=True)
class Visible(Keep, abstract=True):
    """A model's own window: what its attention can still see of a layer. No setting of a strategy, the cache uses it by itself."""

    size: int = 1

    def limit(self, layer: int = 0, layers: int = 1) -> int:
        return self.size

    def priority(self, held: Held) -> Tensor:
        return held.columns.float()
