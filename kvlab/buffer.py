"""A tensor that grows along its token dim: everything a cache layer keeps lives in these, so that bytes can be counted and moved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SLACK_SHARE, SLACK_ROWS = 17, 8  # room to grow: one row in 17 (under 6%), and never fewer than 8


class Buffer:
    """Rows along dim 2 of ``[B, H, rows, ...]``, preallocated with a little room, appended to in place.

    ``part`` is the name memory reports use. ``data`` is None while the bytes are away (see ``kvlab.place``); sizes stay known.
    A ``shared`` buffer may hold one row for the whole batch, or one head for all, until they differ.
    """

    def __init__(self, part: str, shared: bool = False) -> None:
        self.part = part
        self.shared = shared
        self.data: Tensor | None = None
        self.rows = 0
        self.dirty = True  # written to since the bytes last came back: what is away elsewhere is out of date
        self.where: str | None = None  # the name of the place that holds the bytes while they are away
        self._shape: tuple[int, ...] = ()
        self._item = 0

    def __len__(self) -> int:
        return self.rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The allocated shape, ``[B, H, capacity, ...]``; empty before the first append."""
        return tuple(self.data.shape) if self.data is not None else self._shape

    @property
    def allocated(self) -> int:
        """Bytes of the storage, room to grow included."""
        if self.data is not None:
            return self.data.untyped_storage().nbytes()
        return self._item * torch.Size(self._shape).numel() if self.where else 0

    @property
    def logical(self) -> int:
        """Bytes of the rows in use."""
        capacity = self.shape[2] if self.shape else 0
        return self.allocated * self.rows // capacity if capacity else 0

    @property
    def device(self) -> str:
        return self.where or (self.data.device.type if self.data is not None else "none")

    def view(self) -> Tensor:
        """The rows in use, ``[B, H, rows, ...]``, no copy."""
        assert self.data is not None, f"the {self.part} buffer is empty or away ({self.where})"
        return self.data[:, :, : self.rows]

    def append(self, rows: Tensor) -> None:
        new, rows = rows.shape[2], rows.detach()
        self.dirty = True
        if self.data is None:
            self.data = _fresh(rows)
        else:
            total = self.rows + new
            if total > self.data.shape[2]:
                self._grow(total + max(total // SLACK_SHARE - 1, SLACK_ROWS if total > SLACK_ROWS else 1))
            self.data[:, :, self.rows : total] = rows
        self.rows += new

    def _grow(self, capacity: int) -> None:
        old = self.view()
        self.data = _empty((*old.shape[:2], capacity, *old.shape[3:]), old)
        self.data[:, :, : self.rows] = old

    def set(self, rows: Tensor) -> None:
        """Replace all rows. The storage is kept when it fits (room to grow included), so steady eviction allocates nothing."""
        count, data = rows.shape[2], self.data
        self.dirty = True
        fits = (
            data is not None
            and data.shape[:2] == rows.shape[:2]
            and data.shape[3:] == rows.shape[3:]
            and count <= data.shape[2] <= count + max(count // SLACK_SHARE, SLACK_ROWS + 1)
        )
        if fits and data is not None:
            data[:, :, :count] = rows
        else:
            self.data = _fresh(rows)
        self.rows = count

    def select(self, index: Tensor) -> None:
        """Keep the rows named by ``index`` (int64 ``[1 or B, 1 or H, m]``, ascending), one list per row and head or one for all."""
        data = self.view()
        if index.shape[:2] == (1, 1):
            self.set(data.index_select(2, index[0, 0]))
        else:
            # a buffer shared by all heads or rows splits up once they differ
            b, h = max(index.shape[0], data.shape[0]), max(index.shape[1], data.shape[1])
            assert self.data is not None
            own, capacity = torch.arange(data.shape[0] * data.shape[1], device=data.device), self.data.shape[2]
            at = index + own.view(*data.shape[:2], 1) * capacity
            picked = self.data.flatten(0, 2).index_select(
                0, at.reshape(-1)
            )  # whole rows are copied, where gather would look up each number
            self.set(picked.view(b, h, -1, *data.shape[3:]))

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows; gives the room back when much of it falls free."""
        if rows < self.rows and self.data is not None:
            self.set(self.data[:, :, :rows].clone())

    def clear(self) -> None:
        self.data, self.rows, self.where = None, 0, None

    def batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the rows of the batch (reorder, repeat, choose)."""
        if self.data is not None and not (self.shared and self.data.shape[0] == 1):
            self.data = _fresh(change(self.data))
            self.dirty = True

    def leave(self, where: str) -> None:
        """Forget the bytes, which ``where`` now holds."""
        assert self.data is not None
        self._shape, self._item = tuple(self.data.shape), self.data.element_size()
        self.data, self.where = None, where

    def arrive(self, data: Tensor) -> None:
        """Take the bytes back."""
        self.data, self.where, self.dirty = data, None, False


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    # a plain tensor even under inference_mode, so that the cache can be used on, outside of it
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _fresh(rows: Tensor) -> Tensor:
    return _empty(tuple(rows.shape), rows).copy_(rows)
