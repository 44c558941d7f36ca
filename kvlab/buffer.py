"""A tensor that grows along its token dim: everything a cache layer keeps lives in these, so that bytes can be counted and moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

SLACK_SHARE, SLACK_ROWS = 17, 8  # room to grow: one row in 17 (under 6%), and never fewer than 8


class Home(Protocol):
    """Where rows wait while they are away. See ``kvlab.place``."""

    name: str

    def bring(self, buffer: Buffer) -> Tensor:
        """The rows that are away at their places in a storage with room for all, ``[B, H, rows or more, ...]``, on the compute device."""

    def take(self, buffer: Buffer, index: Tensor) -> Tensor:
        """Single rows that are away (int64 ``[B, H, m]``; -1: none) -> ``[B, H, m, ...]`` on the compute device."""

    def bytes(self, buffer: Buffer) -> int:
        """What the rows that are away take up there."""


class Buffer:
    """Rows along dim 2 of ``[B, H, rows, ...]``, preallocated with a little room, appended to in place.

    ``part`` is the name memory reports use. Some rows may be away (see ``kvlab.place``): rows ``first:first + away`` wait at ``home``, the ``first`` rows
    before them are in ``head`` and those after them in ``data``. Whoever asks for :meth:`view` gets all of them back. A ``shared`` buffer may hold one
    row for the whole batch, or one head for all, until they differ.
    """

    def __init__(self, part: str, shared: bool = False) -> None:
        self.part = part
        self.shared = shared
        self.data: Tensor | None = None
        self.head: Tensor | None = None
        self.home: Home | None = None
        self.rows = self.away = 0
        self.clean = 0  # so many of the first rows are as they were when they last left

    def __len__(self) -> int:
        return self.rows

    @property
    def first(self) -> int:
        return 0 if self.head is None else self.head.shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """``[B, H, rows with room to grow, ...]`` of what is here; empty before the first append."""
        return () if self.data is None else tuple(self.data.shape)

    # bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all heads and rows of the batch."""
        if self.data is None:
            return 0
        return self.data.element_size() * math.prod((*self.data.shape[:2], *self.data.shape[3:]))

    @property
    def here(self) -> int:
        """Bytes on the compute device, room to grow included."""
        head = 0 if self.head is None else self.head.nbytes
        return head + (0 if self.data is None else self.data.untyped_storage().nbytes())

    @property
    def allocated(self) -> int:
        """Bytes of the storage wherever it is, room to grow included."""
        return self.here + (self.home.bytes(self) if self.away and self.home is not None else 0)

    @property
    def logical(self) -> int:
        """Bytes of the rows in use."""
        return self.rows * self.row_bytes

    def spread(self) -> Iterator[tuple[str, int, int]]:
        """Where the bytes are: name of the device, bytes of the rows in use, bytes allocated."""
        if self.here and self.data is not None:
            yield self.data.device.type, (self.rows - self.away) * self.row_bytes, self.here
        if self.away and self.home is not None:
            yield self.home.name, self.away * self.row_bytes, self.home.bytes(self)

    # reading

    def view(self) -> Tensor:
        """The rows in use, ``[B, H, rows, ...]``, no copy; rows that are away come back first."""
        if self.away:
            self.arrive(self._home().bring(self))
        assert self.data is not None, f"the {self.part} buffer is empty"
        return self.data[:, :, : self.rows]

    def take(self, index: Tensor) -> Tensor:
        """Single rows, int64 ``[B, H, m]`` -> ``[B, H, m, ...]``, a copy; of those that are away only these are read. -1: none, and anything stands there."""
        assert self.data is not None, f"the {self.part} buffer is empty"
        if not self.away:
            return gather(self.data, index.clamp(min=0))
        far = (index >= self.first) & (index < self.first + self.away)
        out = self._home().take(self, index.masked_fill(~far, -1))
        for near, begin in ((self.head, 0), (self.data, self.first + self.away)):
            if near is not None and near.shape[2]:
                mine = (index >= begin) & (index < begin + near.shape[2])
                rows = gather(near, (index - begin).clamp(0, near.shape[2] - 1))
                out = torch.where(mine.view(*mine.shape, *[1] * (rows.dim() - 3)), rows, out)
        return out

    # writing

    def touch(self, row: int = 0) -> None:
        """Rows from ``row`` on were changed in place."""
        self.clean = min(self.clean, row)

    def append(self, rows: Tensor) -> None:
        self.extend(rows.shape, rows).copy_(rows.detach())

    def extend(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Room for new rows at the end, ``[B, H, n, ...]`` of the dtype and on the device of ``like``: whoever asks writes them."""
        new = shape[2]
        if self.data is None:
            self.data = _empty(tuple(shape), like)
            start = 0
        else:
            start = self.rows - self.first - self.away
            total = start + new
            if total > self.data.shape[2]:
                whole = total + self.first + self.away
                room = total + max(whole // SLACK_SHARE - 1, SLACK_ROWS if whole > SLACK_ROWS else 1)
                old = self.data
                self.data = _empty((*old.shape[:2], room, *old.shape[3:]), old)
                self.data[:, :, :start] = old[:, :, :start]
        self.rows += new
        return self.data[:, :, start : start + new]

    def set(self, rows: Tensor) -> None:
        """Replace all rows. The storage is kept when it fits (room to grow included), so steady eviction allocates nothing."""
        count, data = rows.shape[2], self.data
        self.head, self.away, self.clean = None, 0, 0
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
            assert self.data is not None
            self.set(gather(self.data, index))

    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows; gives the room back when much of it falls free."""
        if rows < self.rows:
            clean = min(self.clean, rows)
            self.set(self.view()[:, :, :rows].clone())
            self.clean = clean

    def clear(self) -> None:
        self.data = self.head = None
        self.rows = self.away = self.clean = 0

    def batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the rows of the batch (reorder, repeat, choose)."""
        if self.data is not None and not (self.shared and self.data.shape[0] == 1):
            self.view()
            self.data, self.clean = _fresh(change(self.data)), 0

    # coming and going

    def leave(self, first: int, away: int, home: Home) -> None:
        """Forget the bytes of rows ``first:first + away``, which ``home`` holds; what stays before and after them is copied.

        If rows are away already, more of those that follow them may leave.
        """
        data, before = self.data, self.first + self.away if self.away else 0
        assert data is not None and (not self.away or (first == self.first and away >= self.away))
        if first + away == before:
            return
        if not self.away:
            self.head = _fresh(data[:, :, :first]) if first else None
        self.data = _fresh(data[:, :, first + away - before : self.rows - before])
        self.away, self.home, self.clean = away, home, max(self.clean, first + away)

    def arrive(self, whole: Tensor) -> None:
        """Take back the rows that were away, at their places in a storage with room for all rows."""
        after, held = self.first + self.away, self.rows - self.first - self.away
        assert self.data is not None and whole.shape[2] >= self.rows
        if self.head is not None:
            whole[:, :, : self.first] = self.head
        if held:
            whole[:, :, after : self.rows] = self.data[:, :, :held]
        self.data, self.head, self.away = whole, None, 0

    def _home(self) -> Home:
        assert self.home is not None
        return self.home


def gather(data: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` ``[1 or B, 1 or H, m]`` of ``[B or 1, H or 1, n, ...]``; whole rows are copied, where ``gather`` would look up each number."""
    b, h, n = data.shape[:3]
    at = index + torch.arange(b * h, device=data.device).view(b, h, 1) * n
    return data.flatten(0, 2).index_select(0, at.reshape(-1)).view(*at.shape, *data.shape[3:])


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    # a plain tensor even under inference_mode, so that the cache can be used on, outside of it
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _fresh(rows: Tensor) -> Tensor:
    return _empty(tuple(rows.shape), rows).copy_(rows)
