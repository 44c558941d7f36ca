"""One decode step of one layer, against the caches people use instead: update and attention apart, alternating in one process.

Every contender holds the same tokens and gets the same query. Times are medians; only ratios within one run mean something.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from kvlab import attention
from kvlab.cache import KVCache
from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.lab import Progress
from kvlab.measure.machine import machine
from kvlab.store.dense import Dense
from kvlab.store.fp8 import Fp8
from kvlab.store.int import Int
from kvlab.store.prerope import PreRope
from kvlab.store.rotated import Rotated
from kvlab.strategy import Strategy

#: Called with new keys, new values and the query; returns seconds of update and of attention.
Step = Callable[[Tensor, Tensor, Tensor], tuple[float, float]]


@dataclass(frozen=True)
class Row:
    """Median seconds of one contender. ``error``: relative distance of its output from the exact one over all tokens, float64; on random numbers, where
    no token matters more than another, a budget's is large."""

    name: str
    update: float
    attention: float
    error: float

    @property
    def total(self) -> float:
        return self.update + self.attention


@dataclass(frozen=True)
class Shape:
    """The geometry of the step; the default is Llama-3.1-8B's layer at 8,192 tokens."""

    query_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("query_heads", "kv_heads", "dim", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range (allowed: 1 or more)")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} is no multiple of kv_heads={self.kv_heads}")


def bench_attention(
    shape: Shape | None = None, *, steps: int = 40, peers: bool = True, progress: Progress | None = None
) -> list[Row]:
    """Time ``steps`` decode steps of every contender, in turn within each round, after three that are not counted.

    ``peers``: transformers' own caches beside ours (``QuantizedCache`` where its backends are installed).
    Raises ``ValueError`` for fewer than 1 step.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} is out of range (allowed: 1 or more)")
    shape = shape or Shape()
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, n: int) -> Tensor:
        return torch.randn(1, heads, n, shape.dim, generator=generator)

    keys, values = draw(shape.kv_heads, shape.tokens), draw(shape.kv_heads, shape.tokens)
    contenders = _ours(shape, keys, values) | (_peers(shape, keys, values, steps + 3) if peers else {})
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    with torch.inference_mode():
        for number in range(steps + 3):
            if progress:
                progress("decode steps", number, steps + 3)
            new = (draw(shape.kv_heads, 1), draw(shape.kv_heads, 1), draw(shape.query_heads, 1))
            keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
            for name, contender in contenders.items():
                taken[name].append(contender.step(*new))
        exact = _exact(new[2], keys, values)
    rows = []
    for name, contender in contenders.items():
        update, attend = zip(*taken[name][3:], strict=True)
        error = float((contender.out.double() - exact).norm() / exact.norm())
        rows.append(Row(name, statistics.median(update), statistics.median(attend), error))
    return rows


def _exact(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``[B, Hq, 1, D]`` in float64."""
    group = query.shape[1] // keys.shape[1]
    k, v = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    return (query.double() @ k.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ v


class _Contender:
    out: Tensor

    def step(self, key: Tensor, value: Tensor, query: Tensor) -> tuple[float, float]:
        raise NotImplementedError


class _Ours(_Contender):
    def __init__(self, model: Any, strategy: Strategy, keys: Tensor, values: Tensor) -> None:
        self.cache = KVCache(model, strategy)
        self.layer: Any = self.cache.layers[0]
        self.rule = attention.Rule(causal_mask_function, None, {})
        self.layer.update(keys, values)
        self.layer._commit(torch.zeros(keys.shape[:3]) if self.layer.observes else None)

    def step(self, key: Tensor, value: Tensor, query: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        self.layer.update(key, value)
        updated = time.perf_counter()
        self.out, mass, _ = attention.attend(self.layer, query, self.rule, query.shape[-1] ** -0.5)
        attended = time.perf_counter()
        self.layer._commit(mass)
        return updated - start + time.perf_counter() - attended, attended - updated


class _Peer(_Contender):
    """A transformers cache, then transformers' own SDPA."""

    def __init__(self, model: Any, cache: Any, keys: Tensor, values: Tensor, room: int = 0) -> None:
        self.module, self.cache, self.room, self.seen = model.model.layers[0].self_attn, cache, room, keys.shape[2]
        cache.update(keys, values, 0)

    def step(self, key: Tensor, value: Tensor, query: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        keys, values = self.cache.update(key, value, 0)
        self.seen += 1
        updated = time.perf_counter()
        mask = torch.arange(self.room).lt(self.seen).view(1, 1, 1, -1) if self.room else None
        out, _ = sdpa_attention_forward(self.module, query, keys, values, mask, scaling=query.shape[-1] ** -0.5)
        self.out = out.transpose(1, 2)
        return updated - start, time.perf_counter() - updated


def _model(shape: Shape) -> Any:
    config = LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.dim, max_position_embeddings=2 * shape.tokens + 64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _ours(shape: Shape, keys: Tensor, values: Tensor) -> dict[str, _Contender]:
    model = _model(shape)
    stores = {
        "kvlab dense": Dense(),
        **{f"kvlab int{bits}": Int(bits=bits) for bits in (8, 4, 3, 2)},
        "kvlab fp8": Fp8(),
        "kvlab int4, keys per token": Int(bits=4, key_axis="token"),
        "kvlab int4, keys per token, rotated": Rotated(),
        "kvlab int4, keys before RoPE": PreRope(inner=Int(bits=4)),
    }
    strategies = {name: Strategy(store=store) for name, store in stores.items()}
    heavy = HeavyHitter(budget=512)
    strategies |= {
        "kvlab dense, H2O with budget 512": Strategy(keep=heavy),
        "kvlab int4, H2O with budget 512": Strategy(keep=heavy, store=Int(bits=4)),
    }
    return {name: _Ours(model, strategy, keys, values) for name, strategy in strategies.items()}


def _peers(shape: Shape, keys: Tensor, values: Tensor, steps: int) -> dict[str, _Contender]:
    model = _model(shape)
    room = shape.tokens + steps
    static = StaticCache(config=model.config, max_cache_len=room)
    out: dict[str, _Contender] = {
        "DynamicCache": _Peer(model, DynamicCache(config=model.config), keys, values),
        "StaticCache": _Peer(model, static, keys, values, room),
    }
    for backend, bits in (("quanto", 4), ("hqq", 8), ("hqq", 4)):
        if not _installed({"quanto": "optimum-quanto", "hqq": "hqq"}[backend]):
            continue
        axis = {"axis_key": 0, "axis_value": 0} if backend == "quanto" else {"axis_key": 1, "axis_value": 1}
        cache = QuantizedCache(backend, model.config, nbits=bits, q_group_size=64, **axis)
        out[f"QuantizedCache {backend} int{bits}"] = _Peer(model, cache, keys, values)
    return out


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def record(path: str | Path, rows: list[Row], tokens: int, steps: int) -> None:
    """Add the table to a JSON-lines file, one line a run, with machine, date and command."""
    line = {
        "rows": [dataclasses.asdict(row) | {"total": row.total} for row in rows],
        "tokens": tokens,
        "steps": steps,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "command": f"kvlab bench attention --tokens {tokens} --steps {steps}",
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
