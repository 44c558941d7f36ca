"""The one attention function: it reads a cache layer through its store, under transformers' own mask rule.

``attach(model)`` puts it on a model. ``KVCache.update`` hands the model a :class:`Handle` in place of keys and values; it arrives here
untouched. Scores are taken block by block over the stored tokens, for a block of queries at a time, so neither a dense copy of the
history nor a queries x keys matrix of the whole prompt is ever held, and the heads of a GQA group share one read of their key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlab.dispatch import backend
from kvlab.errors import UnsupportedModel
from kvlab.store.base import Layout, real_tokens
from kvlab_kernels import cpu
from kvlab_kernels.layout import Codes

if TYPE_CHECKING:
    from kvlab.layer import Layer

NAME = "kvlab"
MANY = cpu.MAX_ROWS + 1  # query rows that no compiled product takes
SCORE_NUMBERS = 1 << 20  # float32 scores held at a time: 4 MB; longer prompts take their queries in smaller blocks


class Handle:
    """Stands for a layer's keys or values between the cache and the attention function. Any other use is an unsupported model."""

    __slots__ = ("layer",)

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer

    def to(self, *_: Any) -> Handle:
        """Layers that share keys move them to their own device first; a model that kvlab serves has one."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and torch.compile looking at what it is
            raise AttributeError(name)
        raise self._touched(f"the attribute '{name}' of the keys or values")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handle = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Handle)), Handle(None))
        raise handle._touched(f"torch's {getattr(func, '__name__', func)} on the keys or values")

    def __getitem__(self, item: Any) -> Any:
        raise self._touched("a slice of the keys or values")

    def _touched(self, what: str) -> Exception:
        """What to raise; the step is forgotten, so the cache can be used on."""
        if self.layer is None:
            return UnsupportedModel(_TOUCHED.format(what))
        self.layer.abandon()
        implementation = getattr(getattr(self.layer.cache.model, "config", None), "_attn_implementation", None)
        if implementation != NAME:
            return ValueError(
                f"a kvlab cache met a model that kvlab is not attached to (its attention is {implementation!r}): call kvlab.attach(model), or make a "
                "cache for the model that runs"
            )
        return UnsupportedModel(_TOUCHED.format(what))


_TOUCHED = (
    "this model's attention uses {} between the cache and attention; kvlab can only serve models that pass them on untouched. "
    "Use transformers' own DynamicCache for it; kvlab.geometry still knows its sizes."
)


@dataclass(frozen=True)
class Rule:
    """What the registered mask function returns: the model's own rule, and the padding.

    ``allowed(b, h, query_column, key_column)`` works on broadcastable int64 tensors. ``padding``: bool ``[B, columns]``, True for
    real tokens, or None where there is none. ``arguments`` are transformers', for attention without one of our caches.
    """

    allowed: Callable[..., Any]
    padding: Tensor | None
    arguments: dict[str, Any] = field(repr=False)

    @property
    def causal(self) -> bool:
        """The rule is plain causality: every stored token is visible to every new query."""
        return self.allowed is causal_mask_function


@torch.compiler.disable
def mask(**arguments: Any) -> Rule:
    """transformers' mask interface: keep the rule, build nothing."""
    padding = arguments.get("attention_mask")
    if padding is not None:
        padding = padding.bool()
        if bool(padding.all()) and padding.shape[-1] == arguments["kv_length"] + arguments["kv_offset"]:
            padding = None
    # a static cache moves its offset in place before attention comes to build the mask
    arguments = {
        name: value.clone() if isinstance(value, Tensor) and not value.dim() else value for name, value in arguments.items()
    }
    return Rule(arguments["mask_function"], padding, arguments)


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. ``query`` ``[B, Hq, Q, D]`` -> ``[B, Q, Hq, Dv]``, no weights.

    Understands ``softcap`` and ``s_aux`` (attention sinks as parameters). Without a kvlab cache it is transformers' SDPA.
    """
    if not isinstance(key, Handle):
        return _plain(module, query, key, value, attention_mask, scaling, dropout, **options)
    assert key.layer is not None
    try:
        return _cached(module, query, key.layer, attention_mask, scaling, dropout, **options), None
    except BaseException:
        key.layer.abandon()  # a step that failed leaves the layer as it was before
        raise


def _cached(
    module: nn.Module, query: Tensor, layer: Layer, rule: Any, scaling: float | None, dropout: float, **options: Any
) -> Tensor:
    layer.cache.check_module(module)
    if not isinstance(rule, Rule):
        raise UnsupportedModel(
            f"{type(module).__name__} brings a mask of its own ({type(rule).__name__}); kvlab needs the rule behind it. "
            "Pass a 2-D attention mask (1 for real tokens, 0 for padding)."
        )
    if rule.padding is not None and rule.padding.shape[-1] != layer.seen:
        new = query.shape[2]
        raise ValueError(
            f"the attention mask has {rule.padding.shape[-1]} columns, but the cache has seen {layer.seen - new} tokens and {new} are new (allowed: "
            f"{layer.seen}). If the old prompt was passed again with a used cache, pass the new tokens only, or reset() the cache."
        )
    if dropout:
        raise ValueError(f"dropout={dropout} with a KV cache: call model.eval() first (allowed: 0.0)")
    if options.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a position bias to its scores, which kvlab does not know yet")
    if layer.number == 0:
        _check_positions(layer, options.get("position_ids"), rule.padding, query.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(query, rule, scale, options.get("softcap"), options.get("s_aux"))
    return out.transpose(1, 2).contiguous()


def _check_positions(layer: Layer, positions: Tensor | None, padding: Tensor | None, q_len: int) -> None:
    """``generate`` with a used cache and the old prompt cuts the prompt at the wrong place, and its positions tell."""
    if positions is None or positions.dim() != 2 or (positions.is_cuda and q_len == 1):
        return
    last = layer.seen - 1 if padding is None else (padding.long().sum(1) - 1).clamp(min=0)
    if bool((positions[:, -1] != last).any()):
        raise ValueError(
            f"the last new token has position {int(positions[0, -1])}, but this cache has already seen {layer.seen - q_len} tokens. If the old "
            "prompt was passed again with a used cache: pass the whole conversation or only what is new, or reset() the cache."
        )


def _plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Any, scaling: Any, dropout: float, **options: Any
) -> Any:
    """No cache, or another library's: transformers' own way with the mask it would have built."""
    eager = options.get("softcap") is not None or options.get("s_aux") is not None
    if eager:
        raise UnsupportedModel(
            f"{type(module).__name__} with soft-capping or sinks needs a kvlab cache while kvlab is attached; call kvlab.detach(model)"
        )
    built = sdpa_mask(**rule.arguments) if isinstance(rule, Rule) else rule
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, built, dropout=dropout, scaling=scaling, **options)


def plain(rule: Rule, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether a text's first tokens can attend to each other by torch's own attention."""
    return rule.causal and rule.padding is None and softcap is None and sinks is None


def _rows(heads: int, queries: int, keys: int) -> int:
    """Queries whose scores are held at a time."""
    return max(1, min(queries, SCORE_NUMBERS // max(1, heads * keys)))


def scratch(heads: int, queries: int, stored: int, causal: bool = True) -> int:
    """Bytes of scores and weights that ``queries`` new tokens of ``heads`` heads (of all rows of the batch) beside ``stored`` ones take at the largest moment,
    where no kernel serves."""
    rows = _rows(heads, queries, stored + queries)
    blocks = ((first, min(first + rows, queries)) for first in range(0, queries, rows))
    return 2 * 4 * heads * max((last - first) * (stored + (last if causal else queries)) for first, last in blocks)


def attend(
    layer: Layer,
    query: Tensor,
    rule: Rule,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, int]:
    """Attention of ``query`` ``[B, Hq, Q, D]`` over the layer's stored tokens and the new ones it holds.

    Returns the output ``[B, Hq, Q, Dv]``, what the layer's keep observed of each key (float32 ``[B, Hk, stored + new]``) if it wants to, and the
    bytes of scratch at the largest moment.
    """
    store, new_keys, new_values = layer.store, layer.new_keys, layer.new_values
    assert new_keys is not None and new_values is not None
    b, hq, q_len, d = query.shape
    hk, stored, new = new_keys.shape[1], len(store), new_keys.shape[2]
    group = hq // hk
    watch = layer.watch
    if "queries" in layer.keep.needs:
        columns = torch.arange(layer.seen - q_len, layer.seen, device=query.device).view(1, 1, -1)
        places = columns[:, 0]
        if rule.padding is not None:
            places = (rule.padding.long().cumsum(1) - 1).masked_fill(~rule.padding, -1)[:, -q_len:]
        layer.remembered.meet(query * (scale * d**0.5), columns, places)
    if not stored and not layer.observes and watch is None and plain(rule, softcap, sinks):
        out = F.scaled_dot_product_attention(query, new_keys, new_values, is_causal=q_len > 1, scale=scale, enable_gqa=group > 1)
        return out, None, 0

    gap, counts = layer.gap(), layer.log_counts()
    since = layer.keep.counted(q_len) if layer.observes else None
    if watch is None and gap is None and not layer.looks and (since is not None or not layer.observes):
        if stored and fused(query, new_values):
            layout = store.layout()
            if layout is not None and triton_reads(layout):
                return *_decode(layer, layout, query, rule, scale, softcap, sinks, counts, since), 0
        elif not stored and since is not None and rule.causal and rule.padding is None and scorable(query, new_values):
            from kvlab_kernels.scored import scored_attention

            out, _, mass = scored_attention(query, new_keys, new_values, scaling=scale, softcap=softcap, sinks=sinks, since=since)
            return out, mass, 0

    total = stored + new
    evidence = torch.zeros((b, hk, total), dtype=torch.float32, device=query.device) if layer.observes else None
    out = query.new_empty((b, hq, q_len, new_values.shape[3]))
    half = query.dtype == torch.float16
    rows = _rows(b * hq, q_len, total)
    grouped = query.reshape(b, hk, group, q_len, d)
    chosen = layer.remembered.look(grouped, stored) if layer.looks and stored else None
    if chosen is not None and q_len == 1 and watch is None:
        return _picked(layer, grouped, chosen[:, :, 0], rule, scale, softcap, sinks)
    scratch = 0
    for first in range(0, q_len, rows):
        last = min(first + rows, q_len)
        # under plain causality the keys that come after this block of queries need no score at all
        fresh = new - (q_len - last) if rule.causal else new
        part = grouped[:, :, :, first:last].reshape(b, hk, group * (last - first), d)
        if half:  # products in float16 are of scaled queries: unscaled ones may be too large for it
            part = part * scale
        scores = torch.empty((b, hk, group * (last - first), stored + fresh), dtype=torch.float32, device=query.device)
        blocks = list(store.blocks(part.shape[2]))
        for start, stop in blocks:
            scores[..., start:stop] = store.score(part, start, stop)
        if gap is not None:
            assert layer.shape.rope is not None
            nearer = layer.shape.rope.turn(part, gap, back=True).to(part.dtype)
            for start, stop in blocks:
                if start < layer.keep.shifted:
                    end = min(stop, layer.keep.shifted)
                    scores[..., start:end] = store.score(nearer, start, end)
        scores[..., stored:] = part @ new_keys[:, :, :fresh].transpose(-1, -2)
        if not half:
            scores *= scale
        if softcap is not None:
            scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
        if counts is not None:
            scores[..., :stored] += counts.unsqueeze(2)
        shaped = scores.view(b, hk, group, last - first, stored + fresh)
        if chosen is not None:
            shaped[..., :stored].masked_fill_(~chosen[:, :, None, first:last], float("-inf"))
        hidden = _hidden(layer, rule, q_len, first, last, fresh)
        if hidden is not None:
            shaped.masked_fill_(hidden, float("-inf"))
        weights = _softmax(shaped, sinks)
        if rule.padding is not None:
            weights = weights.nan_to_num_(0.0)  # a padded query sees nothing
        scratch = max(scratch, 2 * scores.nbytes)
        if evidence is not None:
            evidence[..., : stored + fresh] += layer.keep.observe(weights, q_len - last)
        if watch is not None:
            watch.take(layer, weights, q_len, first, last)
        flat = weights.view(b, hk, group * (last - first), stored + fresh)
        mixed = flat[..., stored:].to(new_values.dtype) @ new_values[:, :, :fresh]
        if stored:
            mixed = mixed.float()
        for start, stop in blocks:
            mixed += store.mix(flat[..., start:stop], start, stop)
        out[:, :, first:last] = mixed.view(b, hk, group, last - first, -1).reshape(b, hq, last - first, -1)
    return out, evidence, scratch


def _picked(
    layer: Layer, query: Tensor, chosen: Tensor, rule: Rule, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, None, int]:
    """One query a head ``[B, Hk, G, 1, D]`` that reads only the ``chosen`` tokens (bool ``[B, Hk, stored]``, as many in every head) and its own."""
    assert layer.new_keys is not None and layer.new_values is not None
    b, hk, group, _, d = query.shape
    stored, count = chosen.shape[2], int(chosen[0, 0].sum())
    index = chosen.nonzero()[:, 2].view(b, hk, count)
    keys, values = layer.store.rows_at(index)
    keys, values = torch.cat([keys, layer.new_keys.float()], 2), torch.cat([values, layer.new_values.float()], 2)
    scores = query.view(b, hk, group, d).float() @ keys.mT * scale
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    hidden = _hidden(layer, rule, 1, 0, 1, 1)
    if hidden is not None:
        at = torch.cat([index, torch.full_like(index[..., :1], stored)], 2)
        scores.masked_fill_(hidden[:, :, 0].expand(b, hk, 1, -1).gather(3, at.unsqueeze(2)), float("-inf"))
    weights = _softmax(scores.unsqueeze(3), sinks)
    if rule.padding is not None:
        weights = weights.nan_to_num_(0.0)
    out = (weights.squeeze(3) @ values).to(layer.new_values.dtype)
    return out.view(b, hk * group, 1, -1), None, keys.nbytes + values.nbytes + 2 * scores.nbytes


def fused(query: Tensor, values: Tensor) -> bool:
    """Whether the Triton kernel serves these queries: a few of them, on a GPU (or in the interpreter, where ``KVLAB_FUSED=1`` asks for it)."""
    return query.shape[2] <= 16 and scorable(query, values)


def scorable(query: Tensor, values: Tensor) -> bool:
    """Whether Triton kernels take heads of this kind, and are what runs."""
    fits = query.shape[3] <= 256 and query.shape[3] == values.shape[3] and query.dtype == values.dtype != torch.float64
    learning = torch.is_grad_enabled() and query.requires_grad  # no kernel here has a backward pass
    return fits and not learning and backend(query.device) == "triton"


def triton_reads(layout: Layout) -> bool:
    """Whether the Triton kernel reads keys and values as they lie: all but codes of which one scale is every channel's."""
    return all(not isinstance(x, Codes) or x.scale.stride(3) == 1 or x.scale.shape[3] == 1 for x in (layout.keys, layout.values))


def _decode(
    layer: Layer,
    layout: Layout,
    query: Tensor,
    rule: Rule,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    counts: Tensor | None,
    since: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The fused kernel: it reads what is stored as it lies, no dense copy. The new tokens and plain ones are its second part.

    ``since``: also what each key got from the queries from there on, in the order of the layer's rows.
    """
    from kvlab_kernels.decode import decode_attention, paged_decode_attention, scored_decode_attention

    assert layer.new_keys is not None and layer.new_values is not None
    new = [layer.new_keys, layer.new_values]
    for number, turn in enumerate(layout.turned):
        if turn is not None:
            new[number] = turn(new[number]).to(query.dtype)
            query = turn(query).to(query.dtype) if not number else query
    beside = new if layout.plain is None else [torch.cat(pair, 2) for pair in zip(layout.plain, new, strict=True)]
    given: dict[str, Any] = {"scaling": scale, "softcap": softcap, "sinks": sinks, "places": layout.places}
    given |= {"residual_k": beside[0], "residual_v": beside[1], "bias": _bias(layer, layout, query, rule, counts)}
    pages = () if layout.table is None else (layout.table,)
    if layout.table is not None:
        given |= {"start": layout.start, "length": layout.table.shape[2] * layout.keys.shape[2]}  # type: ignore[union-attr]
    mass = None
    if since is not None:
        out, _, mass = scored_decode_attention(query, layout.keys, layout.values, *pages, since=since, **given)
        mass = _in_order(layer, layout, mass)
    elif pages:
        out, _ = paged_decode_attention(query, layout.keys, layout.values, *pages, **given)
    else:
        out, _ = decode_attention(query, layout.keys, layout.values, **given)
    return out if layout.back is None else layout.back(out).to(query.dtype), mass


def _in_order(layer: Layer, layout: Layout, mass: Tensor) -> Tensor:
    """What the kernel says of its keys ``[B, H, keys]`` as what is said of the layer's rows, ``[B, H, stored + new]``: the inverse of :func:`_bias`."""
    assert layer.new_keys is not None
    rows = len(layer.store) + layer.new_keys.shape[2]
    mass = mass[..., mass.shape[2] - rows :]  # holes of pages come first
    if not layout.front or layout.plain is None:
        return mass
    coded = len(layer.store) - layout.plain[0].shape[2]
    return torch.cat([mass[..., coded : coded + layout.front], mass[..., :coded], mass[..., coded + layout.front :]], -1)


def _bias(layer: Layer, layout: Layout, query: Tensor, rule: Rule, counts: Tensor | None) -> Tensor | None:
    """What is added to the scores, float32 ``[b, h, q, keys]``, in the kernel's order of keys; None for nothing."""
    assert layer.new_keys is not None
    q_len, new, stored = query.shape[2], layer.new_keys.shape[2], len(layer.store)
    hidden = _hidden(layer, rule, q_len, 0, q_len, new)
    if hidden is None and counts is None:
        return None
    bias = torch.zeros((1, 1, 1, 1), dtype=torch.float32, device=query.device)
    if counts is not None:
        bias = F.pad(counts, (0, new)).unsqueeze(2)
    if hidden is not None:
        hidden = hidden.squeeze(2)
        shape = torch.broadcast_shapes(bias.shape, hidden.shape)
        bias = bias.expand(shape).masked_fill(hidden.expand(shape), float("-inf"))
    plain = 0 if layout.plain is None else layout.plain[0].shape[2]
    if layout.front:
        end = layout.front + stored - plain  # the first rows are read with the plain ones
        bias = torch.cat([bias[..., layout.front : end], bias[..., : layout.front], bias[..., end:]], -1)
    if layout.table is not None:
        lacking = layout.table.shape[2] * layout.keys.shape[2] - (stored - plain)  # type: ignore[union-attr]
        bias = F.pad(bias, (lacking, 0))
    return bias


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dim of ``[B, Hk, G, Q, n]``; learned ``sinks`` ``[Hq]`` join the denominator and take no value."""
    if sinks is None:
        return scores.softmax(-1)
    b, hk, group, q, _ = scores.shape
    column = sinks.float().view(1, hk, group, 1, 1).expand(b, hk, group, q, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _hidden(layer: Layer, rule: Rule, q_len: int, first: int, last: int, fresh: int) -> Tensor | None:
    """True where a key must not be seen: bool, broadcastable to ``[B, Hk, G, queries, keys]``; None where all may be seen."""
    if rule.causal and rule.padding is None and last - first == 1 and not layer.keep.ragged:
        return None
    seen = layer.seen
    new = torch.arange(seen - q_len, seen - q_len + fresh, device=layer.shape.device)
    columns = layer.columns_with(new)  # [b, h, n]
    queries = torch.arange(seen - q_len + first, seen - q_len + last, device=columns.device).view(1, 1, -1, 1)
    keys = columns.unsqueeze(2)
    b = torch.arange(max(layer.shape.batch, 1), device=columns.device).view(-1, 1, 1, 1)
    h = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=columns.device)
    if rule.causal:
        hidden = keys > queries
    else:
        allowed = rule.allowed(b, h, queries, keys)
        hidden = ~(allowed if isinstance(allowed, Tensor) else torch.tensor(allowed, device=columns.device))
    if layer.keep.ragged:
        hidden = hidden | (keys < 0)
    if rule.padding is not None:
        hidden = hidden | ~real_tokens(rule.padding, columns).unsqueeze(2)
    return hidden.unsqueeze(2)


@dataclass
class Watch:
    """Records one query head's attention, pooled so that any length fits a picture: mean weight by query bin and key bin.

    ``tokens``: how many columns the picture spans. ``bins``: its side at most. Row 0 of a batch is recorded.
    """

    layer: int
    head: int
    tokens: int
    bins: int = 256
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.bins < 1:
            raise ValueError(f"Watch: tokens={self.tokens} and bins={self.bins} must be at least 1")
        self.bins = min(self.bins, self.tokens)
        self.weight = torch.zeros(self.bins, self.bins)
        self.held = torch.zeros(self.bins, self.bins)  # how many keys a bin could still see, summed over its queries
        self.queries = torch.zeros(self.bins)
        self.sink_weight = 0.0

    def take(self, layer: Layer, weights: Tensor, q_len: int, first: int, last: int) -> None:
        hk, group, n = weights.shape[1], weights.shape[2], weights.shape[4]
        if not 0 <= self.head < hk * group:
            raise ValueError(f"Watch: head={self.head} is out of range (allowed: 0 to {hk * group - 1})")
        own = weights[0, self.head // group, self.head % group].float().cpu()
        start = layer.seen - q_len
        columns = layer.columns_with(torch.arange(start, start + n - len(layer.store), device=weights.device))
        columns = columns[0, self.head // group if columns.shape[1] > 1 else 0].cpu()
        queries = torch.arange(start + first, start + last)
        own, columns = own[:, columns >= 0], columns[columns >= 0]
        self.sink_weight += float(own[:, columns < self.sinks].sum())
        keys, rows = self._bin(columns), self._bin(queries)
        self.weight.index_add_(0, rows, torch.zeros(len(queries), self.bins).index_add_(1, keys, own))
        seen = (columns[None] <= queries[:, None]).float()
        self.held.index_add_(0, rows, torch.zeros(len(queries), self.bins).index_add_(1, keys, seen))
        self.queries.index_add_(0, rows, torch.ones(len(queries)))

    def _bin(self, columns: Tensor) -> Tensor:
        return (columns * self.bins // self.tokens).clamp(0, self.bins - 1).long()

    def picture(self) -> tuple[Tensor, Tensor]:
        """Mean weight ``[bins, bins]`` (query, key), NaN where nothing was recorded, and where every key had been evicted (bool)."""
        mean = self.weight / self.queries[:, None]
        causal = torch.ones(self.bins, self.bins).tril().bool()
        return mean, causal & (self.held == 0) & (self.queries[:, None] > 0)

    @property
    def sink_share(self) -> float:
        """Share of all recorded attention that went to the first ``sinks`` tokens."""
        return self.sink_weight / max(float(self.queries.sum()), 1.0)


_before: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def attach(model: nn.Module) -> None:
    """Put kvlab's attention on a loaded transformers model. Doing it twice is harmless; :func:`detach` undoes it.

    Raises:
        UnsupportedModel: the architecture does not take an attention function from outside.
    """
    ALL_ATTENTION_FUNCTIONS[NAME] = (
        attention  # again: another library may have wrapped all that are registered (kvpress does, and looks into keys)
    )
    if model in _before:
        return
    able = getattr(type(model), "_can_set_attn_implementation", None)
    if able is None or not able():
        raise UnsupportedModel(
            f"{type(model).__name__} does not take an attention function from outside (looked for transformers' attention interface); "
            "use one of the architectures in the README's table"
        )
    AttentionMaskInterface.register(NAME, mask)
    config: Any = model.config
    before: str = config._attn_implementation
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    _before[model] = before


def detach(model: nn.Module) -> None:
    """Give the model back the attention it had before :func:`attach`."""
    before = _before.pop(model, None)
    if before is not None:
        model.set_attn_implementation(before)  # type: ignore[operator]
