"""Layer: one layer of a :class:`kvlab.KVCache`. It takes tokens in, has them judged, written down and put away, and reads them for attention."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvlab import attention
from kvlab.buffer import Buffer
from kvlab.errors import UnsupportedModel
from kvlab.keep.base import PROTECTED, Held, Keep, KeepState, Room, Visible
from kvlab.store.base import LayerShape, StoreState, fitting, real_tokens

if TYPE_CHECKING:
    from kvlab.cache import KVCache

DRAFT = 256  # no draft is longer: what has not been confirmed by then, nobody will take back


@dataclass(frozen=True)
class Read:
    """One layer's attention over the prompt: what :meth:`Layer.update` and :meth:`Layer.attend` were given. ``keys`` None: an earlier layer's were read."""

    layer: int
    keys: Tensor | None
    values: Tensor | None
    query: Tensor
    rule: attention.Rule
    how: tuple[Any, ...]  # scale, soft cap, sinks

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.query) if x is not None)


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
        drop = self.check_crop(tokens_to_remove)
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

    def check_crop(self, tokens_to_remove: int) -> int:
        """Raise what :meth:`crop` would raise; nothing is changed. -> how many tokens would go."""
        try:
            count = operator.index(tokens_to_remove)  # transformers gives a tensor at times
        except TypeError:
            count = 1
        if count > 0:
            raise ValueError(
                f"crop({tokens_to_remove!r}): how many of the newest tokens go, as 0 or a negative number (transformers' way since 5.0)"
            )
        drop = min(-count, self.seen)
        if drop and self.evicted and not (self.may_roll_back and drop <= len(self.store)):
            raise RuntimeError(
                f"crop({tokens_to_remove}) after eviction: the tokens that would be needed again are gone. Use keep.Everything() where "
                "drafts are taken back (assisted decoding), or reset() the cache."
            )
        return drop

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
        self._tape(query, rule, scale, softcap, sinks)
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

    def _tape(self, query: Tensor, rule: attention.Rule, *how: Any) -> None:
        if self.cache.tape is not None:
            fresh = not self.reads
            self.cache.tape.append(
                Read(self.number, self.new_keys if fresh else None, self.new_values if fresh else None, query, rule, how)
            )

    def follow(self, query: Tensor, rule: attention.Rule, scale: float, softcap: float | None, sinks: Tensor | None) -> None:
        """As :meth:`attend` for a prompt whose output is known: only what the keep wants to see is computed."""
        if self.observes or "queries" in self.keep.needs:
            self.attend(query, rule, scale, softcap, sinks)
            return
        assert self.new_keys is not None and self.new_values is not None
        self.store.padding = rule.padding
        self.reads += 1
        if self.reads == self.readers:
            b, hq, new = query.shape[:3]
            scores = 0 if attention.plain(rule, softcap, sinks) else attention.scratch(b * hq, new, 0, rule.causal)
            self._finish(scores, self.new_keys.nbytes + self.new_values.nbytes)

    def take_in(self, keys: Tensor, values: Tensor) -> None:
        """Write tokens ``[B, H, n, D]`` down as a step does, without attention; only for keeps that need none."""
        self.update(keys, values)
        self._finish(0, 0)

    def _finish(self, begun: int, incoming: int) -> None:
        """Judge the new tokens, write them down and let them go; ``begun`` and ``incoming``: bytes while attention was at work."""
        self.cache.unsure = self.number
        self._commit(self.fresh_evidence)
        most = max(begun, self._here()) + incoming
        self.cache.put_away(self.number)
        self.cache.unsure = None
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
        place = self.layer.cache.place
        line = place.timeline
        place.record(None)  # it is no step
        try:
            place.fetch(self.layer.number)
        finally:
            place.record(line)

    def __exit__(self, *error: Any) -> None:
        place = self.layer.cache.place
        line = place.timeline
        place.record(None)
        try:
            self.layer.cache.put_away(self.layer.number)
        finally:
            place.record(line)


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
