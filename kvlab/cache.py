"""KVCache: a transformers Cache whose layers keep, store and place tokens as a Strategy says."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvlab import attention, rope
from kvlab.buffer import Buffer
from kvlab.errors import UnsupportedModel
from kvlab.history import History
from kvlab.keep.base import PROTECTED, ROLES, Held, Keep, KeepState, Room, Visible
from kvlab.memory import Memory, Part
from kvlab.store.base import LayerShape, StoreState, fitting, real_tokens
from kvlab.strategy import Strategy
from kvlab.timeline import Timeline

DRAFT = 256  # no draft is longer: what has not been confirmed by then, nobody will take back


class Layer(CacheLayerMixin):
    """One layer of the cache. transformers calls :meth:`update`, then attention calls :meth:`attend`, once a step each.

    The new tokens stay apart, in full precision, until attention is done: so a prompt attends to itself exactly, the keep chooses
    among all of them, and only survivors are written down.
    """

    is_croppable = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False
    store: StoreState
    shape: LayerShape

    def __init__(self, cache: KVCache, number: int, keep: Keep, readers: int = 1) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)  # no circle: a dropped cache frees its memory at once
        self.number, self.keep, self.readers = number, keep, readers
        self.reset()

    @property
    def cache(self) -> KVCache:
        cache = self._cache()
        if cache is None:
            raise RuntimeError("the KVCache of this layer is gone: keep a reference to the cache while the model runs")
        return cache

    # transformers' side

    def reset(self) -> None:
        self.seen = 0  # tokens seen, padding included; positions and masks hang on it, not on what is stored
        self.evicted = False
        self.dropped = 0  # tokens of all rows and heads that were evicted
        self.new_keys: Tensor | None = None
        self.new_values: Tensor | None = None
        self.fresh_evidence: Tensor | None = None  # what the new step gave each key, until the last reader is done
        self.reads = 0
        self.waits = False  # steps may be taken back: nothing is written down or dropped before crop() confirms them
        self.unconfirmed = 0  # tokens since then
        self.columns, self.evidence = Buffer("columns", shared=True), Buffer("evidence")
        self.counts = Buffer("counts")  # how many tokens each row stands for, once any were merged
        self.remembered = KeepState()
        self._rows: dict[float, int] = {}
        self.is_initialized = False
        self.held_bytes = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        b, h, _, dk = key_states.shape
        self.prepare(b, h, dk, value_states.shape[3], key_states.dtype, key_states.device)

    def prepare(self, batch: int, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty store for keys and values of this shape."""
        cache = self.cache
        rope = cache.ropes[self.number] if cache.ropes else None
        self.shape = LayerShape(self.number, len(cache.layers), batch, kv_heads, key_dim, value_dim, dtype, device, rope)
        self.store = cache.strategy.store.state(self.shape)
        self.store.columns = self.columns
        self.remembered = self.keep.state(cache.query_heads or kv_heads, kv_heads, batch, key_dim, rope, self.number)
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.new_keys is not None:
            raise UnsupportedModel(
                f"layer {self.number} was updated twice without attention in between; the model reads its cache in a way kvlab does not "
                "know. Use transformers' own DynamicCache for it."
            )
        if key_states.shape[0] != self.shape.batch:
            raise ValueError(
                f"the batch has {key_states.shape[0]} rows, but this cache holds {self.shape.batch} (allowed: {self.shape.batch}, or reset() first)"
            )
        if key_states.dtype != self.shape.dtype or key_states.device != self.shape.device:
            raise ValueError(
                f"keys are {key_states.dtype} on {key_states.device}, but this cache holds {self.shape.dtype} on {self.shape.device}"
            )
        self.cache.check_step(self, key_states)
        few = self.looks and key_states.shape[2] == 1 and self.watch is None and self.remembered.chooses(len(self.store))
        self.cache.place.fetch(self.number, whole=not few)
        if self.waits and self.unconfirmed > DRAFT:
            self._confirm()
        self.new_keys, self.new_values = key_states, value_states
        self.seen += key_states.shape[2]
        handle = attention.Handle(self)
        return handle, handle

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on every step may be taken back by :meth:`crop`: what would be written as codes, or dropped by the model's own window, waits.

        It waits for the next :meth:`crop`, but not for more than 256 tokens: transformers does not say when assisted decoding is over.
        """
        self.waits = True

    @property
    def record_past(self) -> bool:
        """Whether steps may be taken back. transformers ends it by setting False: what waited is then written down."""
        return self.waits

    @record_past.setter
    def record_past(self, on: bool) -> None:
        if self.waits and not on and self.is_initialized:
            with self.at_hand():
                self._confirm()
        self.waits = on

    def _confirm(self) -> None:
        """No step so far will be taken back: write down, or drop, what waited."""
        self.unconfirmed, limit = 0, self.limit
        if self.may_roll_back and limit is not None and len(self.store) > limit:
            self._select(limit)
        self.store.settle()

    @property
    def may_roll_back(self) -> bool:
        """Whether a model's own window is held wider until a step is confirmed."""
        return self.waits and isinstance(self.keep, Visible)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens: ``tokens_to_remove`` is 0 or negative, as transformers calls it; more than there are empties the layer.

        Evidence that dropped queries added to older keys stays in their sums. Tokens that were written as codes in the meantime stay so, and a group
        that is cut through is written again; after :meth:`activate_past_recording` (assisted decoding does it) drafts leave no trace.
        Raises ``ValueError`` for a positive number, ``RuntimeError`` after eviction.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): how many of the newest tokens go, as 0 or a negative number (transformers' way since 5.0)"
            )
        drop = min(abs(tokens_to_remove), self.seen)
        if drop and self.evicted and not (self.may_roll_back and drop <= len(self.store)):
            raise RuntimeError(
                f"crop({tokens_to_remove}) after eviction: the tokens that would be needed again are gone. Use keep.Everything() where "
                "drafts are taken back (assisted decoding), or reset() the cache."
            )
        if not self.is_initialized or not (drop or self.waits):
            return
        with self.at_hand():
            self.seen -= drop
            rows = len(self.store) - drop
            self.store.truncate(rows)
            self.evidence.truncate(rows)
            self.counts.truncate(rows)
            self.columns.truncate(rows)
            self.remembered.truncate(rows)
            if self.store.padding is not None:
                self.store.padding = self.store.padding[:, : self.seen]
            if self.waits:
                self._confirm()

    def batch(self, change: Callable[[Tensor], Tensor], rows: int) -> None:
        """Apply a change of the batch to everything that is kept."""
        if not self.is_initialized:
            return
        with self.at_hand():
            for buffer in self.buffers():
                buffer.batch(change)
            if self.store.padding is not None:
                self.store.padding = change(self.store.padding)
            self.dropped, self._rows = self.dropped * rows // self.shape.batch, {}
            self.shape = self.store.shape = replace(self.shape, batch=rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch(lambda x: x.index_select(0, beam_idx.to(x.device)), len(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch(lambda x: x.repeat_interleave(repeats, 0), self.shape.batch * repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.batch(lambda x: x[indices.to(x.device)], int(indices.sum()) if indices.dtype == torch.bool else len(indices))

    # attention's side

    @property
    def limit(self) -> int | None:
        """Tokens a head may hold after each step."""
        return self.limit_at(self.seen)

    def limit_at(self, seen: int, known: Layer | None = None) -> int | None:
        """Tokens a head may hold once ``seen`` were read; ``known`` stands for this layer while it has seen nothing."""
        rows_in = self._rows_in if self.is_initialized else None if known is None else known._rows_in
        return self.keep.limit(Room(self.number, len(self.cache.layers), max(seen, 1), rows_in, self.cache.sharing))

    def _rows_in(self, size: float) -> int:
        if size not in self._rows:
            shape = self.shape
            own = (self.number, shape.batch, self.cache.query_heads, shape.kv_heads, shape.key_dim)
            always = sum(self.keep.predict(0, *own).values())
            beside = self.keep.beside(shape.batch, shape.kv_heads)
            self._rows[size] = fitting(self.cache.strategy.store, shape, size - always, beside)
        return self._rows[size]

    @property
    def observes(self) -> bool:
        """Whether the keep wants to see attention's weights."""
        return "attention" in self.keep.needs

    @property
    def looks(self) -> bool:
        """Whether the keep chooses, for each query, which of the stored tokens are read."""
        return self.keep.looks

    def gap(self) -> Tensor | None:
        """How many tokens are missing behind the first ones that are read nearer than they stood, int64 ``[b, h, 1]``; None where nothing is missing."""
        first = self.keep.shifted
        if not first or self.shape.rope is None or len(self.columns) <= first:
            return None
        columns = self.columns.view()
        return (columns[..., first : first + 1] - columns[..., first - 1 : first] - 1).long()

    def log_counts(self) -> Tensor | None:
        """What a merged token's score is raised by, float32 ``[B, H, stored]``: the log of how many tokens it stands for."""
        return self.counts.view().log() if len(self.counts) else None

    @property
    def watch(self) -> attention.Watch | None:
        return self.cache.watching.get(self.number)

    def columns_with(self, new: Tensor) -> Tensor:
        """Columns of the stored tokens and of ``new`` ones -> int64 ``[b, h, stored + new]``."""
        if not len(self.columns):
            stored = torch.arange(len(self.store), device=new.device).view(1, 1, -1)
        else:
            stored = self.columns.view().long()
        return torch.cat([stored, new.expand(*stored.shape[:2], -1)], 2)

    def attend(self, query: Tensor, rule: attention.Rule, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Attention for the tokens handed to :meth:`update`; afterwards they are judged and written down."""
        if self.new_keys is None or self.new_values is None:
            raise UnsupportedModel(
                f"layer {self.number} was read more often than the {self.readers} time(s) its config speaks of; use DynamicCache for this model"
            )
        self.store.padding = rule.padding
        begun = self._here()
        out, evidence, scratch = attention.attend(self, query, rule, scale, softcap, sinks)
        if evidence is not None:
            self.fresh_evidence = evidence if self.fresh_evidence is None else self.fresh_evidence + evidence
        self.reads += 1
        if self.reads < self.readers:  # a later layer reads the same keys and values
            return out
        incoming = self.new_keys.nbytes + self.new_values.nbytes
        self._finish(begun + scratch, incoming)
        return out

    def take_in(self, keys: Tensor, values: Tensor) -> None:
        """Write tokens ``[B, H, n, D]`` down as a step does, without attention; only for keeps that need none."""
        self.update(keys, values)
        self._finish(0, 0)

    def _finish(self, begun: int, incoming: int) -> None:
        """Judge the new tokens, write them down and let them go; ``begun`` and ``incoming``: bytes while attention was at work."""
        self.cache.unsure = self.number
        self._commit(self.fresh_evidence)
        self.cache.unsure = None
        most = max(begun, self._here()) + incoming
        self.cache.place.release(self.number)
        self.cache.note(self, most)

    def abandon(self) -> None:
        """Forget the new tokens of a step that failed before they were written down."""
        if self.new_keys is not None:
            self.seen -= self.new_keys.shape[2]
            self.new_keys = self.new_values = self.fresh_evidence = None
            self.reads = 0

    def _commit(self, evidence: Tensor | None) -> None:
        keys, values = self.new_keys, self.new_values
        assert keys is not None and values is not None
        self.new_keys = self.new_values = self.fresh_evidence = None
        self.reads = 0
        stored, new = len(self.store), keys.shape[2]
        if evidence is not None:
            if len(self.evidence) and self.keep.carries:
                evidence[..., :stored] += self.evidence.view()
            self.evidence.set(evidence)
        if self.looks:
            padding = self.store.padding
            self.remembered.write(keys, stored, None if padding is None else padding[:, None, self.seen - new :])
        if len(self.counts):
            self.counts.append(torch.ones((*self.counts.shape[:2], new), device=keys.device))
        limit = None if self.may_roll_back else self.limit
        if (
            limit is not None and not stored and new > limit and not self.keep.ragged
        ):  # a prompt is judged before anything is copied
            columns = torch.arange(self.seen - new, self.seen, device=keys.device).view(1, 1, -1)
            held, priority = self._priority(columns, keys.float, values.float)
            index = self._survivors(priority, limit - self.keep.slack)
            if self.keep.merges:
                keys, values = (x.to(keys.dtype) for x in self._fold(held, index, 0))
            else:
                keys, values = _take(keys, index), _take(values, index)
            self._record(columns, index, priority)
            self.store.append(keys, values)
        else:
            if len(self.columns):
                fresh = torch.arange(self.seen - new, self.seen, device=self.shape.device, dtype=torch.int32)
                self.columns.append(fresh.expand(*self.columns.shape[:2], -1))
            self.store.append(keys, values)
            if limit is not None and self._most() > limit:
                self._select(limit - self.keep.slack)
        if self.waits:
            self.unconfirmed += new
        else:
            self.store.settle()

    def _select(self, limit: int) -> None:
        """Keep the ``limit`` most worthy of the rows in the store."""
        columns = self.columns_with(torch.empty(0, dtype=torch.int64, device=self.shape.device))
        held, priority = self._priority(columns, self._keys, self._values)
        index = self._survivors(priority, limit)
        if self.keep.merges:
            first = self.store.plain_from
            kept = int((index[0, 0] < first).sum())
            keys, values = self._fold(held, index, first)
            self.store.select(index)
            self.store.rewrite(kept, keys[:, :, kept:], values[:, :, kept:])
        else:
            self.store.select(index)
        self._record(columns, index, priority)

    def _most(self) -> int:
        """Rows of the longest head; where heads share a limit, the average."""
        if not self.keep.ragged or not len(self.columns):
            return len(self.store)
        held = (self.columns.view() >= 0).sum(2)
        return -(-int(held.sum(1).max()) // held.shape[1])

    def _survivors(self, priority: Tensor, limit: int) -> Tensor:
        if self.keep.ragged:
            return shared_survivors(priority, limit)
        index = survivors(priority, limit, self.store.borders)
        if index is None:
            self.store.thaw()
            index = survivors(priority, limit, [])
        assert index is not None
        return index

    def _fold(self, held: Held, index: Tensor, first: int) -> tuple[Tensor, Tensor]:
        b, h, n = self.shape.batch, self.shape.kv_heads, held.columns.shape[2]
        counts = self.counts.view() if len(self.counts) else torch.ones((b, h, n), device=index.device)
        keys, values, counts = self.keep.fold(held, index.expand(b, h, -1), first, counts)
        if bool((counts != 1).any()):
            self.counts.set(counts)
        elif len(self.counts):
            self.counts.clear()
        return keys, values

    def _record(self, columns: Tensor, index: Tensor, priority: Tensor) -> None:
        history = self.cache.recorded
        if history is not None:
            history.note(self.number, columns, index, priority, self.seen)
        lists = self.shape.batch * self.shape.kv_heads // (index.shape[0] * index.shape[1])
        before = int((columns >= 0).sum()) * (index.shape[0] * index.shape[1] // (columns.shape[0] * columns.shape[1]))
        self.dropped += lists * (before - int((index >= 0).sum()))
        at = index.clamp(min=0)  # a hole, where heads hold different numbers, has no column
        kept = columns.expand(*index.shape[:2], -1).gather(2, at).masked_fill_(index < 0, -1)
        self.columns.set(kept.int())
        if len(self.evidence):
            self.evidence.select(at)
        self.evicted = True

    def _keys(self) -> Tensor:
        """The keys of all rows in the store, float32 ``[B, H, n, D]``."""
        return torch.cat([self.store.key_rows(start, stop) for start, stop in self.store.blocks(attention.MANY)], 2)

    def _values(self) -> Tensor:
        """The values of all rows in the store, float32 ``[B, H, n, D]``."""
        return torch.cat([self.store.value_rows(start, stop) for start, stop in self.store.blocks(attention.MANY)], 2)

    def _priority(self, columns: Tensor, keys: Callable[[], Tensor], values: Callable[[], Tensor]) -> tuple[Held, Tensor]:
        padding = self.store.padding
        if padding is None:
            positions = columns
        else:
            count = padding.long().cumsum(1) - 1
            at = columns.expand(padding.shape[0], -1, -1)
            real = real_tokens(padding, columns)
            positions = count.unsqueeze(1).expand(-1, at.shape[1], -1).gather(2, at.clamp(min=0)).masked_fill(~real, -1)
        evidence = self.evidence.view() if len(self.evidence) else None
        roles, turns = self.cache.spoken(self.seen) if "roles" in self.keep.needs else (None, None)
        held = Held(columns, positions, self.seen, evidence, keys, values, roles, turns, self.remembered, self.limit)
        priority = self.keep.priority(held)
        return held, priority.masked_fill(positions < 0, -PROTECTED)

    # the lab's side

    def buffers(self) -> list[Buffer]:
        """Everything that holds bytes between two steps."""
        if not self.is_initialized:
            return []
        return [*self.store.buffers(), self.columns, self.evidence, self.counts, *self.remembered.buffers()]

    def _here(self) -> int:
        return sum(buffer.here for buffer in self.buffers())

    # the place's side

    @property
    def held(self) -> int:
        """Tokens in the store."""
        return len(self.store) if self.is_initialized else 0

    @property
    def page(self) -> int:
        """Tokens that queries choose together; 0: they read everything."""
        return self.remembered.page

    def moving(self) -> list[Buffer]:
        """What may leave the compute device between two steps: all but what says which tokens a query needs."""
        remembered = self.remembered.buffers() if self.page and self.is_initialized else []
        return [buffer for buffer in self.buffers() if buffer not in remembered]

    def at_hand(self) -> _AtHand:
        """``with layer.at_hand():`` has the layer's bytes on the compute device."""
        return _AtHand(self)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[B, H, n, D]`` as attention sees them, and their columns ``[b, h, n]`` (-1: a head holds fewer). A copy, for tests and figures."""
        with self.at_hand():
            keys, values = self.store.dense()
            none = torch.empty(0, dtype=torch.int64, device=keys.device)
            return keys.clone(), values.clone(), self.columns_with(none)


class _AtHand:
    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        self.layer.cache.place.fetch(self.layer.number)

    def __exit__(self, *error: Any) -> None:
        self.layer.cache.place.release(self.layer.number)


def survivors(priority: Tensor, limit: int, borders: list[int]) -> Tensor | None:
    """Rows to keep, int64 ``[b, h, limit]`` ascending, from ``priority`` ``[b, h, n]``: the highest, ties to the newest.

    Between two ``borders`` as many rows must go in every head (codes of a head cannot outnumber another's). So each part's share is the rounded mean
    of what the heads would choose by themselves, as far as protected tokens and padding allow. None: they do not.
    """
    n = priority.shape[2]
    drop = n - limit
    goes = torch.zeros_like(priority, dtype=torch.bool)
    goes.scatter_(2, priority.sort(dim=2, stable=True).indices[..., :drop], True)
    edges = [0, *borders, n]
    parts = list(itertools.pairwise(edges))
    wanted = [goes[..., begin:end].sum(2) for begin, end in parts]
    if any(int(count.min()) != int(count.max()) for count in wanted):
        shares = _shares(priority, drop, parts, wanted)
        if shares is None:
            return None
        goes.zero_()
        for (begin, end), count in zip(parts, shares, strict=True):
            order = priority[..., begin:end].sort(dim=2, stable=True).indices[..., :count]
            goes[..., begin:end].scatter_(2, order, True)
    return (~goes).nonzero()[:, 2].view(*priority.shape[:2], limit)


def shared_survivors(priority: Tensor, limit: int) -> Tensor:
    """Rows to keep where heads share a limit, int64 ``[b, h, m]`` ascending, the last one of each head at the end and -1 before the first.

    Of all heads together the ``h * limit`` highest of ``priority`` ``[b, h, n]`` stay, ties to the newest; padding and holes never do.
    """
    b, h, n = priority.shape
    flat = priority.transpose(1, 2).reshape(b, n * h)  # oldest first, so that ties go to the newest
    best = flat.sort(dim=1, stable=True).indices[:, -h * limit :]
    stays = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True) & (flat != -PROTECTED)
    stays = stays.view(b, n, h).transpose(1, 2)
    count = stays.sum(2)
    most = int(count.max())
    place = most - count[..., None] + stays.cumsum(2) - 1
    row, head, at = stays.nonzero(as_tuple=True)
    index = torch.full((b, h, most), -1, dtype=torch.int64, device=priority.device)
    index[row, head, place[row, head, at]] = at
    return index


def _shares(priority: Tensor, drop: int, parts: list[tuple[int, int]], wanted: list[Tensor]) -> list[int] | None:
    """How many rows go from each part, the same in every head: near what the heads want, padding first, nothing protected."""
    padding = [(priority[..., begin:end] == -PROTECTED).sum(2) for begin, end in parts]
    free = [(priority[..., begin:end] != PROTECTED).sum(2) for begin, end in parts]
    total = sum(padding[1:], padding[0])
    fits = total <= drop  # all padding of this head goes, and other rows with it; or padding alone
    low = [int(torch.where(fits, pad, (drop - total + pad).clamp(min=0)).max()) for pad in padding]
    high = [int(torch.where(fits, loose, pad).min()) for loose, pad in zip(free, padding, strict=True)]
    if any(least > most for least, most in zip(low, high, strict=True)) or not sum(low) <= drop <= sum(high):
        return None
    shares = [
        min(max(round(float(count.double().mean())), least), most) for count, least, most in zip(wanted, low, high, strict=True)
    ]
    while (off := drop - sum(shares)) != 0:  # rounding, or a bound: give to the newest part that can take, or take from it
        for i in reversed(range(len(shares))):
            step = min(off, high[i] - shares[i]) if off > 0 else max(off, low[i] - shares[i])
            shares[i] += step
            off -= step
    return shares


def _take(x: Tensor, index: Tensor) -> Tensor:
    b, h = x.shape[:2]
    return x.gather(2, index.expand(b, h, -1)[..., None].expand(-1, -1, -1, x.shape[3]))


class KVCache(Cache):
    """A KV cache for one model and one strategy, to pass to ``generate`` or ``forward``.

    Args:
        model: a transformers causal language model; kvlab's attention is attached to it.
        strategy: what to keep, how to store it and where; the default is the full cache.

    Raises:
        UnsupportedModel: the model has no KV cache, or keeps it in a way kvlab does not know.
        ValueError: the strategy does not fit the model (a group size that does not divide the head dim, say).
    """

    def __init__(self, model: nn.Module, strategy: Strategy | None = None) -> None:
        if isinstance(model, Strategy) or not hasattr(model, "config"):
            raise ValueError(f"KVCache: model={type(model).__name__} is no transformers model (it needs a config)")
        if strategy is not None and not isinstance(strategy, Strategy):
            raise ValueError(f"KVCache: strategy={strategy!r} is no kvlab.Strategy")
        plan = layer_plan(model)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModel(
                f"{type(model).__name__} lies on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}); kvlab serves a model on one. "
                "Load it with device_map=None and move it with .to(device)."
            )
        attention.attach(model)
        self.strategy = strategy or Strategy()
        self.watching: dict[int, attention.Watch] = {}
        self.read: list[int] = []  # ids that lab.generate fed, to notice an old prompt
        self.recorded: History | None = None
        self.parked: Path | None = None  # the file it waits in
        self.unsure: int | None = None  # the layer that is being written down; stays so if that fails
        self.spans: list[tuple[int, str]] = []  # where each message begins, and who speaks
        self._spoken_for = 0  # columns up to here are some message's
        config: Any = model.config
        self.query_heads = int(getattr(config.get_text_config(decoder=True), "num_attention_heads", 0) or 0)
        self._modules, self._owner = frozenset(map(id, model.modules())), type(model).__name__
        self._model = weakref.ref(model)
        super().__init__(
            layers=[
                Layer(self, i, self.strategy.keep if window is None else Visible(size=max(1, window - 1)), readers)
                for i, (window, readers) in enumerate(plan)
            ]
        )
        self.device = devices.pop()
        self.ropes = ropes(model) if "rope" in self.strategy.store.needs | self.strategy.keep.needs else None
        if self.strategy.keep.shifted and not any(self.ropes or ()):
            raise UnsupportedModel(
                f"{self.strategy.keep} moves tokens nearer by turning queries, but {self._owner} does not turn its keys by position (RoPE): "
                "use positions='true'"
            )
        self.sharing = sum(not isinstance(layer.keep, Visible) for layer in self.layers) or len(self.layers)
        self.place = self.strategy.place.state(self.layers, self.device)
        self.high_water = 0
        self._held = 0

    def check_step(self, layer: Layer, keys: Tensor) -> None:
        """Refuse new keys that do not follow from what the cache holds.

        Raises ``RuntimeError`` after a step that failed half-way, ``ValueError`` for keys that are NaN or infinite (looked at on a CPU only: on a
        GPU it would cost a wait a layer).
        """
        total = layer.seen + keys.shape[2]
        if self.parked is not None:
            raise RuntimeError(
                f"this cache is parked in {str(self.parked)!r}: go on with kvlab.resume(model, path), or reset() it"
            )
        if self.unsure is not None:
            raise RuntimeError(f"an earlier step failed while layer {self.unsure} was written down. reset() the cache.")
        if not any(other.seen >= total for other in self.layers):  # the first layer of a step speaks for all
            self.admit(total, layer)
        first = next((other for other in self.layers if other.is_initialized), layer)
        if first is not layer and total != first.seen:
            raise RuntimeError(
                f"layer {layer.number} has seen {layer.seen} tokens, layer {first.number} {first.seen}: an earlier step failed half-way. reset() the cache."
            )
        if keys.device.type == "cpu" and not bool(keys.isfinite().all()):
            raise ValueError(
                f"layer {layer.number}: the model's keys are not finite (NaN or infinite) in {keys.dtype}; nothing was stored. Half precision "
                "overflows on some models: try bfloat16 or float32."
            )

    def admit(self, total: int, known: Layer) -> None:
        """Raise ``ValueError`` if some layer could not hold what it must of ``total`` tokens: before a step, so that nothing is half-done.

        ``known``: a layer whose shape is known; the others are taken to be like it until they have seen tokens.
        """
        for layer in self.layers:
            limit = layer.limit_at(total, known)
            if "roles" not in layer.keep.needs or limit is None or total <= limit:
                continue
            if known.shape.batch > 1:
                raise ValueError(
                    f"{type(layer.keep).__name__}: the batch has {known.shape.batch} rows, and only one conversation is known (allowed: 1)"
                )
            layer.keep.admit(*self.spoken(total), limit)

    @property
    def model(self) -> nn.Module:
        """The model this cache was made for. Raises ``RuntimeError`` once it is gone."""
        model = self._model()
        if model is None:
            raise RuntimeError(f"the model of this cache ({self._owner}) is gone")
        return model

    def check_module(self, module: nn.Module) -> None:
        """Raise ``ValueError`` if ``module`` is no part of the model that this cache was made for."""
        if id(module) not in self._modules:
            raise ValueError(
                f"this cache was made for another model ({self._owner}); make one for each: KVCache(model, strategy)"
            )

    def reset(self) -> None:
        """Forget everything; the cache can then be used like a new one."""
        super().reset()
        self.place.close()
        self.place = self.strategy.place.state(self.layers, self.device)
        self.high_water = self._held = 0
        self.parked = self.unsure = None
        self.read, self.spans, self._spoken_for = [], [], 0
        if self.recorded is not None:
            self.recorded = History(len(self.layers))

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.crop(tokens_to_remove)
        seen = self.get_seq_length()
        self.read, self.spans = self.read[:seen], [(start, role) for start, role in self.spans if start < seen]
        self._spoken_for = min(self._spoken_for, seen)

    def watch(self, watch: attention.Watch) -> None:
        """Record one head's attention from now on."""
        self.watching[watch.layer] = watch

    def history(self) -> History:
        """From now on, when each token left each head, and on what evidence (:class:`kvlab.history.History`); the same object at every call."""
        if self.recorded is None:
            self.recorded = History(len(self.layers))
        return self.recorded

    def timeline(self) -> Timeline:
        """From now on, what the place moves and when (:class:`kvlab.timeline.Timeline`); a new one at every call. ``place.record(None)`` ends it."""
        made = Timeline()
        self.place.record(made)
        return made

    def annotate(self, role: str, tokens: int | None = None) -> None:
        """The next ``tokens`` tokens to be read are one message by ``role``; None: all that come until the next message is named.

        ``keep.Conversation`` goes by it; ``lab.chat`` says it. A turn begins with each message by "user".

        Raises ``ValueError``: a role that is not one of "system", "user", "assistant", "tool", fewer than 1 token, or a batch of several rows.
        """
        if role not in ROLES:
            raise ValueError(f"annotate: role={role!r} is not one of {', '.join(ROLES)}")
        if tokens is not None and tokens < 1:
            raise ValueError(f"annotate: tokens={tokens} is out of range (allowed: 1 or more, or None)")
        first = next((layer for layer in self.layers if layer.is_initialized), None)
        if first is not None and first.shape.batch > 1:
            raise ValueError(
                f"annotate: the cache holds {first.shape.batch} rows, and they would not share one conversation (allowed: 1)"
            )
        begin = max(self.get_seq_length(), self._spoken_for)
        self.spans.append((begin, role))
        self._spoken_for = begin if tokens is None else begin + tokens

    def spoken(self, seen: int) -> tuple[Tensor, Tensor]:
        """Role and turn of each of the first ``seen`` columns, int64 ``[seen]``. Raises ``ValueError`` where nobody is known to speak."""
        if not self.spans or self.spans[0][0] > 0:
            raise ValueError(
                "this cache was not told who speaks: use lab.chat(...), or cache.annotate(role, tokens) before the tokens are read"
            )
        starts = [start for start, _ in self.spans]
        lengths = torch.tensor([end - start for start, end in itertools.pairwise([*starts, max(seen, starts[-1])])])
        roles = torch.tensor([ROLES.index(role) for _, role in self.spans])
        turns = (roles == ROLES.index("user")).cumsum(0)
        return roles.repeat_interleave(lengths)[:seen].to(self.device), turns.repeat_interleave(lengths)[:seen].to(self.device)

    def park(self, path: str | os.PathLike[str]) -> Path:
        """Put this conversation away in a file and free all it holds; ``kvlab.resume(model, path)`` goes on with it, in another process too.

        Until then only ``reset()`` makes this object usable again. Raises ``OSError`` if the file cannot be written; then nothing is freed.
        """
        from kvlab.saving import save

        written = save(self, path).absolute()
        self.reset()
        self.close()
        self.parked = written
        return written

    @property
    def resident(self) -> int:
        """Bytes that this cache holds on the compute device now, what is being fetched included."""
        return sum(layer._here() for layer in self.layers) + self.place.in_flight

    def close(self) -> None:
        """Give back files, threads and host memory."""
        self.place.close()

    # bytes

    def note(self, layer: Layer, most: int) -> None:
        """Called by a layer after each step that took ``most`` bytes: keeps the running total and the high-water mark of the compute device.

        At work a layer takes its old bytes, the new tokens and the scores; then its new bytes beside the new tokens.
        """
        others, here = self._held - layer.held_bytes, layer._here()
        self.high_water = max(self.high_water, others + self.place.in_flight + most)
        self._held = others + here
        layer.held_bytes = here

    def settle_bytes(self, layer: Layer) -> None:
        """Take a layer into the running total that was filled from elsewhere."""
        self.note(layer, layer._here())

    def memory(self) -> Memory:
        """Bytes by part and device, logical and allocated, with the high-water mark. See :class:`kvlab.memory.Memory`."""
        parts: dict[tuple[str, str], Part] = {}
        reference = rows = repacked = dropped = seen = 0
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            shape = layer.shape
            rows = max(rows, len(layer.store))
            repacked += layer.store.repacked
            dropped += layer.dropped
            seen += layer.seen * shape.batch * shape.kv_heads
            reference += layer.seen * shape.batch * shape.kv_heads * (shape.key_dim + shape.value_dim) * 2
            for buffer in layer.buffers():
                for device, logical, allocated in buffer.spread():
                    key = (buffer.part, device)
                    old = parts.get(key, Part(*key, 0, 0))
                    parts[key] = Part(*key, old.logical + logical, old.allocated + allocated)
        return Memory(
            tuple(parts.values()), self.high_water, reference, self.get_seq_length(), rows, repacked, dropped / max(1, seen)
        )


def layer_plan(model: nn.Module) -> list[tuple[int | None, int]]:
    """Of each layer: its own window (None: it sees everything) and how many layers read its keys and values, itself included.

    Told by the cache that transformers would make. Raises ``UnsupportedModel`` for layers that keep something else than keys and values.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    if count is None or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is no decoder-only language model (looked for num_hidden_layers in its config)"
        )
    own = DynamicCache(config=config).layers
    plan: list[tuple[int | None, int]] = []
    for layer in own:
        if isinstance(layer, DynamicSlidingWindowLayer) and type(layer).__mro__[1] is DynamicLayer:
            plan.append((int(layer.sliding_window), 1))
        elif type(layer) is DynamicLayer or type(layer).__name__ == "DummyLayer":
            plan.append((None, 1))
        else:
            raise UnsupportedModel(
                f"{type(model).__name__} has layers that keep more than keys and values ({type(layer).__name__}); use transformers' own DynamicCache "
                "for it. kvlab.geometry still knows its sizes."
            )
    plan += [(None, 1)] * (count - len(plan))
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * count
    for reader in range(count - shared, count):  # reads the last layer of its kind that has keys of its own
        owner = max((i for i in range(count - shared) if kinds[i] == kinds[reader]), default=None)
        if owner is not None:
            plan[owner] = (plan[owner][0], plan[owner][1] + 1)
    return plan


_ropes: weakref.WeakKeyDictionary[nn.Module, list[rope.Rope | None]] = weakref.WeakKeyDictionary()


def ropes(model: nn.Module) -> list[rope.Rope | None]:
    """How each layer turns its keys by position (:func:`kvlab.rope.find`), found once a model by letting it read one token again and again."""
    if model not in _ropes:
        cache = KVCache(model)
        config: Any = model.config
        token = int(config.get_text_config(decoder=True).vocab_size) // 2
        forward(model, torch.full((1, rope.TOKENS), token, device=cache.device), cache)
        _ropes[model] = rope.find(model, [layer.dense()[::2] if layer.is_initialized else None for layer in cache.layers])
    return _ropes[model]


def forward(model: nn.Module, ids: Tensor, cache: Cache, padding: Tensor | None = None, last: bool = False) -> Tensor:
    """One forward pass through a cache -> logits ``[B, Q, vocabulary]`` (``[B, 1, vocabulary]`` with ``last``), no gradients.

    ``ids``: int64 ``[B, Q]``, new tokens only. ``padding``: bool or int ``[B, seen + Q]``, 1 for real tokens, for left-padded batches.
    The names of transformers' arguments differ between versions; this is the one place that knows.
    """
    names = _arguments(type(model).forward)
    extra: dict[str, Any] = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    if padding is not None:
        extra["attention_mask"] = padding
        if "position_ids" in names:
            extra["position_ids"] = (padding.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if last and "logits_to_keep" in names:
        extra["logits_to_keep"] = 1
    with torch.inference_mode():
        logits = model(input_ids=ids, **extra).logits
    return logits[:, -1:] if last else logits


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
