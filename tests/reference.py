"""An independent path to what a cache must give: transformers' own cache, and attention recomputed over a kept set with masks."""

import torch
from torch import Tensor
from transformers import DynamicCache

from kvlab.attention import detach
from kvlab.cache import KVCache, forward
from kvlab.strategy import Strategy


def feed(model, cache, ids: Tensor, cuts: list[int], padding: Tensor | None = None) -> Tensor:
    """Logits of ``ids`` read in pieces that end at ``cuts``; padded places are zero."""
    out, start = [], 0
    for stop in cuts:
        out.append(forward(model, ids[:, start:stop], cache, None if padding is None else padding[:, :stop]))
        start = stop
    logits = torch.cat(out, 1)
    return logits if padding is None else logits * padding[..., None]


def plain(model, ids: Tensor, cuts: list[int], padding: Tensor | None = None) -> Tensor:
    """The same through transformers' DynamicCache and its own attention."""
    detach(model)
    before = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):  # older transformers' SDPA leaves the cap out
        model.set_attn_implementation("eager")
    logits = feed(model, DynamicCache(config=model.config), ids, cuts, padding)
    model.set_attn_implementation(before)
    return logits


def ours(model, strategy: Strategy, ids: Tensor, cuts: list[int], padding: Tensor | None = None) -> tuple[Tensor, KVCache]:
    cache = KVCache(model, strategy)
    return feed(model, cache, ids, cuts, padding), cache


def masked_llama(model, ids: Tensor, allowed) -> Tensor:
    """A Llama forward pass in float64 over the whole text where query ``i`` of layer ``l`` sees exactly the keys that
    ``allowed(layer, weights)`` leaves: a function of the layer's causal softmax weights ``[Hq, n, n]`` -> bool ``[Hq, n, n]``.
    One row, no cache: every key keeps its true position."""
    config = model.config
    d, hq, hk = config.hidden_size // config.num_attention_heads, config.num_attention_heads, config.num_key_value_heads
    x = model.model.embed_tokens(ids).double()[0]
    n = x.shape[0]
    cos, sin = (t[0].double() for t in model.model.rotary_emb(x.float()[None], torch.arange(n, device=ids.device)[None]))

    def norm(layer, y):
        return y / (y.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon).sqrt() * layer.weight.double()

    def linear(layer, y):
        return y @ layer.weight.double().T

    def rope(y):
        half = torch.cat([-y[..., d // 2 :], y[..., : d // 2]], -1)
        return y * cos + half * sin

    for number, block in enumerate(model.model.layers):
        h, att = norm(block.input_layernorm, x), block.self_attn
        q = rope(linear(att.q_proj, h).view(n, hq, d).transpose(0, 1))
        k = rope(linear(att.k_proj, h).view(n, hk, d).transpose(0, 1)).repeat_interleave(hq // hk, 0)
        v = linear(att.v_proj, h).view(n, hk, d).transpose(0, 1).repeat_interleave(hq // hk, 0)
        scores = q @ k.transpose(1, 2) / d**0.5
        see = allowed(number, scores)
        weights = scores.masked_fill(~see, float("-inf")).softmax(-1)
        x = x + linear(att.o_proj, (weights @ v).transpose(0, 1).reshape(n, hq * d))
        h = norm(block.post_attention_layernorm, x)
        mlp = block.mlp
        x = x + linear(mlp.down_proj, torch.nn.functional.silu(linear(mlp.gate_proj, h)) * linear(mlp.up_proj, h))
    return linear(model.lm_head, norm(model.model.norm, x))
