"""Dense: keys and values as the model made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Layout, Store, StoreState, split
from kvlab_kernels import cpu


@dataclass(frozen=True)
class Dense(Store):
    """Every token as the model made it, appended in place to preallocated storage (never concatenated)."""

    title = "as it is"
    lossless = True
    offers = frozenset({"evict", "rewrite"})

    def state(self, shape: LayerShape) -> StoreState:
        return DenseState(shape)

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        size = shape.batch * shape.kv_heads * rows * shape.dtype.itemsize
        return {"keys": size * shape.key_dim, "values": size * shape.value_dim}


class DenseState(StoreState):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.keys, self.values = Buffer("keys"), Buffer("values")

    def __len__(self) -> int:
        return len(self.keys)

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys.append(keys)
        self.values.append(values)

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        keys = self.keys.view()[:, :, start:stop]
        return cpu.score(query, keys) if cpu.serves(query, keys) else query @ keys.transpose(-1, -2)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        values = self.values.view()[:, :, start:stop]
        return cpu.mix(weights, values) if cpu.serves(weights, values) else weights.to(values.dtype) @ values

    def key_rows(self, start: int, stop: int) -> Tensor:
        return self.keys.view()[:, :, start:stop].float()

    def value_rows(self, start: int, stop: int) -> Tensor:
        return self.values.view()[:, :, start:stop].float()

    def rows_at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys.take(index).float(), self.values.take(index).float()

    @property
    def plain_from(self) -> int:
        return 0

    def rewrite(self, first: int, keys: Tensor, values: Tensor) -> None:
        for side, rows in ((self.keys, keys), (self.values, values)):
            side.view()[:, :, first:] = rows
            side.touch(first)

    def keys_at(self, start: int, stop: int) -> tuple[Tensor, int]:
        return self.keys.view()[:, :, start:stop], start

    def layout(self) -> Layout:
        return Layout(self.keys.view(), self.values.view())

    def blocks(self, rows: int = cpu.MAX_ROWS + 1) -> Iterator[tuple[int, int]]:
        # nothing is unpacked, so there is no scratch to keep small: one block reads memory in one sweep
        yield from split(0, len(self), 1 << 16)

    def select(self, index: Tensor) -> None:
        self.keys.select(index)
        self.values.select(index)

    def truncate(self, rows: int) -> None:
        self.keys.truncate(rows)
        self.values.truncate(rows)

    def buffers(self) -> list[Buffer]:
        return [self.keys, self.values]

    def dense(self) -> tuple[Tensor, Tensor]:
        return self.keys.view(), self.values.view()
