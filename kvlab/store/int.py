"""Int: integer codes. Keys per channel or per token, values per token, the newest tokens plain (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Store, StoreState, block_rows, split
from kvlab.store.codes import QuantizedSide
from kvlab.strategy import param
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes

SCALES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Int(Store):
    """Integer codes with a scale and a zero point a group (asymmetric, minimum to maximum), really packed.

    Keys have a few channels of large size, so they are scaled per channel, over ``group_size`` tokens; values per token, over
    ``group_size`` channels (the whole head where it is smaller). Tokens wait in a plain tail of at least ``residual`` tokens until a
    whole group can be written; a code written does not change.
    """

    title = "integer codes"
    paper = "KIVI, arXiv 2402.02750"

    bits: int = param(8, choices=(8, 4, 2), unit="bits", help="Bits of one code. Scales and zero points come on top.")
    group_size: int = param(
        64, low=8, high=1024, step=8, unit="numbers", title="group size", help="How many numbers share one scale."
    )
    key_axis: str = param(
        "channel",
        choices=("channel", "token", "tensor"),
        title="keys scaled per",
        help="What shares a key's scale: a channel over several tokens, a token's channels, or everything (the control that fails).",
    )
    residual: int = param(
        0, low=0, high=4096, step=32, unit="tokens", covers=True, help="The newest tokens that stay plain, at least."
    )
    scales: str = param("float16", choices=tuple(SCALES), help="The format of scales and zero points.")

    def state(self, shape: LayerShape) -> StoreState:
        for dim in (shape.key_dim, shape.value_dim):
            self._channels(dim)
        return IntState(self, shape)

    def _channels(self, dim: int) -> int:
        """Channels that share a per-token scale in a head of ``dim``. Raises ``ValueError`` where the group does not divide it."""
        size = min(self.group_size, dim)
        if dim % size:
            fits = [d for d in range(8, dim + 1) if dim % d == 0]
            raise ValueError(
                f"Int: group_size={self.group_size} does not divide the head dim {dim} (allowed: {', '.join(map(str, fits))} or more)"
            )
        if dim * self.bits % 8:
            raise ValueError(
                f"Int: bits={self.bits} cannot be packed for the head dim {dim}: it must be a multiple of {8 // self.bits}"
            )
        return size

    def due(self, tail: int) -> int:
        """How many of ``tail`` plain tokens are to be written as codes now."""
        ready = max(0, tail - self.residual)
        return ready if self.key_axis == "token" else ready // self.group_size * self.group_size

    def predict(self, rows: int, shape: LayerShape, evicting: bool = False) -> dict[str, float]:
        heads, item = shape.batch * shape.kv_heads, SCALES[self.scales].itemsize
        coded = self.due(rows)
        grouped = self.key_axis != "token"
        if evicting and grouped:  # the tail is between empty and a whole group, and codes make room for it
            coded = max(0, coded - (self.group_size - 1) // 2)
        codes = coded * (shape.key_dim + shape.value_dim) * self.bits / 8
        per_token = coded * shape.value_dim / self._channels(shape.value_dim)
        if self.key_axis == "token":
            keys = coded * shape.key_dim / self._channels(shape.key_dim)
        else:
            keys = coded / self.group_size * (shape.key_dim if self.key_axis == "channel" else 1 / shape.kv_heads)
        plain = (rows - coded) * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        parts = {"codes": heads * codes, "scales": heads * (keys + per_token) * 2 * item, "residual": heads * plain}
        return parts | {"tables": heads * coded * 4.0} if evicting and grouped else parts


class IntState(StoreState):
    def __init__(self, settings: Int, shape: LayerShape) -> None:
        super().__init__(shape)
        self.settings = settings
        dtype, bits = SCALES[settings.scales], settings.bits
        key_group = settings._channels(shape.key_dim) if settings.key_axis == "token" else settings.group_size
        self.keys = QuantizedSide(bits, settings.key_axis, key_group, dtype)
        self.values = QuantizedSide(bits, "token", settings._channels(shape.value_dim), dtype)
        self.tail_keys, self.tail_values = Buffer("residual"), Buffer("residual")

    def __len__(self) -> int:
        return len(self.keys) + len(self.tail_keys)

    @property
    def frozen(self) -> int:
        return len(self.keys)

    @property
    def repacked(self) -> int:
        """Tokens whose keys were written again since a group fell under half its tokens, or a crop cut through it."""
        return self.keys.repacked

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.tail_keys.append(keys)
        self.tail_values.append(values)

    def settle(self) -> None:
        due = self.settings.due(len(self.tail_keys))
        if not due:
            return
        for side, tail in ((self.keys, self.tail_keys), (self.values, self.tail_values)):
            rows = tail.view()
            side.append(rows[:, :, :due])
            if due == len(tail):
                tail.clear()
            else:
                tail.set(rows[:, :, due:].clone())

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        if start < self.frozen:
            return self.keys.score(query.float(), start, stop)
        rows = self.tail_keys.view()[:, :, start - self.frozen : stop - self.frozen]
        return query.float() @ rows.float().transpose(-1, -2)

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        if start < self.frozen:
            return self.values.mix(weights.float(), start, stop)
        return weights.float() @ self.tail_values.view()[:, :, start - self.frozen : stop - self.frozen].float()

    def layout(self) -> tuple[Tensor | Codes, Tensor | Codes, Tensor | None, Tensor | None]:
        if not self.frozen:
            return self.tail_keys.view(), self.tail_values.view(), None, None
        tail = (self.tail_keys.view(), self.tail_values.view()) if len(self.tail_keys) else (None, None)
        return self.keys.layout(), self.values.layout(), *tail

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        size = block_rows(self.shape)
        if self.settings.key_axis != "token":
            size = -(-size // self.settings.group_size) * self.settings.group_size
        if rows <= cpu.MAX_ROWS and self.shape.device.type == "cpu" and cpu.available():  # nothing is unpacked: one sweep
            size = max(size, len(self))
        yield from split(0, self.frozen, size)
        yield from split(self.frozen, len(self), size)

    def select(self, index: Tensor) -> None:
        frozen = self.frozen
        border = int((index[0, 0] < frozen).sum())
        for side, tail in ((self.keys, self.tail_keys), (self.values, self.tail_values)):
            if border == 0:
                side.clear()
            elif border < frozen:
                side.select(index[..., :border])
            if border == index.shape[2]:
                tail.clear()
            elif border < index.shape[2]:
                tail.select(index[..., border:] - frozen)

    def truncate(self, rows: int) -> None:
        if rows >= self.frozen:
            self.tail_keys.truncate(rows - self.frozen)
            self.tail_values.truncate(rows - self.frozen)
            return
        whole = rows if self.settings.key_axis == "token" else rows // self.settings.group_size * self.settings.group_size
        dtype = self.shape.dtype
        cut = [side.dense(whole, rows).to(dtype) if rows > whole else None for side in (self.keys, self.values)]
        for side, tail, plain in zip((self.keys, self.values), (self.tail_keys, self.tail_values), cut, strict=True):
            side.truncate(whole)
            tail.clear()
            if plain is not None:
                tail.append(plain)
        self.keys.repacked += rows - whole

    def thaw(self) -> None:
        keys, values = self.dense()
        self.keys.repacked += self.frozen
        self.keys.clear()
        self.values.clear()
        self.tail_keys.set(keys)
        self.tail_values.set(values)

    def buffers(self) -> list[Buffer]:
        return [*self.keys.buffers(), *self.values.buffers(), self.tail_keys, self.tail_values]

    def dense(self) -> tuple[Tensor, Tensor]:
        out = []
        for side, tail in ((self.keys, self.tail_keys), (self.values, self.tail_values)):
            parts = [side.dense().to(self.shape.dtype)] if len(side) else []
            parts += [tail.view()] if len(tail) else []
            out.append(torch.cat(parts, 2))
        return out[0], out[1]
