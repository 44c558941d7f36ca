"""What a store must do: take tokens in, score keys, mix values, drop tokens. Attention and eviction need nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.buffer import SLACK_SHARE, Buffer
from kvlab.rope import Rope
from kvlab.strategy import Method
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes, Places


@dataclass(frozen=True)
class LayerShape:
    """What one cache layer looks like, known from its first keys. ``device`` and ``dtype`` are the model's.

    ``rope``: how the layer turns its keys; told to stores that need it, None where it does not turn them.
    """

    layer: int
    layers: int
    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    rope: Rope | None = None


@dataclass(frozen=True)
class Layout:
    """What a fused kernel reads of a layer, views only where rows are many: ``keys`` and ``values`` ``[B, H, n, D]`` in whatever form.

    ``plain``: tokens of both in the model's dtype that are read beside them, or None. The first ``front`` of these are the layer's first rows, the
    others its last. ``places``: keys (not the plain ones) lie as they were before RoPE. ``table``, ``start``: rows lie in pages, int32 ``[B, H, M]``, and a
    head's first row is row ``start`` ``[B, H]`` of its pages. ``turned``: queries and keys, and values, are rotated by these before, what comes out is
    rotated back by ``back``.
    """

    keys: Tensor | Codes
    values: Tensor | Codes
    plain: tuple[Tensor, Tensor] | None = None
    front: int = 0
    places: Places | None = None
    table: Tensor | None = None
    start: Tensor | None = None
    turned: tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None] = (None, None)
    back: Callable[[Tensor], Tensor] | None = None


@dataclass
class StoreState(ABC):
    """The tokens of one layer as a store writes them. Token ``i`` is row ``i``, oldest first, the same count for every head.

    ``columns``: the layer's, int32 ``[1 or B, 1 or H, rows]``: which token of the text each row is, rows about to be appended included; empty while
    row ``i`` is token ``i``. ``padding``: the layer's, bool ``[B, tokens]``, True for real tokens; None where there is no padding.
    """

    shape: LayerShape
    columns: Buffer = field(default_factory=lambda: Buffer("columns", shared=True), repr=False)
    padding: Tensor | None = field(default=None, repr=False)

    @abstractmethod
    def __len__(self) -> int: ...

    def real(self, start: int, stop: int) -> Tensor | None:
        """Which of the rows ``start:stop`` are no padding, bool ``[B, 1 or H, stop - start]``; None: all of them."""
        if self.padding is None:
            return None
        if len(self.columns):
            return real_tokens(self.padding, self.columns.view()[..., start:stop].long())
        return self.padding[:, None, start:stop]

    @property
    def borders(self) -> list[int]:
        """Where rows of one kind (plain, codes) end and others begin; of the rows between two borders as many must go in every head."""
        return []

    @property
    def repacked(self) -> int:
        """How often a head's token was written anew as codes."""
        return 0

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take tokens ``[B, H, n, D]`` in, in full precision; :meth:`settle` writes them down for good."""

    def settle(self) -> None:
        """Quantize what is due. Called after eviction, so that only survivors are quantized."""

    @abstractmethod
    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        """``query`` ``[B, H, M, Dk]`` times the keys of rows ``start:stop`` -> ``[B, H, M, stop - start]``, unscaled."""

    @abstractmethod
    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights`` ``[B, H, M, stop - start]`` times the values of those rows -> ``[B, H, M, Dv]``."""

    @abstractmethod
    def key_rows(self, start: int, stop: int) -> Tensor:
        """The keys of rows ``start:stop`` as they are stored, float32 ``[B, H, stop - start, Dk]``; within one block of :meth:`blocks`."""

    @abstractmethod
    def value_rows(self, start: int, stop: int) -> Tensor:
        """The values of rows ``start:stop``, as :meth:`key_rows`."""

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of single rows (int64 ``[B, H, m]``) -> float32 ``[B, H, m, D]``. Here block by block, reading blocks that have any of them."""
        b, h, m = index.shape
        keys = index.new_empty((b, h, m, self.shape.key_dim), dtype=torch.float32)
        values = index.new_empty((b, h, m, self.shape.value_dim), dtype=torch.float32)
        for start, stop in self.blocks(cpu.MAX_ROWS + 1):
            inside = (index >= start) & (index < stop)
            if bool(inside.any()):
                row, head, at = inside.nonzero(as_tuple=True)
                wanted = index[row, head, at] - start
                keys[row, head, at] = self.key_rows(start, stop)[row, head, wanted]
                values[row, head, at] = self.value_rows(start, stop)[row, head, wanted]
        return keys, values

    def rewrite(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Replace rows from ``first`` on by ``[B, H, n, D]``; only in stores that offer "rewrite", and not before :attr:`plain_from`."""
        raise NotImplementedError

    @property
    def plain_from(self) -> int:
        """From which row on tokens are still plain, so that they may be changed."""
        return len(self)

    def keys_at(self, start: int, stop: int) -> tuple[Tensor | Codes, int] | None:
        """The keys of rows ``start:stop`` as they lie, views only, and the row where they begin (a group may begin before ``start``); None if no
        product reads them as they lie. Within one block of :meth:`blocks`."""
        return None

    @abstractmethod
    def layout(self) -> Layout | None:
        """What fused kernels read; None where no kernel reads rows as they lie: then :meth:`score` and :meth:`mix` serve."""

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Row ranges that together cover all rows; each small enough that its scratch, if ``rows`` query rows need one, stays in a cache."""
        yield from split(0, len(self), block_rows(self.shape))

    @abstractmethod
    def select(self, index: Tensor) -> None:
        """Keep rows ``index`` (int64 ``[1 or B, 1 or H, m]``, ascending; the count between two ``borders`` is the same for all heads)."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Keep the first ``rows`` rows (``crop``)."""

    def thaw(self) -> None:
        """Turn all codes back into plain rows, so that any head may drop any row. Rare; counted by stores that have codes."""

    @abstractmethod
    def buffers(self) -> list[Buffer]:
        """Everything that holds bytes between two steps."""

    def counts(self) -> dict[str, int]:
        """Whatever the state knows beside its buffers, as plain numbers; :meth:`recount` takes it back (saved caches)."""
        return {}

    def recount(self, counts: dict[str, int]) -> None:
        """The inverse of :meth:`counts`."""

    @abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, n, D]`` as attention sees them, in the model's dtype. For tests and figures: it is a copy."""


def real_tokens(padding: Tensor, columns: Tensor) -> Tensor:
    """``padding`` ``[B, tokens]`` at ``columns`` ``[b, h, n]`` (negative: none) -> bool ``[B, h, n]``."""
    rows, heads = padding.shape[0], columns.shape[1]
    return padding.unsqueeze(1).expand(-1, heads, -1).gather(2, columns.clamp(min=0).expand(rows, -1, -1)) & (columns >= 0)


class Around(StoreState):
    """A store inside another: everything is ``inner``'s, until a subclass says otherwise."""

    def __init__(self, shape: LayerShape, inner: StoreState) -> None:
        super().__init__(shape)
        self.inner = inner

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("shape", "columns", "padding") and "inner" in self.__dict__:
            setattr(self.inner, name, self.within(value) if name == "shape" else value)

    def within(self, shape: LayerShape) -> LayerShape:
        """The inner store's shape where the outer one has ``shape``."""
        return shape

    def write(self, number: int, x: Tensor) -> Tensor:
        """All rows of keys (0) or values (1) ``[B, H, n, D]`` as the inner store gets them."""
        return x

    def form(self, number: int) -> str:
        """What :meth:`write` does to them, in words; "" for nothing."""
        return ""

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def borders(self) -> list[int]:
        return self.inner.borders

    @property
    def repacked(self) -> int:
        return self.inner.repacked

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.inner.append(keys, values)

    def settle(self) -> None:
        self.inner.settle()

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.score(query, start, stop)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.mix(weights, start, stop)

    def key_rows(self, start: int, stop: int) -> Tensor:
        return self.inner.key_rows(start, stop)

    def value_rows(self, start: int, stop: int) -> Tensor:
        return self.inner.value_rows(start, stop)

    def layout(self) -> Layout | None:
        return None  # a kernel would have to know what is done around

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        yield from self.inner.blocks(rows)

    def select(self, index: Tensor) -> None:
        self.inner.select(index)

    def truncate(self, rows: int) -> None:
        self.inner.truncate(rows)

    def thaw(self) -> None:
        self.inner.thaw()

    def buffers(self) -> list[Buffer]:
        return self.inner.buffers()

    def counts(self) -> dict[str, int]:
        return self.inner.counts()

    def recount(self, counts: dict[str, int]) -> None:
        self.inner.recount(counts)

    def dense(self) -> tuple[Tensor, Tensor]:
        return self.inner.dense()


class Store(Method, abstract=True):
    """Settings of a store."""

    axis = "store"
    offers = frozenset({"evict"})

    def state(self, shape: LayerShape) -> StoreState:
        raise NotImplementedError

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        """Bytes by part that ``rows`` tokens take in one layer, room to grow apart. Parts as in ``memory()``.

        ``evicting``: above 0, other tokens came and went while these were kept, a few at a time; then how full the plain tail of a group is, which nobody
        knows: 0.5 typically, 1 at most.
        """
        raise NotImplementedError


def fitting(store: Store, shape: LayerShape, size: float, beside: float) -> int:
    """How many tokens of one layer fit into ``size`` bytes, with ``beside`` bytes a token held of them elsewhere, after others came and went.

    Half of the room that buffers have to grow is counted: some are full, some have just grown.
    """

    def takes(rows: int) -> float:
        return (sum(store.predict(rows, shape, evicting=0.5).values()) + beside * rows) * (1 + 0.5 / SLACK_SHARE)

    low, high = 0, 1
    while takes(high) <= size:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= size else (low, middle)
    return low


def block_rows(shape: LayerShape, floats: int = 1 << 19) -> int:
    """Rows whose float32 copy for all rows and heads is about ``floats`` numbers: 2 MB, a share of a processor's cache."""
    wanted = floats // max(1, shape.batch * shape.kv_heads * max(shape.key_dim, shape.value_dim))
    return max(128, min(4096, 1 << max(0, wanted.bit_length() - 1)))


def split(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, rows):
        yield begin, min(begin + rows, stop)
