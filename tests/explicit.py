"""Attention with nothing clever in it: the whole text at once, every weight in a matrix, what may be seen said by a mask.

``explicit(model, ids, allowed)`` runs any transformers model that takes an attention function through it: no cache, no blocks, float64 scores, keys
repeated for their query heads. ``allowed(layer, weights)`` narrows what the model's own mask leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvlab.attention import detach

Allowed = Callable[[int, Tensor, Tensor], Tensor]
_now: list[Allowed | None] = [None]
keys: dict[int, Tensor] = {}  # of the layer that is asked about: float64 [B, Hk, n, D]
values: dict[int, Tensor] = {}
queries: dict[int, Tensor] = {}  # float64 [B, Hq, n, D]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **options: Any
) -> Any:
    b, hq, n, d = query.shape
    group = hq // key.shape[1]
    k, v = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = query.double() @ k.transpose(-1, -2) * (d**-0.5 if scaling is None else scaling)
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    see = torch.ones(n, n, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    see = see.expand(b, hq, n, n)
    narrow = _now[0]
    keys[module.layer_idx], values[module.layer_idx], queries[module.layer_idx] = key.double(), value.double(), query.double()
    if narrow is not None:  # it may also change the scores of what it leaves, in place
        masked = scores.masked_fill(~see, float("-inf"))
        see = see & narrow(module.layer_idx, masked, see)
        scores = masked
    weights = _softmax(scores.masked_fill(~see, float("-inf")), options.get("s_aux"))
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous(), None


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    top = scores.amax(-1, keepdim=True).clamp(min=-1e300)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1)
        top = torch.maximum(top, column)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (column - top).exp()
    return weights / total.clamp(min=1e-300)


def weights_of(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax of one layer's masked scores ``[B, Hq, n, n]``."""
    return _softmax(scores, sinks)


AttentionInterface.register("explicit", _attention)
AttentionMaskInterface.register("explicit", lambda **arguments: sdpa_mask(**{**arguments, "allow_is_causal_skip": False}))


def explicit(model: Any, ids: Tensor, allowed: Allowed | None = None, padding: Tensor | None = None) -> Tensor:
    """Logits ``[B, n, vocabulary]``; padded places are zero."""
    detach(model)
    before = model.config._attn_implementation
    model.set_attn_implementation("explicit")
    _now[0] = allowed
    try:
        extra = {} if padding is None else {"attention_mask": padding, "position_ids": (padding.cumsum(1) - 1).clamp(min=0)}
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, **extra).logits
    finally:
        _now[0] = None
        model.set_attn_implementation(before)
    return logits if padding is None else logits * padding[..., None]
