"""Paged: tokens as they are, in small pages that belong to one head each, so that heads may hold different numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Layout, Store, StoreState
from kvlab.strategy import param


@dataclass(frozen=True)
class Paged(Store):
    """Every token as the model made it, ``page`` tokens of one head a page: what a head does not hold takes no room, but for the rest of its first page.

    For keeps with ragged budgets (``keep.AdaKV``). New tokens wait beside the pages, as many in every head, until the next eviction files them.
    """

    title = "as it is, in pages"
    lossless = True
    offers = frozenset({"evict", "ragged"})

    page: int = param(
        16, low=1, high=256, step=1, unit="tokens", help="Tokens of a page. Small ones waste less, large ones are read faster."
    )

    def state(self, shape: LayerShape) -> StoreState:
        return PagedState(shape, self.page)

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        heads, item = shape.batch * shape.kv_heads, shape.dtype.itemsize
        filed = -(-rows // self.page) if evicting else 0  # pages of a head
        tokens = filed * self.page if evicting else rows
        parts = {"keys": float(heads * tokens * item * shape.key_dim), "values": float(heads * tokens * item * shape.value_dim)}
        return parts | ({"tables": heads * filed * 8.0} if evicting else {})


class PagedState(StoreState):
    """Rows that were filed in pages, then a plain tail. Row ``i`` of a head that holds fewer filed tokens than another is a hole for small ``i``.

    ``table``: int32 ``[B, 1, pages, 2]``, head and place of each page; the head is -1 where a row of the batch has fewer pages than another.
    """

    def __init__(self, shape: LayerShape, page: int) -> None:
        super().__init__(shape)
        self.page, self.filed = page, 0  # filed: rows of the longest head
        self.pages = (Buffer("keys"), Buffer("values"))
        self.table = Buffer("tables")
        self.tail = (Buffer("keys"), Buffer("values"))

    def __len__(self) -> int:
        return self.filed + len(self.tail[0])

    def append(self, keys: Tensor, values: Tensor) -> None:
        for tail, rows in zip(self.tail, (keys, values), strict=True):
            tail.append(rows)

    @property
    def _places(self) -> int:
        """Pages of the longest head."""
        return -(-self.filed // self.page)

    @property
    def _short(self) -> int:
        """What its first page lacks."""
        return self._places * self.page - self.filed

    def _owners(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row of the batch, head (the one behind the last for pages of nobody) and place of every page, each ``[B * pages]``."""
        table = self.table.view()[:, 0].long()
        row = torch.arange(table.shape[0], device=table.device)[:, None].expand(table.shape[:2])
        head = torch.where(table[..., 0] < 0, self.shape.kv_heads, table[..., 0])
        return row.reshape(-1), head.reshape(-1), table[..., 1].reshape(-1)

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        if start >= self.filed:
            return query @ self.tail[0].view()[:, :, start - self.filed : stop - self.filed].mT
        b, h, m, _ = query.shape
        row, head, place = self._owners()
        own = torch.cat([query, query[:, :1]], 1)[row, head]
        pages = self.pages[0].view()[:, 0].flatten(0, 1)
        out = query.new_zeros((b, h + 1, self._places, m, self.page))
        out[row, head, place] = own @ pages.mT
        return out[:, :h].transpose(2, 3).flatten(3)[..., self._short + start : self._short + stop]

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        dtype = self.shape.dtype
        if start >= self.filed:
            return weights.to(dtype) @ self.tail[1].view()[:, :, start - self.filed : stop - self.filed]
        b, h, m, _ = weights.shape
        whole = weights.new_zeros((b, h + 1, m, self._places * self.page))
        whole[:, :h, :, self._short + start : self._short + stop] = weights
        row, head, place = self._owners()
        own = whole.unflatten(3, (-1, self.page)).transpose(2, 3)[row, head, place].to(dtype)
        mixed = own @ self.pages[1].view()[:, 0].flatten(0, 1)
        out = mixed.new_zeros((b * (h + 1), m, mixed.shape[-1])).index_add_(0, row * (h + 1) + head, mixed)
        return out.unflatten(0, (b, h + 1))[:, :h]

    def _rows(self, number: int) -> Tensor:
        """All rows of keys or values, ``[B, H, n, D]``, zero where there is a hole."""
        shape, parts = self.shape, []
        if self.filed:
            pages = self.pages[number].view()[:, 0].flatten(0, 1)
            row, head, place = self._owners()
            grid = pages.new_zeros((shape.batch, shape.kv_heads + 1, self._places, *pages.shape[1:]))
            grid[row, head, place] = pages
            parts.append(grid[:, : shape.kv_heads].flatten(2, 3)[:, :, self._short :])
        if len(self.tail[number]):
            parts.append(self.tail[number].view())
        return torch.cat(parts, 2)

    def key_rows(self, start: int, stop: int) -> Tensor:
        return self._rows(0)[:, :, start:stop].float()

    def value_rows(self, start: int, stop: int) -> Tensor:
        return self._rows(1)[:, :, start:stop].float()

    def layout(self) -> Layout | None:
        if not self.filed:
            return Layout(self.tail[0].view(), self.tail[1].view())
        shape = self.shape
        for pages in self.pages:
            pages.view()  # wherever they were
        keys, values = (pages.data for pages in self.pages)
        assert keys is not None and values is not None
        row, head, place = self._owners()
        table = torch.zeros((shape.batch, shape.kv_heads + 1, self._places), dtype=torch.int32, device=shape.device)
        used, room = len(row) // shape.batch, keys.shape[2]  # rows of the batch have room to grow between them
        table[row, head, place] = (row * room + torch.arange(len(row), device=shape.device) % used).int()
        heads = (-1, shape.kv_heads, -1, -1)
        keys, values = (x[:, 0].flatten(0, 1).unsqueeze(1).expand(heads) for x in (keys, values))
        # what a shorter head does not hold comes first: whole pages of nobody, then holes in its oldest page
        held = torch.zeros((shape.batch, shape.kv_heads + 1), dtype=torch.int32, device=shape.device)
        held.index_put_((row, head), torch.full_like(row, self.page, dtype=torch.int32), accumulate=True)
        start = (self._places * self.page - held).clamp(min=self._short)
        plain = (self.tail[0].view(), self.tail[1].view()) if len(self.tail[0]) else None
        return Layout(keys, values, plain, table=table[:, : shape.kv_heads], start=start[:, : shape.kv_heads])

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        if self.filed:
            yield 0, self.filed
        if len(self) > self.filed:
            yield self.filed, len(self)

    def select(self, index: Tensor) -> None:
        shape, size = self.shape, self.page
        index = index.expand(shape.batch, shape.kv_heads, -1)
        filled = F.pad(index, (-index.shape[2] % size, 0), value=-1)  # whole pages: the oldest one of a head begins with holes
        places = filled.unflatten(2, (-1, size))  # [B, H, pages of a head, page]
        used = (places >= 0).any(3)
        counts = used.sum((1, 2))
        table = torch.full((shape.batch, 1, int(counts.max()), 2), -1, dtype=torch.int32, device=index.device)
        row, head, place = used.nonzero(as_tuple=True)
        at = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        table[row, 0, at] = torch.stack([head, place], 1).int()
        wanted = places[row, head, place]
        for number in (0, 1):
            rows = self._rows(number)
            pages = rows.new_zeros((shape.batch, 1, table.shape[2], size, rows.shape[3]))
            picked = rows[row[:, None], head[:, None], wanted.clamp(min=0)]
            pages[row, 0, at] = picked.masked_fill_((wanted < 0)[..., None], 0)
            self.pages[number].set(pages)
            self.tail[number].clear()
        self.table.set(table)
        self.filed = index.shape[2]

    def truncate(self, rows: int) -> None:
        if rows < self.filed:
            raise RuntimeError(
                "tokens that were filed in pages cannot be taken back"
            )  # never before eviction, and then crop is refused
        for tail in self.tail:
            tail.truncate(rows - self.filed)

    def buffers(self) -> list[Buffer]:
        return [*self.pages, self.table, *self.tail]

    def counts(self) -> dict[str, int]:
        return {"filed": self.filed}

    def recount(self, counts: dict[str, int]) -> None:
        self.filed = counts["filed"]

    def dense(self) -> tuple[Tensor, Tensor]:
        return self._rows(0), self._rows(1)
