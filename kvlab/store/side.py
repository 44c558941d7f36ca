"""What keys, or values, of one layer must do once they are written down: a :class:`Side`. ``CodedState`` joins two of them with plain tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvlab.buffer import Buffer, gather
from kvlab.dispatch import capturing
from kvlab_kernels.layout import Codes


class Side(ABC):
    """Keys or values of one layer, rows along dim 2, oldest first.

    ``axis``: "channel" and "tensor" where ``group_size`` rows are written together, else "token". ``repacked``: rows that were written again.
    """

    axis: str = "token"
    group_size: int = 1
    repacked: int = 0

    @abstractmethod
    def __len__(self) -> int: ...

    def learn(self, x: Tensor, real: Tensor | None) -> None:
        """Look at the first rows ``[B, H, n, D]`` before any is written; ``real``: bool ``[B, 1 or H, n]``, False for padding, None: all real."""

    @abstractmethod
    def append(self, x: Tensor) -> None:
        """Write ``[B, H, n, D]`` down for good; ``n`` is a multiple of ``group_size`` unless ``axis`` is "token"."""

    @abstractmethod
    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        """float32 ``query`` ``[B, H, M, D]`` times rows ``start:stop`` -> ``[B, H, M, stop - start]``."""

    @abstractmethod
    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """float32 ``weights`` ``[B, H, M, stop - start]`` times those rows -> ``[B, H, M, D]``."""

    @abstractmethod
    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``start:stop``, float32 ``[B, H, stop - start, D]``."""

    def take(self, index: Tensor) -> Tensor:
        """Single rows, int64 ``[B, H, m]`` (-1: none, and anything stands there) -> float32 ``[B, H, m, D]``."""
        return gather(self.rows(), index.clamp(min=0))

    def lies(self, start: int, stop: int) -> tuple[Tensor | Codes, int] | None:
        """Rows ``start:stop`` as they lie and the row where they begin, or None; see ``StoreState.keys_at``."""
        return None

    @abstractmethod
    def layout(self, start: int = 0, stop: int | None = None) -> Tensor | Codes | None:
        """What fused kernels read of rows ``start:stop`` (``start`` where a group begins), views only; None if no kernel reads them as they lie."""

    @abstractmethod
    def select(self, index: Tensor) -> None:
        """Keep rows ``index`` ``[1 or B, 1 or H, m]``."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` (whole groups unless per token); only before any eviction."""

    @abstractmethod
    def buffers(self) -> list[Buffer]:
        """Everything that holds bytes."""

    def forget(self) -> None:
        """Everything was taken back: what was learned from it goes, too."""
        self.clear()

    def clear(self) -> None:
        for buffer in self.buffers():
            buffer.clear()

    def batch(self, change: Callable[[Tensor], Tensor]) -> None:
        for buffer in self.buffers():
            buffer.batch(change)


class PlainSide(Side):
    """Rows as they are, in ``dtype``."""

    def __init__(self, part: str, dtype: torch.dtype) -> None:
        self.data, self.dtype = Buffer(part), dtype

    def __len__(self) -> int:
        return len(self.data)

    def append(self, x: Tensor) -> None:
        self.data.append(to_format(x, self.dtype))

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        return query @ self.rows(start, stop).mT

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        return weights @ self.rows(start, stop)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.data.view()[:, :, start:stop].float()

    def take(self, index: Tensor) -> Tensor:
        return self.data.take(index).float()

    def layout(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.data.view()[:, :, start:stop]

    def select(self, index: Tensor) -> None:
        self.data.select(index)

    def truncate(self, rows: int) -> None:
        self.data.truncate(rows)

    def buffers(self) -> list[Buffer]:
        return [self.data]


def to_format(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. Raises ``ValueError`` where that has no number large enough."""
    if x.dtype == dtype or dtype == torch.bfloat16 or dtype == torch.float32:
        return x.to(dtype)
    out = x.to(dtype)
    if not capturing(x.device) and not bool(out.isfinite().all()):
        raise ValueError(f"numbers up to {float(x.abs().max()):.3g} cannot be quantized to {dtype} (NaN, infinite or too large)")
    return out
