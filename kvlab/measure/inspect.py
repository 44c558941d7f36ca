"""Looking at single numbers: what one head keeps of a token, as the model made it and as a store gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.cache import KVCache, ropes
from kvlab.lab import Lab, Progress
from kvlab.layer import Layer
from kvlab.rope import Rope
from kvlab.store.base import Around, LayerShape, Store, StoreState
from kvlab.store.coded import CodedState
from kvlab.store.codes import QuantizedSide
from kvlab.store.dense import DenseState
from kvlab_kernels.layout import FLOATS, normal_levels, unpack

SIDES = ("keys", "values")
PIECE = 256  # tokens read at once, so that a run can be ended in between
Array = np.ndarray


@dataclass(frozen=True)
class Recorded:
    """What a full cache keeps of a text. ``words``: its tokens as text.

    ``layers``: keys and values of each layer, ``[1, KV heads, rows, dim]`` in the model's dtype. ``first``: the token of a layer's first row;
    above 0 where a layer's own window has let older ones go. ``ropes``: how each layer turned its keys (:mod:`kvlab.rope`).
    """

    words: tuple[str, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]
    first: tuple[int, ...]
    ropes: tuple[Rope | None, ...]

    @property
    def tokens(self) -> int:
        return len(self.words)


def record(lab: Lab, prompt: str | Tensor, progress: Progress | None = None) -> Recorded:
    """Read ``prompt`` (text, or ids ``[1, n]``) once with a full cache. Raises ``ValueError`` as ``Lab.encode`` does."""
    ids = lab.encode(prompt) if isinstance(prompt, str) else prompt.to(lab.device)
    cache = KVCache(lab.model)
    lab.prefill(ids, cache, chunk=PIECE, progress=progress)
    layers, first = [], []
    for layer in cache.layers:
        assert isinstance(layer, Layer)
        keys, values, columns = layer.dense()
        layers.append((keys, values))
        first.append(int(columns.min()))
    words = tuple(lab.tokenizer.decode([token]) for token in ids[0].tolist())
    return Recorded(words, tuple(layers), tuple(first), tuple(ropes(lab.model)))


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer: float32 ``exact`` and ``back`` (what the store gives back), ``[KV heads, rows, dim]``.

    ``written``: what was written down, ``exact`` itself unless the store changes the channels first; ``form`` says how. ``codes`` uint8
    ``[KV heads, coded, dim]``, those of the rows from ``plain_first`` on, each with its ``scale`` and ``zero`` (None where codes are symmetric or
    floats); None where nothing is coded. ``bits``: what the store promises for a number, None if nothing. ``format``: "int", "e4m3", "e5m2".
    """

    exact: Array
    back: Array
    written: Array
    form: str = ""
    codes: Array | None = None
    scale: Array | None = None
    zero: Array | None = None
    plain_first: int = 0
    bits: int | None = None
    format: str = "int"

    @property
    def relative(self) -> float:
        """The length of the error over the length of the exact numbers, all heads and tokens together."""
        return _relative(self.back, self.exact)

    def coded(self, row: int) -> int | None:
        """The row of ``codes`` that holds row ``row``; None if that is plain."""
        at = row - self.plain_first
        return at if self.codes is not None and 0 <= at < self.codes.shape[1] else None


@dataclass(frozen=True)
class Written:
    """One layer, written down by ``store``. ``parts``: "keys", "values" (where the store keeps them apart) and "both" -> part -> bytes.

    ``numbers``: how many numbers each of those three is. ``plain``: bits of a number of the model. ``first``: the token of the first row.
    """

    layer: int
    store: Store
    keys: Side
    values: Side
    parts: dict[str, dict[str, int]]
    numbers: dict[str, int]
    plain: int
    first: int
    words: tuple[str, ...]

    def side(self, what: str) -> Side:
        """Raises ``ValueError`` unless ``what`` is "keys" or "values"."""
        if what not in SIDES:
            raise ValueError(f"what={what!r} is not one of {', '.join(map(repr, SIDES))}")
        return self.keys if what == "keys" else self.values

    def bits(self) -> dict[str, dict[str, float]]:
        """ "keys", "values", "both" -> part -> bits a number, over all numbers of that row."""
        return {row: {part: 8 * size / self.numbers[row] for part, size in parts.items()} for row, parts in self.parts.items()}

    @property
    def promised(self) -> dict[str, int]:
        """ "keys", "values" -> the bits of a code; empty for a store without codes."""
        return {what: bits for what in SIDES if (bits := self.side(what).bits) is not None}


def write(recorded: Recorded, store: Store, layer: int = 0) -> Written:
    """Write one layer's keys and values down, all tokens at once, and read them back. Raises ``ValueError`` for a layer that is not there,
    or settings that do not fit the model's heads."""
    check("layer", layer, 0, len(recorded.layers) - 1)
    both, state = recorded.layers[layer], _state(recorded, store, layer)
    sides = []
    for number, (own, back) in enumerate(zip(both, state.dense(), strict=True)):
        inner, written, form = _peel(state, number, own)
        exact = own[0].float()
        codes = _codes(inner, number, own.shape[1])
        sides.append(Side(_array(exact), _array(back[0]), _heads(_array(written[0]), own.shape[1]), form, **codes))
    counts = dict(zip(SIDES, (tensor.numel() for tensor in both), strict=True))
    parts = {row: _bytes(buffers) for row, buffers in _buffers(_peel(state, 0, both[0])[0])}
    numbers, plain = counts | {"both": sum(counts.values())}, 8 * both[0].dtype.itemsize
    return Written(layer, store, sides[0], sides[1], parts, numbers, plain, recorded.first[layer], recorded.words)


@dataclass(frozen=True)
class Token:
    """One token of one head: ``exact``, ``back`` and ``error`` (their difference), float32 ``[dim]``.

    ``codes``, ``scale``, ``zero`` ``[dim]``: how each channel is written; None for a plain token, and where the store changes the channels first.
    """

    token: int
    word: str
    exact: Array
    back: Array
    error: Array
    codes: Array | None
    scale: Array | None
    zero: Array | None
    plain: bool

    @property
    def relative(self) -> float:
        return _relative(self.back, self.exact)


def token(written: Written, what: str, head: int, token: int) -> Token:
    """Look at one token of KV head ``head``. Raises ``ValueError`` for a head or token that is not there."""
    side, row = _row(written, what, head, token)
    at = side.coded(row)
    own: list[Array | None] = [None, None, None]
    if at is not None and not side.form:
        own = [None if x is None else x[head, at] for x in (side.codes, side.scale, side.zero)]
    exact, back = side.exact[head, row], side.back[head, row]
    return Token(token, written.words[token], exact, back, back - exact, own[0], own[1], own[2], at is None)


@dataclass(frozen=True)
class Channels:
    """How large each channel of one head is over all tokens: ``low``, ``high`` and ``size`` (largest |x|), float32 ``[dim]``.

    ``written``: the largest |x| of each channel as it is written down, or None where that is the same; ``form`` says how ("once rotated").
    """

    low: Array
    high: Array
    size: Array
    written: Array | None
    form: str = ""

    @property
    def outlier(self) -> float:
        """The largest channel's size over the median channel's."""
        return float(self.size.max() / max(float(np.median(self.size)), 1e-30))


def channels(written: Written, what: str, head: int) -> Channels:
    """Raises ``ValueError`` for a head that is not there."""
    side = written.side(what)
    check("head", head, 0, len(side.exact) - 1)
    own = side.exact[head]
    written = np.abs(side.written[head]).max(0) if side.form else None
    return Channels(own.min(0), own.max(0), np.abs(own).max(0), written, side.form)


@dataclass(frozen=True)
class Channel:
    """One channel of one head over all tokens: how many of its numbers (``counts`` ``[bins]``) lie between ``edges`` ``[bins + 1]``.

    ``levels``: the numbers that the codes of one token can say there, rising; None if the token is plain. ``number``: what that token has there.
    ``form``: the channel is one of those that are written down, "once rotated" or "before RoPE".
    """

    channel: int
    token: int
    counts: Array
    edges: Array
    levels: Array | None
    number: float
    form: str = ""

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def inside(self) -> int:
        """Levels within the range of the channel's numbers."""
        return 0 if self.levels is None else int(((self.levels >= self.edges[0]) & (self.levels <= self.edges[-1])).sum())


def channel(written: Written, what: str, head: int, token: int, channel: int, bins: int = 32) -> Channel:
    """The histogram of a channel, with the levels of ``token``. Raises ``ValueError`` for a head, token or channel that is not there."""
    side, row = _row(written, what, head, token)
    check("channel", channel, 0, side.exact.shape[2] - 1)
    own = side.written[head, :, channel]
    counts, edges = np.histogram(own, bins)
    at, levels = side.coded(row), None
    if at is not None:
        assert side.scale is not None
        levels = _levels(side) * float(side.scale[head, at, channel])
        if side.zero is not None:
            levels = levels + float(side.zero[head, at, channel])
    return Channel(channel, token, counts, edges, levels, float(own[row]), side.form)


@dataclass(frozen=True)
class LayerErrors:
    """The relative error of each layer's keys and values: lengths of the errors over lengths of the exact numbers, float ``[layers]``."""

    keys: Array
    values: Array

    def mean(self, what: str) -> float:
        return float((self.keys if what == "keys" else self.values).mean())


def layer_errors(recorded: Recorded, store: Store, progress: Progress | None = None) -> LayerErrors:
    """Write every layer down, one after the other."""
    found = []
    for layer, both in enumerate(recorded.layers):
        if progress:
            progress("every layer", layer, len(recorded.layers))
        pairs = zip(both, _state(recorded, store, layer).dense(), strict=True)
        found.append([float((back.float() - own.float()).norm() / own.float().norm().clamp(min=1e-30)) for own, back in pairs])
    return LayerErrors(*np.array(found).T)


def check(name: str, value: Any, low: int, high: int) -> None:
    """Raise ``ValueError`` that names the value and the allowed range unless it is a whole number within."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} is out of range (allowed: {low} to {high})")


def _row(written: Written, what: str, head: int, token: int) -> tuple[Side, int]:
    side = written.side(what)
    check("head", head, 0, len(side.exact) - 1)
    check("token", token, written.first, written.first + side.exact.shape[1] - 1)
    return side, token - written.first


def _state(recorded: Recorded, store: Store, layer: int) -> StoreState:
    """One layer, all tokens at once, as ``store`` writes it."""
    keys, values = recorded.layers[layer]
    b, h, _, dim = keys.shape
    own = (b, h, dim, values.shape[-1], keys.dtype, keys.device, recorded.ropes[layer])
    state = store.state(LayerShape(layer, len(recorded.layers), *own))
    state.append(keys, values)
    state.settle()
    return state


def _peel(state: StoreState, number: int, x: Tensor) -> tuple[StoreState, Tensor, str]:
    """The innermost store, all rows of one side as that gets them, and what was done to them in words."""
    done = []
    while isinstance(state, Around):
        x, form = state.write(number, x), state.form(number)
        done += [form] if form else []
        state = state.inner
    return state, x, ", ".join(reversed(done))


def _heads(x: Array, heads: int) -> Array:
    """``[H / n, rows, n * D]`` as ``[H, rows, D]``, where the store joins heads: each takes its share of the channels."""
    groups, rows, dim = x.shape
    each = heads // groups
    return x.reshape(groups, rows, each, dim // each).swapaxes(1, 2).reshape(heads, rows, dim // each)


def _codes(state: StoreState, number: int, heads: int) -> dict[str, Any]:
    """The codes of one side, with a scale and a zero point for each: arguments of ``Side``."""
    side = state.sides[number] if isinstance(state, CodedState) else None
    if not isinstance(state, CodedState) or not isinstance(side, QuantizedSide):
        return {}
    known: dict[str, Any] = {"bits": side.coding.bits, "format": side.coding.format, "plain_first": len(state.first[number])}
    if not len(side):
        return known
    own = side.layout()
    codes = unpack(own.codes, own.bits)[0]

    def spread(x: Tensor | None) -> Array | None:
        if x is None:
            return None
        if own.axis == "token":
            return _heads(_array(x[0].repeat_interleave(own.group_size, -1)), heads)
        return _heads(_array(x[0, :, torch.arange(codes.shape[1], device=x.device) // own.group_size]), heads)

    return known | {"codes": _heads(codes.cpu().numpy(), heads), "scale": spread(own.scale), "zero": spread(own.zero)}


def _levels(side: Side) -> Array:
    """What the codes of a side stand for, rising, before scale and zero point."""
    assert side.bits is not None
    if side.format in FLOATS:
        floats = torch.arange(256).to(torch.uint8).view(FLOATS[side.format]).float()
        return _array(floats[floats.isfinite()].unique())
    if side.format == "normal":
        return np.array(normal_levels(side.bits), dtype=np.float32)
    if side.zero is None:
        top = 2 ** (side.bits - 1) - 1
        return np.arange(-top, top + 1, dtype=np.float32)
    return np.arange(2**side.bits, dtype=np.float32)


def _buffers(state: StoreState) -> Iterator[tuple[str, list[Buffer]]]:
    if isinstance(state, CodedState):
        for number, what in enumerate(SIDES):
            yield what, [state.first[number], *state.sides[number].buffers(), state.tail[number]]
    elif isinstance(state, DenseState):
        yield "keys", [state.keys]
        yield "values", [state.values]
    yield "both", state.buffers()


def _bytes(buffers: list[Buffer]) -> dict[str, int]:
    out: dict[str, int] = {}
    for buffer in filter(len, buffers):
        out[buffer.part] = out.get(buffer.part, 0) + buffer.logical
    return out


def _relative(back: Array, exact: Array) -> float:
    return float(np.linalg.norm(back - exact) / max(float(np.linalg.norm(exact)), 1e-30))


def _array(x: Tensor) -> Array:
    return x.detach().float().cpu().numpy()
