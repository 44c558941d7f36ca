"""Pages: keys and values of many requests in the blocks of one pool, and attention over them.

A block is written down when it is full: as it is, or as codes. Until then its tokens are plain. A query reads the blocks before its own as they were written
down, and its own block plain; so what a token sees depends on nothing but the tokens before it: not on pieces, on neighbours, or on who read a block first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlab import attention
from kvlab.cache import KVCache
from kvlab.geometry import Geometry
from kvlab.keep.window import Window
from kvlab.serving.scheduler import Work
from kvlab.store.codes import Coding, quantize
from kvlab.store.dense import Dense
from kvlab.store.fp8 import Fp8
from kvlab.store.int import Int
from kvlab.strategy import Strategy
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes, dequantize, pack


@dataclass(frozen=True)
class Format:
    """How a full block is written. ``coding`` None: as the model made it. ``key_axis``: "channel" where the tokens of a block share scales, else "token"."""

    coding: Coding | None = None
    key_axis: str = "token"
    groups: tuple[int, int] = (0, 0)  # channels that share a scale: of keys (token axis), of values

    def bytes(self, size: int, key_dim: int, value_dim: int, plain: int) -> float:
        """Of one head's block of ``size`` tokens; ``plain``: bytes of a plain number."""
        if self.coding is None:
            return float(size * (key_dim + value_dim) * plain)
        numbers = self.coding.scale_dtype.itemsize * (2 if self.coding.zeros else 1)
        codes = size * (key_dim + value_dim) * self.coding.bits / 8
        scales = key_dim if self.key_axis == "channel" else size * key_dim / self.groups[0]
        return codes + numbers * (scales + size * value_dim / self.groups[1])


def strategy_of(strategy: Strategy | None) -> Strategy:
    """None: the full cache. Raises ``ValueError`` for what is no strategy."""
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ValueError(
            f"strategy={strategy!r} is no strategy (allowed: kvlab.Strategy(...); kvlab.measure.named.named() has some by their names)"
        )
    return strategy or Strategy()


def format_of(strategy: Strategy, size: int, key_dim: int, value_dim: int) -> Format:
    """Raises ``ValueError`` for a strategy that does not go into blocks of ``size`` tokens: which part, and why."""
    store, kinds = strategy.store, "Dense, Int with 8 or 4 bits, Fp8"
    keep = type(strategy.keep).__name__
    if keep not in ("Everything", "Window"):
        raise ValueError(
            f"keep.{keep} cannot be paged: it drops single tokens, and blocks are given back whole (allowed: Everything, Window)"
        )
    if isinstance(strategy.keep, Window) and strategy.keep.positions != "true":
        raise ValueError("Window: positions='cache' cannot be paged (allowed: true)")
    if type(strategy.place).__name__ != "Resident":
        raise ValueError("a place cannot be paged: whole requests are put away instead, with preempt='swap' (allowed: Resident)")
    if type(store) is Dense:
        return Format()
    if type(store) is Fp8:
        if store.residual:
            raise ValueError(
                f"Fp8: residual={store.residual} cannot be paged: the tokens of the last block are plain already (allowed: 0)"
            )
        return Format(Coding(8, torch.float16, format=store.format), "token", (key_dim, value_dim))
    if type(store) is Int and store.bits in (8, 4):
        if store.residual or store.sinks_exact:
            raise ValueError(
                f"Int: residual={store.residual} and sinks_exact={store.sinks_exact} cannot be paged: the tokens of the last block are plain already (allowed: 0)"
            )
        if store.key_axis == "tensor":
            raise ValueError("Int: key_axis='tensor' cannot be paged (allowed: channel, token)")
        groups = (min(store.group_size, key_dim), min(store.group_size, value_dim))
        if key_dim % groups[0] or value_dim % groups[1]:
            raise ValueError(f"Int: group_size={store.group_size} does not divide the head dims {key_dim} and {value_dim}")
        return Format(store.coding, store.key_axis, groups)
    raise ValueError(f"store.{type(store).__name__} cannot be paged (allowed: {kinds})")


class _Side:
    """Keys or values of one layer: full blocks, and plain tokens of those that are not full yet."""

    def __init__(
        self, blocks: int, heads: int, size: int, dim: int, like: Tensor, coding: Coding | None, axis: str, group: int
    ) -> None:
        self.size, self.coding, self.axis, self.group = size, coding, axis, group
        self.plain = torch.zeros((blocks, heads, size, dim) if coding is None else (0,), dtype=like.dtype, device=like.device)
        self.open: dict[int, Tensor] = {}  # block -> its tokens so far, [heads, n, dim], where full ones are codes
        if coding is not None:
            scales = (blocks, heads, 1, dim) if axis == "channel" else (blocks, heads, size, dim // group)
            self.codes = torch.zeros((blocks, heads, size, dim * coding.bits // 8), dtype=torch.uint8, device=like.device)
            self.scale = torch.zeros(scales, dtype=coding.scale_dtype, device=like.device)
            self.zero = torch.zeros_like(self.scale) if coding.zeros else None

    def put(self, x: Tensor, blocks: Tensor, places: Tensor) -> None:
        """Plain tokens ``x`` ``[heads, n, dim]``, each to its place of its block."""
        self.plain[blocks, :, places] = x.transpose(0, 1).to(self.plain.dtype)

    def write(self, x: Tensor, table: Sequence[int], start: int) -> Tensor:
        """Where full blocks are codes: tokens ``x`` ``[heads, n, dim]`` at ``start`` of a request -> the plain tokens from the beginning of the first one's block on."""
        begin, end = start // self.size * self.size, start + x.shape[1]
        if begin < start:
            x = torch.cat([self.open[table[begin // self.size]], x], 1)
        full = (end - begin) // self.size
        if full:
            blocks = torch.tensor(table[begin // self.size : begin // self.size + full])
            self._encode(x[:, : full * self.size].unflatten(1, (full, self.size)).transpose(0, 1), blocks)
            for block in blocks.tolist():
                self.open.pop(block, None)
        if begin + full * self.size < end:
            self.open[table[begin // self.size + full]] = x[:, full * self.size :].clone()
        return x

    def _encode(self, x: Tensor, blocks: Tensor) -> None:
        """Full blocks ``[n, heads, size, dim]``."""
        assert self.coding is not None
        grouped, dims = (x, (2,)) if self.axis == "channel" else (x.unflatten(3, (-1, self.group)), (4,))
        codes, scale, zero = quantize(grouped, self.coding, dims)
        self.codes[blocks] = pack(codes.reshape(x.shape), self.coding.bits)
        self.scale[blocks] = scale if self.axis == "channel" else scale.squeeze(4)
        if zero is not None and self.zero is not None:
            self.zero[blocks] = zero if self.axis == "channel" else zero.squeeze(4)

    def read(self, table: Tensor) -> Tensor:
        """Whole blocks ``[..., n]`` of numbers -> ``[..., heads, n * size, dim]``."""
        if self.coding is None:
            return self.plain[table].transpose(-4, -3).flatten(-3, -2)
        rows = dequantize(self.rows(table if table.dim() == 2 else table[None]))
        return rows[0] if table.dim() == 1 else rows

    def rows(self, table: Tensor) -> Codes:
        """Codes of whole blocks ``[rows, n]``, one block after the other: as of ``[rows, heads, n * size, dim]``."""
        assert self.coding is not None

        def row(x: Tensor) -> Tensor:
            return x[table].transpose(1, 2).flatten(2, 3)  # [rows, heads, n * size (or n), ...]

        zero = None if self.zero is None else row(self.zero)
        group = self.size if self.axis == "channel" else self.group
        return Codes(row(self.codes), row(self.scale), zero, self.coding.bits, self.axis, group, None, self.coding.format)

    def stored(self) -> Tensor | Codes:
        """All blocks, as kernels take them."""
        if self.coding is None:
            return self.plain
        group = self.size if self.axis == "channel" else self.group
        return Codes(self.codes, self.scale, self.zero, self.coding.bits, self.axis, group, None, self.coding.format)

    def copy(self, source: int, target: int, count: int) -> None:
        """The first ``count`` tokens of a block to another one."""
        if self.coding is None:
            self.plain[target, :, :count] = self.plain[source, :, :count]
        else:
            self.open[target] = self.open[source][:, :count].clone()

    def tensors(self) -> list[Tensor]:
        """What lies in blocks, first dim the block."""
        if self.coding is None:
            return [self.plain]
        return [self.codes, self.scale, *([] if self.zero is None else [self.zero])]


class Step:
    """What the layers are told before the model runs: ``works`` in the order of the packed tokens, ``starts``: where the tokens of each begin among them. What
    all layers need of it is worked out once.
    """

    def __init__(self, works: list[Work], size: int, device: torch.device) -> None:
        self.works, self.size, self.device = works, size, device
        self.starts = list(itertools.accumulate((work.count for work in works), initial=0))[:-1]

    @functools.cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Of each packed token: its block, and its place there, int64 ``[tokens]``."""
        places = [(work.request.blocks, place) for work in self.works for place in range(work.start, work.start + work.count)]
        blocks, at = [table[place // self.size] for table, place in places], [place % self.size for _, place in places]
        return self._tensor(blocks), self._tensor(at)

    @functools.cached_property
    def singles(self) -> list[int]:
        """Which works are one token."""
        return [number for number, work in enumerate(self.works) if work.count == 1]

    @functools.cached_property
    def single_rows(self) -> Tensor:
        """Their places among the packed tokens."""
        return self._tensor([self.starts[number] for number in self.singles])

    @functools.cached_property
    def single_last(self) -> Tensor:
        """Their places in their requests, ``[n, 1]``."""
        return self._tensor([self.works[number].start for number in self.singles]).view(-1, 1)

    @functools.cached_property
    def single_table(self) -> tuple[Tensor, Tensor]:
        """Their blocks, as many for each (0 where there is none), and which of them are there, ``[n, blocks]``."""
        return self.table([self.works[number] for number in self.singles])

    def table(self, works: list[Work], whole: int | None = None) -> tuple[Tensor, Tensor]:
        """The blocks of ``works``, ``whole`` of each or as many as the longest has tokens for."""
        most = max(-(-(work.start + work.count) // self.size) for work in works) if whole is None else whole
        rows = [work.request.blocks[:most] for work in works]
        table = self._tensor([row + [-1] * (most - len(row)) for row in rows]).view(len(works), most)
        return table.clamp(min=0), table >= 0

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


class PagedLayer(CacheLayerMixin):
    """One layer of :class:`PagedCache`, as transformers and kvlab's attention see it."""

    is_croppable = False
    is_sliding = False
    is_compileable = False
    supports_early_init = False
    is_initialized = True

    def __init__(self, cache: PagedCache, number: int, keys: _Side, values: _Side) -> None:
        super().__init__()
        self.cache, self.number, self.key_pages, self.value_pages = cache, number, keys, values
        self.new: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    @property
    def seen(self) -> int:
        """As attention checks positions: of the last packed token's request."""
        last = self.cache.step.works[-1]
        return last.start + last.count

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[attention.Handle, attention.Handle]:
        self.new = (key_states[0], value_states[0])
        handle = attention.Handle(self)  # type: ignore[arg-type]
        return handle, handle

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def abandon(self) -> None:
        self.new = None

    def attend(self, query: Tensor, rule: attention.Rule, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Write the new tokens to their blocks, then attend: queries ``[1, Hq, packed, D]`` -> ``[1, Hq, packed, Dv]``."""
        assert self.new is not None
        keys, values = self.new
        self.new = None
        step, coded = self.cache.step, self.cache.coding is not None
        out = query.new_empty((1, query.shape[1], query.shape[2], values.shape[2]))
        if not coded:
            self.key_pages.put(keys, *step.slots)
            self.value_pages.put(values, *step.slots)
        beside: list[tuple[Tensor, Tensor]] = []  # of works of one token: their own blocks, plain, where the others are codes
        for start, work in zip(step.starts, step.works, strict=True):
            own = slice(start, start + work.count)
            near = keys[:, own], values[:, own]
            if coded:
                table = work.request.blocks
                near = self.key_pages.write(near[0], table, work.start), self.value_pages.write(near[1], table, work.start)
            if work.count > 1:
                out[:, :, own] = self._piece(query[:, :, own], work, *near, rule, scale, softcap, sinks)
            elif coded:
                beside.append(near)
        if step.singles:
            out[0, :, step.single_rows] = self._singles(query[0, :, step.single_rows], beside, rule, scale, softcap, sinks)
        return out

    def _singles(
        self,
        query: Tensor,
        beside: list[tuple[Tensor, Tensor]],
        rule: attention.Rule,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """One query each, ``[Hq, n, D]``, of several requests of any lengths -> ``[Hq, n, Dv]``; ``beside``: their own blocks, plain, where the others are codes.

        By the Triton kernel, which reads blocks where they lie; else as machine code reads codes, or through torch, after the blocks of a request were put in a row.
        """
        step, (table, there) = self.cache.step, self.cache.step.single_table
        last, size = step.single_last, step.size
        length = last // size * size if beside else last + 1  # tokens in blocks as they were written
        places = torch.arange(table.shape[1] * size, device=query.device).view(1, -1).expand(len(table), -1)
        seen = there.repeat_interleave(size, 1) & (places < length)
        near = None
        if beside:
            counts = [keys.shape[1] for keys, _ in beside]
            near = _stacked([keys for keys, _ in beside], max(counts)), _stacked([values for _, values in beside], max(counts))
            columns = torch.arange(max(counts), device=query.device).view(1, -1)
            places = torch.cat([places, length + columns], 1)
            seen = torch.cat([seen, columns < torch.tensor(counts, device=query.device).view(-1, 1)], 1)
        whole = near is None and self.cache.window is None and rule.causal
        if not whole:
            seen = seen & self._seen(last, places)
            if not rule.causal:
                seen = seen & self._allowed(rule, last, places)
        single = query.transpose(0, 1).unsqueeze(2)
        if attention.scorable(single, single if near is None else near[1]):
            from kvlab_kernels.decode import paged_decode_attention

            bias = (
                None if whole else torch.zeros(seen.shape, device=query.device).masked_fill(~seen, float("-inf"))[:, None, None]
            )
            out, _ = paged_decode_attention(
                single, self.key_pages.stored(), self.value_pages.stored(), table.int().unsqueeze(1), scaling=scale, length=length[:, 0].int(), bias=bias,
                softcap=softcap, sinks=sinks, residual_k=None if near is None else near[0], residual_v=None if near is None else near[1],
            )  # fmt: skip
        elif near is not None and cpu.serves(single, self.key_pages.stored()) and cpu.serves(single, self.value_pages.stored()):
            out = _attend_codes(
                single, self.key_pages.rows(table), self.value_pages.rows(table), *near, seen, scale, softcap, sinks
            )
        else:
            k, v = self.key_pages.read(table), self.value_pages.read(table)  # [n, Hk, blocks * size, D]
            if near is not None:
                k, v = torch.cat([k.to(near[0].dtype), near[0]], 2), torch.cat([v.to(near[1].dtype), near[1]], 2)
            out = _attend(single, k, v, seen[:, None, None], scale, softcap, sinks)
        return out.squeeze(2).transpose(0, 1)

    def _piece(
        self,
        query: Tensor,
        work: Work,
        keys: Tensor,
        values: Tensor,
        rule: attention.Rule,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Several queries of one request, ``[1, Hq, n, D]``; ``keys``, ``values``: plain, from the beginning of its first query's block on (codes), or new ones."""
        size, end = self.cache.block_size, work.start + work.count
        if work.start == 0 and self.cache.coding is None and self.cache.window is None and attention.plain(rule, softcap, sinks):
            group = query.shape[1] > keys.shape[0]
            return F.scaled_dot_product_attention(
                query, keys[None], values[None], is_causal=work.count > 1, scale=scale, enable_gqa=group
            )
        table, there = self.cache.step.table([work], None if self.cache.coding is None else end // size)
        places = torch.arange(table.shape[1] * size, device=query.device).view(1, -1)
        queries = torch.arange(work.start, end, device=query.device).view(-1, 1)
        seen = self._seen(queries, places) & there.repeat_interleave(size, 1)
        k, v = self.key_pages.read(table[0]), self.value_pages.read(table[0])
        if self.cache.coding is not None:  # blocks before the query's own as they were written, its own plain
            own = queries // size * size
            near = torch.arange(work.start // size * size, end, device=query.device).view(1, -1)
            seen = torch.cat([(places < own) & seen, (near >= own) & self._seen(queries, near)], 1)
            places = torch.cat([places, near], 1)
            k, v = torch.cat([k.to(keys.dtype), keys], 1), torch.cat([v.to(values.dtype), values], 1)
        if not rule.causal:
            seen = seen & self._allowed(rule, queries, places)
        return _attend(query, k[None], v[None], seen[None, None], scale, softcap, sinks)

    def _seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Causal, and within the strategy's window or among its sinks."""
        seen = keys <= queries
        if self.cache.window is not None:
            seen = seen & ((keys >= queries - self.cache.window) | (keys < self.cache.sinks))
        return seen

    def _allowed(self, rule: attention.Rule, queries: Tensor, keys: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=queries.device)
        allowed = rule.allowed(zero, zero, queries, keys)
        return allowed if isinstance(allowed, Tensor) else torch.tensor(allowed, device=queries.device)


def _attend(
    query: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """``query`` ``[n, Hq, q, D]``, keys and values ``[n, Hk, m, D]``, ``seen`` bool ``[n, 1, q, m]`` -> ``[n, Hq, q, Dv]``."""
    group = query.shape[1] // k.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, k.to(query.dtype), v.to(query.dtype), attn_mask=seen, scale=scale, enable_gqa=group > 1
        )
    grouped = query.unflatten(1, (k.shape[1], group)).float()
    scores = grouped @ k.float().unsqueeze(2).mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = attention._softmax(scores.masked_fill(~seen.unsqueeze(1), float("-inf")), sinks)
    return (weights @ v.float().unsqueeze(2)).flatten(1, 2).to(query.dtype)


def _attend_codes(
    query: Tensor,
    k: Codes,
    v: Codes,
    near_k: Tensor,
    near_v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As :func:`_attend` for one query each: ``k``, ``v`` of ``[n, Hk, m, D]`` are read as codes, then come plain ``near_k``, ``near_v``; ``seen`` bool ``[n, m + r]``."""
    stored, grouped = k.codes.shape[2], query[:, :, 0].unflatten(1, (near_k.shape[1], -1)).float()  # [n, Hk, G, D]
    scores = torch.cat([cpu.score(grouped, k), grouped @ near_k.float().mT], 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = attention._softmax(scores.masked_fill(~seen[:, None, None], float("-inf")).unsqueeze(3), sinks).squeeze(3)
    out = weights[..., stored:] @ near_v.float()
    if stored:
        out += cpu.mix(weights[..., :stored].contiguous(), v)
    return out.flatten(1, 2).unsqueeze(2).to(query.dtype)


def _stacked(rows: list[Tensor], count: int) -> Tensor:
    """``[heads, up to count, dim]`` each -> ``[n, heads, count, dim]``, zeros behind."""
    made = rows[0].new_zeros((len(rows), rows[0].shape[0], count, rows[0].shape[2]))
    for number, row in enumerate(rows):
        made[number, :, : row.shape[1]] = row
    return made


class PagedCache(Cache):
    """All layers' pages. The engine sets ``step`` before each forward pass over the packed tokens of all requests.

    Raises ``ValueError`` for a strategy that cannot be paged, ``UnsupportedModel`` as :class:`kvlab.KVCache`, whose checks it shares.
    """

    def __init__(self, model: torch.nn.Module, strategy: Strategy, blocks: int, block_size: int) -> None:
        probe = KVCache(model, Strategy())
        self._plain, self.block_size, self.step = probe, block_size, Step([], block_size, probe.device)
        keep = strategy.keep
        self.window: int | None = keep.size if isinstance(keep, Window) else None
        self.sinks = keep.sinks if isinstance(keep, Window) else 0
        shapes = shapes_of(model)
        like = torch.empty(0, dtype=next(model.parameters()).dtype, device=probe.device)
        layers = []
        for number, (heads, key_dim, value_dim) in enumerate(shapes):
            made = format_of(strategy, block_size, key_dim, value_dim)
            self.coding = made.coding
            keys = _Side(blocks, heads, block_size, key_dim, like, made.coding, made.key_axis, made.groups[0])
            values = _Side(blocks, heads, block_size, value_dim, like, made.coding, "token", made.groups[1])
            layers.append(PagedLayer(self, number, keys, values))
        super().__init__(layers=layers)

    def begin(self, works: list[Work]) -> None:
        """Before each forward pass: what its packed tokens are."""
        self.step = Step(works, self.block_size, self._plain.device)

    def check_module(self, module: torch.nn.Module) -> None:
        self._plain.check_module(module)

    @property
    def model(self) -> torch.nn.Module:
        return self._plain.model

    @property
    def bytes(self) -> int:
        """Of all blocks, and of the plain tokens beside them."""
        sides = [side for layer in self.layers for side in (layer.key_pages, layer.value_pages)]
        return sum(x.nbytes for side in sides for x in (*side.tensors(), *side.open.values()))

    def copy(self, source: int, target: int, count: int) -> None:
        for layer in self.layers:
            layer.key_pages.copy(source, target, count)
            layer.value_pages.copy(source, target, count)

    def take_out(self, blocks: list[int]) -> list[list[Tensor]]:
        """The content of blocks, in the host's memory: of each layer and side its tensors, then the plain tokens of blocks that are not full."""
        saved = []
        for layer in self.layers:
            for side in (layer.key_pages, layer.value_pages):
                saved.append(
                    [x[blocks].cpu() for x in side.tensors()] + [side.open[block].cpu() for block in blocks if block in side.open]
                )
        return saved

    def bring_back(self, blocks: list[int], saved: list[list[Tensor]]) -> None:
        """The inverse of :meth:`take_out`, into other blocks."""
        for layer in self.layers:
            for side in (layer.key_pages, layer.value_pages):
                found = saved.pop(0)
                for x, own in zip(side.tensors(), found, strict=False):
                    x[blocks] = own.to(x.device)
                for own in found[len(side.tensors()) :]:  # only the last block may not be full
                    side.open[blocks[-1]] = own.to(self._plain.device)


def shapes_of(model: torch.nn.Module) -> list[tuple[int, int, int]]:
    """KV heads, key dim and value dim of each layer that has a cache of its own."""
    return [
        (layer.kv_heads, layer.key_dim, layer.value_dim) for layer in Geometry.from_config(model.config).layers if layer.kv_heads
    ]
