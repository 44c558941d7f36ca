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
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvlab import attention, rope, saving
from kvlab.errors import UnsupportedModel
from kvlab.geometry import Geometry
from kvlab.history import History
from kvlab.keep.base import ROLES, Visible
from kvlab.layer import Layer, Read
from kvlab.memory import Memory, Part
from kvlab.place.tier import NotWritten
from kvlab.store.base import LayerShape
from kvlab.strategy import Strategy
from kvlab.timeline import Timeline


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
        self.tape: list[Read] | None = None  # what each layer's attention was given, where somebody wants it again (see replay)
        self.parked: Path | None = None  # the file it waits in
        self.unwritten: NotWritten | None = None  # why a layer is still here that should be away
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
        self._check_fit(model)
        self.sharing = sum(not isinstance(layer.keep, Visible) for layer in self.layers) or len(self.layers)
        self.place = self.strategy.place.state(self.layers, self.device)
        self.high_water = 0
        self._held = 0

    def _check_fit(self, model: nn.Module) -> None:
        """Let the store see each kind of layer that the configuration tells of: what does not fit is known before any token is read."""
        for layer in _shapes(model):
            self.strategy.store.state(LayerShape(0, len(self.layers), 1, *layer, torch.float32, self.device))

    def __repr__(self) -> str:
        where = f", parked in {str(self.parked)!r}" if self.parked is not None else ""
        return f"KVCache({self.strategy}: {self.get_seq_length():,} tokens read, {self.memory().allocated:,} bytes{where})"

    def check_step(self, layer: Layer, keys: Tensor) -> None:
        """Refuse new keys that do not follow from what the cache holds.

        Raises ``RuntimeError`` after a step that failed half-way, ``ValueError`` for keys that are NaN or infinite (looked at on a CPU only: on a
        GPU it would cost a wait a layer).
        """
        total = layer.seen + keys.shape[2]
        if self.parked is not None or self.unsure is not None:
            self.check_whole()
        if not any(other.seen >= total for other in self.layers):  # the first layer of a step speaks for all
            self._put_away_again()
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
        """Forget everything; the cache can then be used like a new one. What records its history or its timeline goes on."""
        line = self.place.timeline
        self._forget()
        self.place = self.strategy.place.state(self.layers, self.device)
        self.place.record(line)

    def _forget(self) -> None:
        super().reset()
        self.place.close()
        self.high_water = self._held = 0
        self.parked = self.unsure = self.unwritten = None
        self.read, self.spans, self._spoken_for = [], [], 0
        if self.recorded is not None:
            self.recorded.clear()

    def check_whole(self) -> None:
        """Raise ``RuntimeError`` if this cache is parked, or a step failed half-way: what it holds is then no text's."""
        if self.parked is not None:
            raise RuntimeError(
                f"this cache is parked in {str(self.parked)!r}: go on with kvlab.resume(model, path), or reset() it"
            )
        if self.unsure is not None:
            raise RuntimeError(f"an earlier step failed while layer {self.unsure} was written down. reset() the cache.")
        seen = {layer.seen for layer in self.layers if layer.is_initialized}
        if len(seen) > 1:
            raise RuntimeError(f"the layers have seen {sorted(seen)} tokens: an earlier step failed half-way. reset() the cache.")

    def put_away(self, number: int) -> None:
        """A layer is done for this step. If it cannot be written it stays in memory, and the next step says so before it begins."""
        try:
            self.place.release(number)
        except NotWritten as error:
            self.unwritten = error

    def _put_away_again(self) -> None:
        if self.unwritten is not None:
            self.unwritten = None
            for layer in self.layers:
                if layer.is_initialized:
                    self.put_away(layer.number)
            if self.unwritten is not None:
                raise self.unwritten

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)
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
        made = Timeline(gpu=self.device.type == "cuda")
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
        written = saving.save(self, path).absolute()
        self._forget()
        self.parked = written
        return written

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """A cache of its own for the same model, that goes on from here: for several continuations of one prompt."""
        copied = KVCache(self.model, self.strategy)
        header, tensors = saving.collect(self)
        saving.restore(copied, header, {name: tensor.clone() for name, tensor in tensors.items()}, "a copy")
        return copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a KVCache is not pickled: write it with kvlab.save(cache, path) and read it with kvlab.resume(model, path)"
        )

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


def resume(model: nn.Module, path: str | os.PathLike[str], strategy: Strategy | None = None) -> KVCache:
    """The cache that ``kvlab.save`` wrote, for the same model; the next step gives the logits it would have given.

    ``strategy``: as it was, perhaps with another place (another machine has other folders). Raises ``ValueError`` if the file is no saved cache or is
    damaged, was written by another version, for another model or, where ``strategy`` is given, with another keep, store or chunk;
    ``FileNotFoundError`` if it is not there.
    """
    header, tensors = saving.read(model, path)
    saved = Strategy.from_dict(header["strategy"])
    if strategy is not None and strategy != replace(saved, place=strategy.place):
        raise ValueError(f"{path} was written with {saved}, not with {strategy} (allowed: the same, but for its place)")
    cache = KVCache(model, strategy or saved)
    saving.restore(cache, header, tensors, path)
    return cache


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


_known: weakref.WeakKeyDictionary[nn.Module, set[tuple[int, int, int]]] = weakref.WeakKeyDictionary()


def _shapes(model: nn.Module) -> set[tuple[int, int, int]]:
    """KV heads, key dim and value dim of each kind of layer, as the configuration tells; nothing where it does not: then the first keys will."""
    if model not in _known:
        try:
            layers = Geometry.from_config(model.config).layers
        except ValueError:
            layers = ()
        _known[model] = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers if layer.kv_heads}
    return _known[model]


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


def packed_forward(model: nn.Module, ids: Tensor, positions: Tensor, cache: Cache, last: Tensor) -> Tensor:
    """One forward pass over the new tokens of several requests in one row -> logits float32 ``[n, vocabulary]`` of the places ``last`` (int64 ``[n]``).

    ``ids``, ``positions``: int64 ``[1, tokens]``. Raises ``UnsupportedModel`` where a model cannot be told positions.
    """
    names = _arguments(type(model).forward)
    if "position_ids" not in names:
        raise UnsupportedModel(f"{type(model).__name__} takes no position_ids, so requests cannot share a row")
    device = next(model.parameters()).device
    extra: dict[str, Any] = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in names:
        extra["logits_to_keep"] = last.to(device)
    with torch.inference_mode():
        logits = model(input_ids=ids.to(device), position_ids=positions.to(device), **extra).logits
    return (logits[0] if "logits_to_keep" in names else logits[0, last.to(device)]).float()


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
