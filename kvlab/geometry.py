"""A model's shape, and the memory that follows from it.

    bytes = layers x KV heads x (key dim + value dim) x tokens x bytes a number

with *KV* heads, not query heads. `Geometry.from_config` reads the shape of any transformers config, `find` knows the famous
models (`data/models.json`, each row with its source), and `kv_bytes`, `weight_bytes`, `state_bytes`, `activation_bytes` count.
All counts are exact integers of bytes, except activations, which are an estimate; nothing here loads a model.
"""

import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

from kvlab import _config, _data
from kvlab._config import Layer as Layer
from kvlab._config import count_parameters as count_parameters

BITS = (2, 3, 4, 8, 16, 32)
"""The widths a stored number may have."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a model, as far as memory and time depend on it.

    intermediate: width of the MLP a token passes. vocabulary: tokens. context: longest trained sequence, tokens, or None.
    tied: input embedding and output head are one matrix. parameters: all of them, tied ones once, or None when unknown;
    `routed` of them sit in `experts` routed experts, `experts_per_token` of which each token visits (0: not a mixture).
    """

    name: str
    layers: tuple[Layer, ...]
    hidden_size: int
    query_heads: int
    intermediate: int
    vocabulary: int
    context: int | None = None
    tied: bool = False
    parameters: int | None = None
    routed: int = 0
    experts: int = 0
    experts_per_token: int = 0
    source: str = field(default="", compare=False)

    @classmethod
    def from_config(cls, config: Any, *, name: str | None = None, parameters: int | None = None) -> "Geometry":
        """The geometry of a transformers config: an object, or the dict of a `config.json`.

        A dict whose `model_type` transformers knows gets that type's defaults, as when loading; any other dict is read as it is.
        `parameters`: their number; if None they are counted (`count_parameters`) where transformers knows the type, else unknown.
        Raises `ValueError`: a field that is not there (it names what was looked for), a model that has no KV cache.
        """
        if parameters is not None:
            parameters = _whole("parameters", parameters, low=1)
        return cls(**_config.read(config, name, parameters))

    @property
    def kv_layers(self) -> tuple[Layer, ...]:
        """The layers that store something for each token."""
        return tuple(layer for layer in self.layers if layer.kv_heads)

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer (the most, where layers differ); 0 for a pure state-space model; 1 for MLA's shared latent."""
        return max((layer.kv_heads for layer in self.layers), default=0)

    @property
    def key_dim(self) -> int:
        """Numbers in a key of one head (the most, where layers differ)."""
        return max((layer.key_dim for layer in self.layers), default=0)

    @property
    def value_dim(self) -> int:
        """Numbers in a value of one head (the most, where layers differ); for MLA its rotary key, as in transformers' cache."""
        return max((layer.value_dim for layer in self.layers), default=0)

    @property
    def active_parameters(self) -> int | None:
        """Parameters that work on one token: all, less the routed experts it does not visit."""
        if self.parameters is None or not self.experts:
            return self.parameters
        return self.parameters - self.routed + self.routed * self.experts_per_token // self.experts

    @property
    def kind(self) -> str:
        """What saves memory here: "MHA" (nothing), "GQA", "MQA", "MLA", "sliding", "hybrid" or "state space"."""
        kept = self.kv_layers
        if not kept:
            return "state space"
        if any(layer.state for layer in self.layers):
            return "hybrid"
        if any(layer.kind == "latent" for layer in kept):
            return "MLA"
        if any(layer.window for layer in kept):
            return "sliding"
        return "MHA" if self.kv_heads == self.query_heads else "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def pattern(self) -> str:
        """The layers in a few words: `21 x (sliding(4,096), full)`, `32 x full`, or their number by kind."""
        names = [str(layer) for layer in self.layers]
        for period in range(1, len(names) // 2 + 1):
            if len(names) % period == 0 and names == names[:period] * (len(names) // period):
                runs = [f"{count} x {kind}" if (count := len(list(run))) > 1 else kind for kind, run in groupby(names[:period])]
                inside = ", ".join(runs)
                return f"{len(names) // period} x {inside if period == 1 else f'({inside})'}"
        return ", ".join(f"{count} x {kind}" for kind, count in Counter(names).items())

    @property
    def head_choices(self) -> tuple[int, ...]:
        """The numbers of KV heads that `with_kv_heads` takes; empty where heads make no difference."""
        if self.kind in ("MLA", "state space"):
            return ()
        return tuple(heads for heads in range(1, self.query_heads + 1) if self.query_heads % heads == 0)

    def with_kv_heads(self, heads: int) -> "Geometry":
        """The same model with another number of KV heads, for asking "what if"; weights are left as they are.

        Raises `ValueError` where heads make no difference (MLA, state space) or do not divide the query heads.
        """
        if not self.head_choices:
            raise ValueError(f"{self.name} ({self.kind}) keeps no heads apart, so their number cannot be changed")
        if heads not in self.head_choices:
            allowed = ", ".join(map(str, self.head_choices))
            raise ValueError(f"kv_heads={heads!r} does not divide the {self.query_heads} query heads; allowed: {allowed}")
        layers = tuple(replace(layer, kv_heads=heads) if layer.kv_heads else layer for layer in self.layers)
        return self if layers == self.layers else replace(self, name=f"{self.name} with {heads} KV heads", layers=layers)

    def __str__(self) -> str:
        size = f"{self.parameters:,} parameters" if self.parameters else "parameters unknown"
        if self.kind == "state space":
            heads = f"{sum(layer.state for layer in self.layers):,} numbers of state"
        elif self.kind == "MLA":
            heads = f"{self.query_heads} query heads on a latent of {self.key_dim} + {self.value_dim}"
        else:
            dims = f"{self.key_dim}" if self.key_dim == self.value_dim else f"{self.key_dim} (keys), {self.value_dim} (values)"
            heads = f"{self.query_heads} query heads, {self.kv_heads} KV heads, head dim {dims}"
        return f"{self.name}: {self.kind}; {self.pattern}; {heads}; {size}"


# --- the famous models


@cache
def _table() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(_data.path("models.json").read_text(encoding="utf-8"))["models"]}


def names() -> list[str]:
    """The models of `data/models.json`, smallest kinds first as written there."""
    return list(_table())


def find(name: str) -> Geometry:
    """A model of the table; case and punctuation do not matter, a unique beginning is enough. Or your own: the path of its `config.json`, or of the folder
    that it lies in, with a "/" in it.

    Raises `ValueError`: no such name (it lists them), no config there, or none of a model with a cache.
    """
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} is no text (allowed: a name of the table, or the path of a config.json)")
    if "/" in name or os.sep in name:
        return _read(Path(name).expanduser())  # anew each time: it may have been edited
    return _known(_data.pick(name, _table(), "model"))


@cache
def _known(name: str) -> Geometry:
    row = _table()[name]
    geometry = Geometry.from_config(row["config"], name=row["name"], parameters=row["parameters"])
    return replace(geometry, routed=row["routed"], source=row["source"])


def _read(path: Path) -> Geometry:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} is no model's config.json: {error} (allowed: one, its folder, or a name of the table)"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no fields (allowed: a model's config.json)")
    try:
        return replace(Geometry.from_config(config, name=file.resolve().parent.name), source=str(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


# --- bytes


def kv_bytes(
    geometry: Geometry,
    tokens: int,
    *,
    batch: int = 1,
    requests: int = 1,
    bits: int = 16,
    k_bits: int | None = None,
    v_bits: int | None = None,
    group_size: int | None = None,
    scale_bits: int = 16,
    zero: bool = True,
    bits_per_element: float | None = None,
    kept_tokens: int | Callable[[int], int] | None = None,
) -> int:
    """Bytes of keys and values after `tokens` tokens of each sequence, all layers.

    batch: sequences in a request; requests: requests at once. bits: width of a number (`k_bits`, `v_bits` override it apart).
    group_size: numbers that share a scale of `scale_bits` (and as wide a zero point, if `zero`); it must divide the head dim.
    bits_per_element: any effective width, everything included, instead of all of those. kept_tokens: how many tokens a layer
    keeps at most, as a number or a function of `tokens` (a window still holds if it is shorter).
    A state-space model has none: 0 (see `state_bytes`). Raises `ValueError` that names the value and what is allowed.
    """
    tokens = _whole("tokens", tokens)
    kept = tokens
    if kept_tokens is not None:
        kept = _whole("kept_tokens", kept_tokens(tokens) if callable(kept_tokens) else kept_tokens)
    total = Fraction(0)
    for layer, count in Counter(geometry.kv_layers).items():
        key, value = (
            dim * _width(dim, width or bits, group_size, scale_bits, zero, bits_per_element)
            for dim, width in ((layer.key_dim, k_bits), (layer.value_dim, v_bits))
        )
        total += count * min(layer.held(tokens), kept) * layer.kv_heads * (key + value)
    return ceil(total * _sequences(batch, requests) / 8)


def bytes_per_token(geometry: Geometry, *, after: int = 0, **how: Any) -> int:
    """Bytes that one more token adds after `after` tokens (less once a window is full). `how`: as in `kv_bytes`."""
    after = _whole("after", after)
    return kv_bytes(geometry, after + 1, **how) - kv_bytes(geometry, after, **how)


def state_bytes(geometry: Geometry, *, batch: int = 1, requests: int = 1, bits: int = 16) -> int:
    """Bytes of the fixed state (state-space, linear and convolution layers): the same for one token and for a million.

    `bits`: 16 is what the checkpoints use; several engines keep the recurrent state in 32.
    """
    numbers = sum(layer.state for layer in geometry.layers)
    return ceil(Fraction(numbers * _allowed("bits", bits) * _sequences(batch, requests), 8))


def weight_bytes(geometry: Geometry, bits: int = 16, *, bits_per_element: float | None = None) -> int:
    """Bytes of the weights, tied ones once. `bits_per_element`: any effective width (4.25: MXFP4 with its scales).

    Raises `ValueError` when the number of parameters is not known.
    """
    if geometry.parameters is None:
        raise ValueError(f"{geometry.name}: parameters unknown; give them: Geometry.from_config(config, parameters=...)")
    return ceil(geometry.parameters * _width(1, bits, None, 16, True, bits_per_element) / 8)


def activation_bytes(geometry: Geometry, new_tokens: int, *, batch: int = 1, bits: int = 16) -> int:
    """An ESTIMATE of the working memory of one forward pass over `new_tokens` tokens of each of `batch` sequences.

    Counted, at the widest point of a layer, with fused attention (no tokens x tokens matrix): the residual stream and its
    normed copy, then the larger of q, k, v, output and of the MLP's gate, up and product; and the last position's logits in
    float32. Engines differ (buffers, fragmentation, graphs): expect the right order of magnitude, not the byte.
    """
    rows = _whole("new_tokens", new_tokens) * _whole("batch", batch, low=1)
    q = max((geometry.query_heads * layer.key_dim for layer in geometry.kv_layers), default=0)
    kv = max((layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in geometry.kv_layers), default=0)
    numbers = 2 * geometry.hidden_size + max(2 * q + kv, 3 * geometry.intermediate)
    return rows * numbers * _allowed("bits", bits) // 8 + (batch * geometry.vocabulary * 4 if rows else 0)


# --- does it fit


@dataclass(frozen=True)
class Breakdown:
    """Predicted bytes by part. `activations` is an estimate; the rest is counted."""

    weights: int
    kv: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.activations

    @property
    def cache(self) -> int:
        """What the sequences hold between steps: KV and state."""
        return self.kv + self.state

    def __str__(self) -> str:
        return (
            f"{text(self.total)} = weights {gb(self.weights):,.2f} + KV {gb(self.kv):,.2f} + state {gb(self.state):,.2f}"
            f" + activations ~{gb(self.activations):,.2f} GB"
        )


def breakdown(
    geometry: Geometry,
    tokens: int,
    *,
    batch: int = 1,
    requests: int = 1,
    weight_bits: int = 16,
    weight_bits_per_element: float | None = None,
    state_bits: int = 16,
    chunk: int = 2048,
    **how: Any,
) -> Breakdown:
    """Weights, KV, state and activations with `requests` requests of `tokens` tokens in memory. `how`: as in `kv_bytes`.

    Activations: the larger of one prefill step (one request, at most `chunk` tokens) and one decode step of all requests.
    """
    first = min(_whole("tokens", tokens), _whole("chunk", chunk, low=1))
    prefill = activation_bytes(geometry, first, batch=batch)
    decode = activation_bytes(geometry, min(first, 1), batch=_sequences(batch, requests))
    return Breakdown(
        weights=weight_bytes(geometry, weight_bits, bits_per_element=weight_bits_per_element),
        kv=kv_bytes(geometry, tokens, batch=batch, requests=requests, **how),
        state=state_bytes(geometry, batch=batch, requests=requests, bits=state_bits),
        activations=max(prefill, decode),
    )


def curve(geometry: Geometry, grid: Sequence[int], **how: Any) -> list[Breakdown]:
    """`breakdown` at each number of tokens of `grid`, for drawing."""
    return [breakdown(geometry, tokens, **how) for tokens in grid]


def grid(last: int, points: int = 65, *, include: Sequence[int] = ()) -> list[int]:
    """`points` token counts from 0 to `last`, evenly spaced (fewer when `last` is small), and those of `include`."""
    last, points = _whole("last", last, low=1), _whole("points", points, low=2)
    return sorted({*(round(last * i / (points - 1)) for i in range(points)), *include})


class HasMemory(Protocol):
    """A device: anything that can say how many bytes `devices` of it hold (`kvlab.hardware.Hardware`)."""

    def capacity(self, devices: int = 1) -> int: ...


def max_tokens(geometry: Geometry, hardware: HasMemory | int, *, devices: int = 1, **how: Any) -> int | None:
    """The longest sequence that fits: tokens of each request. `hardware`: a device, or bytes. `how`: as in `breakdown`.

    0 when not even the weights fit; None when the memory never grows past the capacity (a state space, windows everywhere).
    """
    capacity = _whole("hardware", hardware) if isinstance(hardware, int) else hardware.capacity(devices)

    def fits(tokens: int) -> bool:
        return breakdown(geometry, tokens, **how).total <= capacity

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 50:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- units


def gb(count: float) -> float:
    """Bytes in GB (10^9), the unit of datasheets."""
    return count / 1e9


def gib(count: float) -> float:
    """Bytes in GiB (2^30), the unit of most tools."""
    return count / 2**30


def text(count: float) -> str:
    """Bytes for people, in powers of ten: `42.9 GB`, `23.0 kB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:,.{max(0, 3 - len(str(int(abs(count) / size))))}f} {unit}"
    return f"{count:,.0f} B"


# --- checks


def _whole(name: str, value: Any, low: int = 0, high: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value!r}; allowed: whole numbers from {low}" + (f" to {high}" if high is not None else ""))
    return number


def _allowed(name: str, value: SupportsIndex) -> int:
    if isinstance(value, bool) or value not in BITS:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(map(str, BITS))}")
    return operator.index(value)


def _sequences(batch: int, requests: int) -> int:
    return _whole("batch", batch, low=1) * _whole("requests", requests, low=1)


def _width(dim: int, bits: int, group_size: int | None, scale_bits: int, zero: bool, bits_per_element: float | None) -> Fraction:
    """Bits a number takes with its share of scale and zero point."""
    if bits_per_element is not None:
        if group_size is not None:
            raise ValueError(f"bits_per_element={bits_per_element!r} includes the scales; leave group_size={group_size!r} out")
        if isinstance(bits_per_element, bool) or not 0 < bits_per_element <= 32:
            raise ValueError(f"bits_per_element={bits_per_element!r}; allowed: above 0, up to 32")
        return Fraction(bits_per_element)
    width = Fraction(_allowed("bits", bits))
    if group_size is None:
        return width
    if width > 8:
        raise ValueError(f"group_size={group_size!r} with bits={bits}: only numbers of up to 8 bits share a scale")
    group_size = _whole("group_size", group_size, low=1)
    if dim % group_size:
        raise ValueError(f"group_size={group_size} does not divide the head dim {dim}; allowed: its divisors")
    return width + Fraction(_allowed("scale_bits", scale_bits) * (2 if zero else 1), group_size)
