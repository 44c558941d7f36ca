"""The memory formula against arithmetic that a person can redo, and against the tensors of transformers' own caches."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvlab import geometry
from kvlab.geometry import Geometry, bytes_per_token, kv_bytes, state_bytes

K = 1024


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("GPT-2", 12 * 12 * (64 + 64) * 2),  # 36,864
        ("SmolLM2-135M", 30 * 3 * (64 + 64) * 2),  # 23,040
        ("Llama-2-7B", 32 * 32 * (128 + 128) * 2),  # 524,288
        ("Llama-3.1-8B", 32 * 8 * (128 + 128) * 2),  # 131,072
        ("Llama-3.1-70B", 80 * 8 * (128 + 128) * 2),  # 327,680
        ("Llama-3.1-405B", 126 * 8 * (128 + 128) * 2),  # 516,096
        ("Mixtral-8x7B", 131_072),  # experts share the attention
        ("Qwen2.5-7B", 28 * 4 * (128 + 128) * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),  # 70,272
        ("Falcon-7B", 32 * 1 * (64 + 64) * 2),  # MQA
        ("Gemma-2-9B", 42 * 8 * (256 + 256) * 2),
        ("Gemma-3-27B", 62 * 16 * (128 + 128) * 2),
        ("gpt-oss-20b", 24 * 8 * (64 + 64) * 2),
        ("Jamba-v0.1", 4 * 8 * (128 + 128) * 2),  # 4 of 32 layers attend
        ("Mamba-2.8B", 0),
    ],
)
def test_bytes_of_one_token(model: str, expected: int) -> None:
    assert bytes_per_token(geometry.find(model)) == expected


def test_seventy_billion_at_128k_needs_40_gib_only_with_8_kv_heads() -> None:
    model = geometry.find("Llama-3.1-70B")
    assert kv_bytes(model, 128 * K) == 40 * 2**30 == 42_949_672_960
    assert round(geometry.gb(kv_bytes(model, 128 * K)), 1) == 42.9
    assert kv_bytes(model.with_kv_heads(64), 128 * K) == 320 * 2**30
    assert kv_bytes(model, 128 * K, requests=10) == 400 * 2**30
    assert kv_bytes(model, 128 * K, batch=5, requests=2) == 400 * 2**30


def test_windows_flatten_the_line() -> None:
    gemma = geometry.find("Gemma-2-9B")  # every second layer sees 4,096 tokens
    assert bytes_per_token(gemma, after=4095) == 344_064
    assert bytes_per_token(gemma, after=4096) == 344_064 // 2
    assert kv_bytes(gemma, 8192) == 21 * (4096 + 8192) * 8 * 512 * 2
    mistral = geometry.find("Mistral-7B-v0.1")  # every layer does
    assert kv_bytes(mistral, 4096) == kv_bytes(mistral, 32768) == 4096 * 131_072
    oss = geometry.find("gpt-oss-20b")
    assert bytes_per_token(oss, after=128) == 12 * 8 * 128 * 2
    scout = geometry.find("Llama-4-Scout")  # 3 of 4 layers attend inside chunks of 8,192
    assert bytes_per_token(scout, after=8192) == 12 * 8 * 256 * 2
    gemma3 = geometry.find("Gemma-3-27B")  # 5 of 6; 62 = 10 x 6 + 2
    assert bytes_per_token(gemma3, after=1024) == 10 * 16 * 256 * 2


def test_a_state_space_is_flat() -> None:
    mamba = geometry.find("Mamba-2.8B")  # 64 layers, inner width 5,120, 16 numbers of state and 4 of convolution a channel
    assert kv_bytes(mamba, 1) == kv_bytes(mamba, 1_000_000) == 0
    assert state_bytes(mamba) == 64 * 5120 * (16 + 4) * 2 == 13_107_200
    assert state_bytes(mamba, requests=3, bits=32) == 6 * 13_107_200
    assert geometry.max_tokens(mamba, 80 * 10**9) is None
    assert (mamba.kind, mamba.kv_heads, mamba.head_choices) == ("state space", 0, ())
    jamba = geometry.find("Jamba-v0.1")
    assert state_bytes(jamba) == 28 * 8192 * (16 + 4) * 2


def test_codes_and_their_scales() -> None:
    model = geometry.find("Llama-3.1-8B")
    full = kv_bytes(model, K)
    assert full / kv_bytes(model, K, bits=8, group_size=64) == pytest.approx(16 / 8.5)  # 1.88x, not 2x
    assert full / kv_bytes(model, K, bits=4, group_size=64) == pytest.approx(16 / 4.5)  # 3.56x, not 4x
    assert full / kv_bytes(model, K, bits=4, group_size=64, zero=False) == pytest.approx(16 / 4.25)
    assert full / kv_bytes(model, K, bits=2, group_size=32) == pytest.approx(16 / 3)  # KIVI: 5.33x
    assert kv_bytes(model, K, k_bits=8, v_bits=4) == full * 6 // 16
    assert kv_bytes(model, K, bits_per_element=4.5) == kv_bytes(model, K, bits=4, group_size=64)
    assert kv_bytes(model, K, bits_per_element=5.333) * 8 >= 5.333 * full / 2  # rounded up, never down


def test_a_strategy_keeps_a_number_or_a_function_of_the_tokens() -> None:
    model = geometry.find("SmolLM2-135M")
    assert kv_bytes(model, 2000, kept_tokens=256) == 256 * 23_040
    assert kv_bytes(model, 100, kept_tokens=256) == 100 * 23_040
    assert kv_bytes(model, 2000, kept_tokens=lambda tokens: tokens // 5) == 400 * 23_040
    gemma = geometry.find("Gemma-2-9B")  # a window that is shorter still holds
    assert kv_bytes(gemma, 8192, kept_tokens=6000) == 21 * (4096 + 6000) * 8 * 512 * 2


# --- does it fit


def test_weights_and_breakdown() -> None:
    model = geometry.find("Llama-3.1-8B")
    assert geometry.weight_bytes(model) == 2 * 8_030_261_248
    assert geometry.weight_bytes(model, 4) == 8_030_261_248 // 2
    assert geometry.weight_bytes(geometry.find("gpt-oss-20b"), bits_per_element=4.25) == 20_914_757_184 * 17 // 32
    parts = geometry.breakdown(model, 4096, requests=2, chunk=512)
    assert parts.kv == 2 * 4096 * 131_072
    assert parts.total == parts.weights + parts.kv + parts.activations
    # 512 rows: residual and normed copy, then gate, up and product (3 x 14,336, more than q, k, v and output); one row of logits
    assert parts.activations == 512 * (2 * 4096 + 3 * 14_336) * 2 + 128_256 * 4
    assert geometry.activation_bytes(model, 0) == 0


def test_the_longest_sequence_that_fits() -> None:
    model = geometry.find("Llama-3.1-8B")
    longest = geometry.max_tokens(model, 80 * 10**9, requests=16)
    assert longest is not None
    assert geometry.breakdown(model, longest, requests=16).total <= 80 * 10**9
    assert geometry.breakdown(model, longest + 1, requests=16).total > 80 * 10**9
    quarter = geometry.max_tokens(model, 80 * 10**9, requests=16, bits=4)
    assert quarter is not None
    assert quarter // 4 == pytest.approx(longest, abs=2)
    assert geometry.max_tokens(model, 16 * 10**9) == 0  # the weights alone are 16.06 GB


def test_what_a_mixture_reads() -> None:
    mixtral, deepseek = geometry.find("Mixtral-8x7B"), geometry.find("DeepSeek-V3")
    assert mixtral.active_parameters == 46_702_792_704 - 45_097_156_608 * 3 // 4
    assert deepseek.active_parameters is not None
    assert round(deepseek.active_parameters / 1e9, 1) == 37.6
    assert geometry.find("Llama-3.1-8B").active_parameters == 8_030_261_248


# --- against transformers

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 64, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 1}
DELTA = {"linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPARSE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS = {
    "llama, MHA": ("llama", {**TINY, "num_key_value_heads": 4}, "MHA"),
    "llama, GQA": ("llama", TINY, "GQA"),
    "llama, head dim of its own": ("llama", {**TINY, "head_dim": 16}, "GQA"),
    "gpt2": ("gpt2", GPT, "MHA"),
    "falcon": ("falcon", {**TINY, "multi_query": True}, "MQA"),
    "mistral": ("mistral", {**TINY, "sliding_window": 8}, "sliding"),
    "gemma2": ("gemma2", {**TINY, "head_dim": 8, "sliding_window": 8}, "sliding"),
    "gpt_oss": (
        "gpt_oss",
        {**TINY, "head_dim": 8, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "sliding",
    ),
    "llama4": ("llama4_text", {**TINY, "head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2}, "sliding"),
    "deepseek_v3": ("deepseek_v3", {**TINY, "num_key_value_heads": 4, **MLA, **MOE}, "MLA"),
    "mamba": ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}, "state space"),
    "jamba": ("jamba", {**TINY, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4}, "hybrid"),
    "qwen3_next": ("qwen3_next", {**TINY, "head_dim": 8, **DELTA, **SPARSE}, "hybrid"),
    "lfm2": ("lfm2", {**TINY, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}, "hybrid"),
}


def tensors(thing: object) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


@pytest.mark.parametrize("case", MODELS)
def test_config_gives_the_bytes_of_the_real_cache(case: str) -> None:
    kind, fields, attention = MODELS[case]
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    batch, tokens = 2, 20
    with torch.no_grad():
        out = model(torch.randint(3, 60, (batch, tokens)), use_cache=True)
    cache = next(out[key] for key in ("cache", "past_key_values", "cache_params") if out.get(key) is not None)
    held = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    if attention == "MLA" and held[0][0].shape[1] != 1:
        pytest.skip("this transformers caches MLA's keys and values, not its latent")
    numbers = sum(tensor.numel() for pair in held for tensor in tensors(pair))
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("conv_states", "recurrent_states")]

    shape = Geometry.from_config(config)
    assert shape.kind == attention
    # between steps transformers holds window - 1 tokens; the step that follows needs the window
    newest = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in shape.kv_layers if layer.window)
    assert kv_bytes(shape, tokens, batch=batch) == 2 * (numbers + batch * newest)
    assert state_bytes(shape, batch=batch) == 2 * sum(tensor.numel() for tensor in tensors(states))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied == config.tie_word_embeddings


def test_a_sliding_window_cache_reads_its_whole_window() -> None:
    config = AutoConfig.for_model("mistral", **TINY, sliding_window=8)
    layer = DynamicCache(config=config).layers[0]
    for _ in range(20):
        keys, values = layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    assert kv_bytes(Geometry.from_config(config), 20) == 4 * 2 * (keys.numel() + values.numel())


def test_a_dict_reads_like_the_object() -> None:
    config = AutoConfig.for_model("gemma2", **TINY, head_dim=8, sliding_window=8)
    assert Geometry.from_config(config.to_dict(), name="x") == Geometry.from_config(config, name="x")
    unknown = {"model_type": "of-my-own", "n_layers": 2, "d_model": 8, "n_heads": 4, "num_kv_heads": 2, "vocab_size": 5}
    shape = Geometry.from_config(unknown)
    assert (shape.pattern, shape.kv_heads, shape.key_dim, shape.parameters) == ("2 x full", 2, 2, None)
    assert Geometry.from_config({"text_config": unknown}).layers == shape.layers
    with pytest.raises(ValueError, match="parameters unknown"):
        geometry.weight_bytes(shape)


def test_layers_that_share_a_cache_or_differ() -> None:
    base = {"n_layers": 6, "d_model": 8, "n_heads": 4, "num_kv_heads": 2, "vocab_size": 5, "sliding_window": 3}
    types = ["sliding_attention", "full_attention"] * 3
    shape = Geometry.from_config({**base, "layer_types": types, "num_kv_shared_layers": 2})
    assert [layer.kind for layer in shape.layers] == ["sliding", "full", "sliding", "full", "shared", "shared"]
    assert kv_bytes(shape, 10) == (2 * 3 + 2 * 10) * 2 * (2 + 2) * 2
    wide = AutoConfig.for_model("mimo_v2_flash", **TINY)  # values narrower than keys
    layer = Geometry.from_config(wide, parameters=1).layers[0]
    assert (layer.key_dim, layer.value_dim) == (wide.head_dim, wide.v_head_dim)


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Llama-3.1-8B", "Gemma-3-27B", "Mixtral-8x7B", "DeepSeek-V3", "Mamba-2.8B"])
def test_the_table_counts_what_transformers_builds(model: str) -> None:
    row = geometry._table()[model]
    config = dict(row["config"])
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    assert geometry.count_parameters(built) == (row["parameters"], row["routed"])


def test_every_row_reads_and_has_a_source() -> None:
    for name in geometry.names():
        shape = geometry.find(name)
        assert shape.name == name
        assert shape.source
        assert str(shape).startswith(name)


# --- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": -1}, r"tokens=-1; allowed: whole numbers from 0"),
        ({"tokens": 1.5}, r"tokens=1.5"),
        ({"tokens": True}, r"tokens=True"),
        ({"batch": 0}, r"batch=0; allowed: whole numbers from 1"),
        ({"requests": "two"}, r"requests='two'"),
        ({"bits": 5}, r"bits=5; allowed: 2, 3, 4, 8, 16, 32"),
        ({"v_bits": 7}, r"bits=7"),
        ({"bits": 4, "group_size": 48}, r"group_size=48 does not divide the head dim 64"),
        ({"bits": 4, "group_size": 0}, r"group_size=0"),
        ({"bits": 4, "group_size": 32, "scale_bits": 12}, r"scale_bits=12"),
        ({"group_size": 64}, r"group_size=64 with bits=16"),
        ({"bits_per_element": 0}, r"bits_per_element=0; allowed: above 0, up to 32"),
        ({"bits_per_element": 4.5, "group_size": 64}, r"bits_per_element=4.5 includes the scales"),
        ({"kept_tokens": -3}, r"kept_tokens=-3"),
    ],
)
def test_bad_settings_name_value_and_range(change: dict, message: str) -> None:
    settings = {"tokens": 10, **change}
    with pytest.raises(ValueError, match=message):
        kv_bytes(geometry.find("SmolLM2-135M"), settings.pop("tokens"), **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "x", "d_model": 8}, "no number of layers .*looked for num_hidden_layers, n_layer"),
        ({"model_type": "x", "n_layer": 2, "d_model": 8, "vocab_size": 5}, "no query heads .*num_attention_heads, n_head"),
        ({"model_type": "x", "n_layer": 0, "d_model": 8}, r"no number of layers \(found 0\)"),
        ({"model_type": "bert"}, "bert has no KV cache"),
        ({"model_type": "vit"}, "vit has no KV cache"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "rwkv"}, "rwkv has no KV cache"),
        (
            {"model_type": "x", "n_layer": 1, "d_model": 8, "n_head": 2, "layer_types": ["odd"]},
            "layers of type 'odd'; known: full",
        ),
        (
            {"model_type": "x", "n_layer": 1, "d_model": 8, "layer_types": ["linear_attention"]},
            "no known state; looked for conv_L",
        ),
        ({"n_layer": 1, "d_model": 8, "n_head": 2, "layer_types": ["sliding_attention"]}, "sliding layer but no sliding_window"),
    ],
)
def test_a_config_without_a_cache_says_what_was_looked_for(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry.from_config(config)


def test_names_are_forgiving_and_errors_list_them() -> None:
    assert geometry.find("llama 3.1-70b").name == "Llama-3.1-70B"
    assert geometry.find("mamba").name == "Mamba-2.8B"
    with pytest.raises(ValueError, match=r"could be any of: Qwen2.5-7B, Qwen2.5-72B"):
        geometry.find("qwen")
    with pytest.raises(ValueError, match=r"no model 'gpt-5'; known: GPT-2, SmolLM2"):
        geometry.find("gpt-5")
    with pytest.raises(ValueError, match=r"kv_heads=5 does not divide the 64 query heads; allowed: 1, 2, 4"):
        geometry.find("Llama-3.1-70B").with_kv_heads(5)
    with pytest.raises(ValueError, match="keeps no heads apart"):
        geometry.find("DeepSeek-V3").with_kv_heads(8)


def test_bytes_for_people() -> None:
    assert [geometry.text(count) for count in (0, 999, 23_040, 13_107_200, 42_949_672_960, 1.5e12)] == [
        "0 B",
        "999 B",
        "23.0 kB",
        "13.1 MB",
        "42.9 GB",
        "1.50 TB",
    ]
    assert geometry.gib(2**30) == geometry.gb(10**9) == 1.0


def test_find_reads_a_config_of_your_own(tmp_path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in (str(folder), f"{folder}/", str(folder / "config.json")):
        shape = geometry.find(path)
        assert shape.name == "mine" and geometry.bytes_per_token(shape) == 3 * 2 * (16 + 16) * 2
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    assert geometry.bytes_per_token(geometry.find(str(folder))) == 6 * 2 * (16 + 16) * 2  # edited, and read again
    for wrong in (None, [1]):
        with pytest.raises(ValueError, match="is no text"):
            geometry.find(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no model's config.json"), ("{", "no model's config.json"), ("[]", "holds no fields"), ("{}", "looked for")],
)
def test_find_says_what_is_wrong_with_a_config(tmp_path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        geometry.find(f"{tmp_path}/config.json")
