"""From a transformers config to the shape of a model: what each of its layers keeps, and the sizes that memory depends on.

`kvlab.geometry` is the public face of this file.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Layer:
    """What one layer keeps: `kv_heads` keys and values for each token (the last `window` of them), and a fixed state.

    kind: "full", "sliding", "chunked" (attention inside chunks; its cache holds at most one), "latent" (MLA: all heads share one
    vector, counted as the key, and one rotary key, counted as the value), "linear" (a state, no tokens), "hybrid" (both),
    "shared" (reads another layer's cache), "none" (no attention). key_dim, value_dim: numbers per head and token. window: tokens.
    state: numbers per sequence.
    """

    kind: str
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state: int = 0

    def held(self, tokens: int) -> int:
        """How many of `tokens` tokens this layer needs for the next one (transformers' own cache lets go of one more)."""
        if not self.kv_heads:
            return 0
        return tokens if self.window is None else min(tokens, self.window)

    def __str__(self) -> str:
        return f"{self.kind}({self.window:,})" if self.window else self.kind


_FIELDS = {
    "number of layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden size": ("hidden_size", "n_embd", "d_model"),
    "query heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
_OTHER = ("reformer", "rwkv", "transfo-xl", "xlnet", "xlstm")
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "linear",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid",
    "moe": "none",
    "mlp": "none",
}


def _get(config: Any, names: Sequence[str], default: Any = None) -> Any:
    """The first of `names` that the config has and that is not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _kind(config: Any) -> str:
    return str(getattr(config, "model_type", None) or "model")


def _widest(value: Any) -> Any:
    """A width, or the largest where a config lists one for each layer or each kind of expert."""
    return max(value) if isinstance(value, list | tuple) else value


def _need(config: Any, what: str) -> int:
    value = _get(config, _FIELDS[what])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        kind = getattr(config, "model_type", None) or type(config).__name__
        raise ValueError(f"{kind} config: no {what} (found {value!r}); looked for {', '.join(_FIELDS[what])}")
    return value


def _parse(config: Any) -> tuple[Any, bool]:
    """The decoder's config as an object, and whether transformers knows its type."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if isinstance(config, Mapping):
        kind = str(config.get("model_type"))
        if kind in CONFIG_MAPPING_NAMES:
            try:
                config = CONFIG_MAPPING[kind].from_dict(dict(config))
            except Exception as error:  # its own checks, or a package that it wants: every type raises in its own way
                reason = " ".join(str(error).split())
                raise ValueError(f"{kind} config: transformers cannot read it: {reason}") from error
        elif isinstance(config.get("text_config"), Mapping):
            return _parse(config["text_config"])
        else:
            config = SimpleNamespace(**config)
    named = "this" if isinstance(config, SimpleNamespace) else type(config).__name__
    kind = str(getattr(config, "model_type", named))
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder (is_encoder_decoder): its cross-attention cache is not described here")
    if kind in _OTHER:
        raise ValueError(f"{kind} has no KV cache: it remembers in a way of its own that is not described here")
    if not isinstance(config, PreTrainedConfig):
        return config, False
    inner = config.get_text_config(decoder=True)
    if inner is config and kind in CONFIG_MAPPING_NAMES and not kind.endswith("_text"):
        masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
        if masked or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"{kind} has no KV cache: it is not a causal language model (an encoder reads all tokens at once)")
    return inner, inner.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def read(config: Any, name: str | None, parameters: int | None) -> dict[str, Any]:
    """The fields of `kvlab.geometry.Geometry` for a transformers config, an object or a dict.

    parameters: their number; if None they are counted where transformers knows the type, else unknown (None).
    Raises `ValueError`: a field that is not there (it names what was looked for), a model that has no KV cache.
    """
    config, known = _parse(config)
    count, hidden = _need(config, "number of layers"), _need(config, "hidden size")
    layers = _layers(config, count)
    if not any(layer.kv_heads or layer.state for layer in layers):
        raise ValueError(f"{_kind(config)} has no KV cache of its own: no layer stores anything")
    query_heads = _need(config, "query heads") if any(layer.kv_heads for layer in layers) else 0
    experts, per_token = _get(config, _EXPERTS, 0), _get(config, _PER_TOKEN, 0)
    wide = _widest(_get(config, _INTERMEDIATE, 4 * hidden))
    if experts and per_token:  # the experts that a token visits, beside one another
        expert = _widest(_get(config, ("moe_intermediate_size",), wide))
        wide = max(wide, expert * (per_token + _get(config, ("n_shared_experts",), 0)))
    routed = 0
    if parameters is None and known:
        # where it cannot be built from these fields alone the shape still stands, and `weight_bytes` will say what is missing
        with suppress(Exception):
            parameters, routed = count_parameters(config)
    return {
        "name": name or getattr(config, "_name_or_path", "") or _kind(config),
        "layers": layers,
        "hidden_size": hidden,
        "query_heads": query_heads,
        "intermediate": wide,
        "vocabulary": _need(config, "vocabulary"),
        "context": _get(config, _CONTEXT),
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "parameters": parameters,
        "routed": routed,
        "experts": experts if per_token else 0,
        "experts_per_token": per_token if experts else 0,
    }


def _layers(config: Any, count: int) -> tuple[Layer, ...]:
    types = _get(config, ("layer_types", "layers_block_type"))
    window = _get(config, ("sliding_window",)) if getattr(config, "use_sliding_window", None) is not False else None
    chunk = _get(config, ("attention_chunk_size",))
    if types is None and _get(config, ("conv_L_cache",)):  # LFM2: which layers are convolutions is not to be guessed
        raise ValueError(f"{_kind(config)} config: no kinds of layers beside conv_L_cache; looked for layer_types")
    if types is None:  # the rule of transformers' own cache
        types = ["sliding_attention" if window else "chunked_attention" if chunk else "full_attention"] * count
    count = len(types)
    sharing: list[str | None] | None = _get(config, ("kv_sharing_modes",))
    if sharing is None:
        sharing = [None] * count
        if shared := _get(config, ("num_kv_shared_layers",), 0):
            sharing[-shared:] = ["reuse"] * shared
    apart = _get(config, ("per_layer_config",))
    configs = list(apart) if isinstance(apart, Sequence) and len(apart) == count else [config] * count
    return tuple(
        Layer("shared") if mode == "reuse" else _layer(own, kind, window, chunk)
        for own, kind, mode in zip(configs, types, sharing, strict=True)
    )


def _layer(config: Any, kind: str, window: int | None, chunk: int | None) -> Layer:
    if kind not in _KINDS:
        raise ValueError(f"{_kind(config)} has layers of type {kind!r}; known: {', '.join(_KINDS)}")
    short = _KINDS[kind]
    state = _state(config, kind) if short in ("linear", "hybrid") else 0
    if short in ("linear", "none"):
        return Layer(short, state=state)
    span = chunk if short == "chunked" else window if kind in ("sliding_attention", "hybrid_sliding") else None
    if short in ("sliding", "chunked") and not span:
        looked = "attention_chunk_size" if short == "chunked" else "sliding_window"
        raise ValueError(f"{_kind(config)} has a {short} layer but no {looked}")
    latent = _get(config, ("kv_lora_rank",))
    if latent:  # DeepSeek-V2, arXiv:2405.04434: a compressed vector and one rotary key a token, shared by all heads
        return Layer("latent", 1, latent, _get(config, ("qk_rope_head_dim",), 0), span, state)
    heads = _need(config, "query heads")
    key_dim = _get(config, ("head_dim", "kv_channels")) or _need(config, "hidden size") // heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1  # Falcon-7B, StarCoder
    else:
        kv_heads = _get(config, _KV_HEADS, heads)  # no such field: every head has its own (GPT-2)
    return Layer(short, kv_heads, key_dim, _get(config, ("v_head_dim",), key_dim), span, state)


def _state(config: Any, kind: str) -> int:
    """Numbers of fixed state in one layer: convolution buffer + recurrent state."""
    hidden = _need(config, "hidden size")
    if kind == "conv" and (width := _get(config, ("conv_L_cache",))):  # short convolution, LFM2
        return hidden * width
    if value_heads := _get(config, ("linear_num_value_heads",)):  # gated delta net, Qwen3-Next
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = value_heads * config.linear_value_head_dim
        return (2 * keys + values) * config.linear_conv_kernel_dim + values * config.linear_key_head_dim
    if width := _get(config, ("lru_width",)):  # Griffin / RecurrentGemma: one number a channel, and the convolution's past
        return width * config.conv1d_width
    size, kernel = _get(config, ("state_size", "mamba_d_state", "ssm_state_size")), _get(config, ("conv_kernel", "mamba_d_conv"))
    if size and kernel:
        groups = _get(config, ("n_groups", "mamba_n_groups", "mamba_ngroups"))
        heads = _get(config, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"))
        head_dim = _get(config, ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"))
        if groups and heads and head_dim:  # Mamba-2, arXiv:2405.21060
            inner = heads * head_dim
            return (inner + 2 * groups * size) * kernel + inner * size
        inner = _get(config, ("expand", "mamba_expand"), 2) * hidden  # Mamba, arXiv:2312.00752
        return int(inner) * (kernel + size)
    raise ValueError(
        f"{_kind(config)} has layers of type {kind!r} but no known state; looked for conv_L_cache, "
        "linear_num_value_heads, lru_width, and state_size / mamba_d_state / ssm_state_size with conv_kernel / mamba_d_conv"
    )


# By config: building a model takes a tenth of a second, and its sizes are asked for often.
_counted: dict[str, tuple[int, int]] = {}


def count_parameters(config: Any) -> tuple[int, int]:
    """All parameters of the model that transformers builds from `config`, and those of them in routed experts.

    Built on torch's `meta` device: exact, without memory or weights. Tied matrices count once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    name = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if name not in _counted:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        sizes = {part: parameter.numel() for part, parameter in model.named_parameters()}
        _counted[name] = sum(sizes.values()), sum(size for part, size in sizes.items() if ".experts." in part)
    return _counted[name]
