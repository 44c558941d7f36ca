"""Tiny random models of every family that kvlab promises to serve, and what is peculiar about each."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers as t
from torch import nn

from tests.conftest import COMMON, DEVICE

BASE: dict[str, Any] = COMMON | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 12

#: name -> (model class, config class, changes). What the name does not say stands behind it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),  # a window in every layer
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),  # biases on q, k and v
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),  # norms on q and k
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {
        "head_dim": 16, "sliding_window": WINDOW, "layer_types": HYBRID, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24,
    }),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": HYBRID}),
    "gemma3n": ("Gemma3nForCausalLM", "Gemma3nTextConfig", {  # the last layers read the keys of earlier ones
        "initializer_range": 0.1, "head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW, "vocab_size_per_layer_input": 97,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "intermediate_size": [96] * 5, "activation_sparsity_pattern": [0.0] * 5,
    }),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {  # chunked attention, a layer without positions, experts
        "head_dim": 16, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "no_rope_layers": [1, 0, 1], "moe_layers": [1],
    }),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {"clip_qkv": 2.0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"rotary_pct": 0.25}),  # positions on a quarter of each head
    "opt": ("OPTForCausalLM", "OPTConfig", {"word_embed_proj_dim": 64, "ffn_dim": 96}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {  # sinks as parameters
        "initializer_range": 0.12, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 16, "sliding_window": WINDOW, "layer_types": HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
MULTI_HEAD = {"gpt2", "gpt_neox", "opt"}  # no grouped heads


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights at every call; what is left at 0 or 1 by initialization is made random, or a fault there would not show."""
    if dtype != torch.float32:
        other = copy.deepcopy(model(name)).to(dtype)
        if hasattr(other, "set_experts_implementation"):
            other.set_experts_implementation("eager")  # the fast one knows no float64
        return other
    kind, config, changes = FAMILIES[name]
    base = {k: v for k, v in BASE.items() if not (name in MULTI_HEAD and k == "num_key_value_heads")}
    torch.manual_seed(0)
    made = getattr(t, kind)(getattr(t, config)(**{**base, **changes})).eval().to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1 and parameter.numel() > 1 and float(parameter.std()) == 0:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "sinks"):
                module.sinks.copy_(torch.randn(module.sinks.shape, generator=generator))
    return made.requires_grad_(False)
