"""LowRank: keys and values as a few coefficients in a basis made from the first tokens (Eigen Attention, arXiv 2408.05646; Palu, 2407.21118)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.store.base import LayerShape, Store, StoreState
from kvlab.store.coded import CodedState, Flush
from kvlab.store.codes import Coding, QuantizedSide
from kvlab.store.prerope import before_rope
from kvlab.store.side import PlainSide, Side
from kvlab.strategy import param

STEP = 8  # ranks come in steps of so many: that packs at every width


@dataclass(frozen=True)
class LowRank(Store):
    """Each head's keys, and values, as coefficients along the directions in which the first tokens vary most, around their mean.

    The basis is made once, by a singular value decomposition of the tokens there are when the first are written (the prompt, if it is long enough), and
    serves for all later ones. Keys are turned back to before RoPE first: after it their rank is far higher. Values are mixed as coefficients and
    only the result is brought back; keys are rebuilt block by block.
    """

    title = "low rank"
    paper = "Eigen Attention, arXiv 2408.05646"

    rank: int = param(
        32, low=8, high=512, step=STEP, unit="coefficients", help="Coefficients a head keeps of each key and value."
    )
    energy: float = param(
        0.0,
        low=0.0,
        high=1.0,
        step=0.01,
        help="The share of the variance to keep: chooses each layer's ranks, up to `rank`. 0: always `rank`.",
    )
    bits: int = param(
        16,
        choices=(32, 16, 8, 4, 3, 2),
        unit="bits",
        help="Bits of a coefficient: floats, or integer codes with a scale for each direction.",
    )
    group_size: int = param(
        64, low=8, high=1024, step=8, unit="tokens", title="group size", help="How many tokens share a scale."
    )
    values: bool = param(True, help="Values too, not only keys; otherwise values keep all directions.")
    pre_rope: bool = param(True, title="before RoPE", help="Undo the keys' rotary turn first.")
    first: int = param(
        128,
        low=16,
        high=4096,
        step=16,
        unit="tokens",
        title="basis from",
        covers=True,
        help="Tokens the basis is made from, at least; they wait as they are.",
    )
    residual: int = param(0, low=0, high=4096, step=32, unit="tokens", help="The newest tokens that stay plain, at least.")
    sinks_exact: int = param(
        4, low=0, high=64, step=1, unit="tokens", title="exact sinks", help="How many of the first tokens stay plain for good."
    )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"rope"} if self.pre_rope else ())

    def check(self) -> None:
        if self.rank % STEP:
            raise ValueError(
                f"LowRank: rank={self.rank} is not a multiple of {STEP} (allowed: {STEP}, {2 * STEP}, ..., the head dim)"
            )

    @property
    def flush(self) -> Flush:
        return Flush(self.group_size if self.bits <= 8 else 1, self.residual, self.sinks_exact, start=self.first)

    def state(self, shape: LayerShape) -> StoreState:
        sides = [self._side(shape.key_dim, True), self._side(shape.value_dim, self.values)]
        state = CodedState(shape, sides[0], sides[1], self.flush)
        return before_rope(state) if self.pre_rope else state

    def _side(self, dim: int, low: bool) -> LowRankSide:
        if dim % STEP:
            raise ValueError(f"LowRank: a head dim of {dim} is no multiple of {STEP}, which is what it needs")
        floats = {32: torch.float32, 16: torch.float16}.get(self.bits)
        inner = PlainSide("coefficients", floats) if floats else QuantizedSide(Coding(self.bits), "channel", self.group_size)
        return LowRankSide(inner, min(self.rank, dim) if low else dim, self.energy if low else 0.0)

    def predict(self, rows: int, shape: LayerShape, evicting: float = 0.0) -> dict[str, float]:
        """With ``energy`` the ranks depend on the text; this is the most that can be taken."""
        heads, tail = shape.batch * shape.kv_heads, max(0, rows - self.sinks_exact)
        due = self.flush.keys(tail)
        written = float(due) if due >= self.first else 0.0
        if evicting and written and self.bits <= 8:
            written = max(0.0, written - int(evicting * (self.group_size - 1)))
        ranks = [min(self.rank, shape.key_dim), min(self.rank, shape.value_dim) if self.values else shape.value_dim]
        numbers = written * sum(ranks)
        plain = heads * (rows - written) * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        basis = sum(4.0 * dim * (rank + 1) for dim, rank in zip((shape.key_dim, shape.value_dim), ranks, strict=True))
        parts = {"residual": plain, "basis": heads * basis if written else 0.0}
        if self.bits > 8:
            return parts | {"coefficients": heads * numbers * self.bits / 8}
        parts |= {"codes": heads * numbers * self.bits / 8, "scales": heads * numbers / self.group_size * 4.0}
        return parts | {"tables": 2 * heads * written * 4.0} if evicting else parts


class LowRankSide(Side):
    """Keys or values of one layer as coefficients. ``basis``: float32 ``[B, H, D, rank]``, orthonormal columns; ``mean``: ``[B, H, 1, D]``."""

    def __init__(self, inner: PlainSide | QuantizedSide, rank: int, energy: float) -> None:
        self.inner, self.rank, self.energy = inner, rank, energy
        self.axis, self.group_size = inner.axis, inner.group_size
        self.basis, self.mean = Buffer("basis"), Buffer("basis")

    @property
    def repacked(self) -> int:  # type: ignore[override]
        return self.inner.repacked

    @repacked.setter
    def repacked(self, count: int) -> None:
        self.inner.repacked = count

    def __len__(self) -> int:
        return len(self.inner)

    def buffers(self) -> list[Buffer]:
        return [*self.inner.buffers(), self.basis, self.mean]

    def append(self, x: Tensor) -> None:
        x = x.float()
        if not len(self.basis):
            self.learn(x, None)
        self.inner.append((x - self.mean.view()) @ self.basis.view())

    def learn(self, x: Tensor, real: Tensor | None) -> None:
        if len(self.basis):
            return
        x = x.float()
        if not bool(x.isfinite().all()):
            raise ValueError(f"keys or values up to {float(x.abs().max()):.3g} cannot be quantized: no basis (NaN or infinite)")
        weight = torch.ones_like(x[..., :1]) if real is None else real[..., None].float()
        mean = (x * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1)
        sizes, basis = spectrum((x - mean) * weight)
        rank = min(self.rank, basis.shape[3])
        if self.energy:
            rank = min(rank, rank_for(sizes, self.energy))
        self.mean.set(mean)
        self.basis.set(basis[..., :rank].contiguous())

    def score(self, query: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.score(query @ self.basis.view(), start, stop) + query @ self.mean.view().mT

    def mix(self, weights: Tensor, start: int, stop: int) -> Tensor:
        mixed = self.inner.mix(weights, start, stop) @ self.basis.view().mT
        return mixed + weights.sum(-1, keepdim=True) * self.mean.view()

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.inner.rows(start, stop) @ self.basis.view().mT + self.mean.view()

    def take(self, index: Tensor) -> Tensor:
        return self.inner.take(index) @ self.basis.view().mT + self.mean.view()

    def layout(self, start: int = 0, stop: int | None = None) -> None:
        return None  # no kernel reads coefficients yet

    def select(self, index: Tensor) -> None:
        self.inner.select(index)

    def truncate(self, rows: int) -> None:
        self.inner.truncate(rows)

    def forget(self) -> None:
        self.clear()
        self.basis.clear()
        self.mean.clear()

    def clear(self) -> None:
        self.inner.clear()  # the basis stays: it was made from more tokens than will come at once again


def spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows ``[B, H, n, D]``, as they are: squared singular values ``[B, H, D]``, falling, and their directions ``[B, H, D, D]`` in columns."""
    x = x.double()
    values, vectors = torch.linalg.eigh(x.mT @ x)
    return values.flip(-1).clamp(min=0).float(), vectors.flip(-1).float()


def rank_for(sizes: Tensor, energy: float) -> int:
    """The smallest rank, a multiple of 8, that keeps a share ``energy`` of the squared singular values ``[B, H, D]``, over all heads together."""
    sizes = sizes.double().sum((0, 1))
    share = sizes.cumsum(0) / sizes.sum().clamp(min=1e-30)
    rank = int((share < energy - 1e-9).sum()) + 1
    return min(-(-rank // STEP) * STEP, len(sizes))
