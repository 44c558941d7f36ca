"""Reservation: what is set aside for requests of any length, and what of it is ever filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.geometry import Geometry, find
from kvlab.serving.block_pool import BlockPool
from kvlab.serving.pages import strategy_of
from kvlab.serving.simulate import block_bytes
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Reservation:
    """Bytes for the same requests: ``filled`` by their tokens; ``blocks`` held for them, the last one of each not full; ``worst``: reserved if each could become
    as long as the limit.
    """

    filled: float
    blocks: float
    worst: float

    @property
    def waste(self) -> float:
        """Share of the held blocks with no token in it."""
        return 1 - self.filled / self.blocks

    @property
    def worst_waste(self) -> float:
        """Share of the worst case that is never filled."""
        return 1 - self.filled / self.worst


def reserve(
    shape: str | Geometry, lengths: Sequence[int], limit: int, *, block_size: int = 16, strategy: Strategy | None = None
) -> Reservation:
    """``shape``: a model of the table, or its geometry; ``lengths``: tokens of each request; ``limit``: tokens that any of them might have had.

    Raises ``ValueError`` for no requests, one beyond the limit, a block size below 1, or a strategy that cannot be paged.
    """
    if not lengths:
        raise ValueError("lengths is empty (allowed: one request or more)")
    if min(lengths) < 1 or max(lengths) > limit:
        raise ValueError(
            f"lengths from {min(lengths)} to {max(lengths)} are out of range (allowed: 1 to the limit of {limit} tokens)"
        )
    if any(not isinstance(length, int) for length in (*lengths, limit)):
        raise ValueError(f"lengths={list(lengths)!r} and limit={limit!r} must be whole numbers of tokens")
    known = find(shape) if isinstance(shape, str) else shape
    one, pool = block_bytes(known, strategy_of(strategy), block_size), BlockPool(1, block_size)
    return Reservation(
        sum(lengths) / block_size * one, sum(map(pool.needed, lengths)) * one, len(lengths) * pool.needed(limit) * one
    )
