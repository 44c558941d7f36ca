"""Configs that are easy to read wrongly: a Geometry, or a ValueError that says why not."""

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvlab.geometry import Geometry, Layer, count_parameters, kv_bytes, state_bytes

LFM2 = {
    "model_type": "lfm2_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "layer_types": ["conv", "full_attention"] * 2,
}


def test_lfm2_moe_keeps_tokens_in_some_layers_and_a_state_in_the_others() -> None:
    shape = Geometry.from_config(LFM2)
    assert shape.pattern == "2 x (linear, full)"
    assert kv_bytes(shape, 20) == 2 * 2 * (8 + 8) * 20 * 2
    assert state_bytes(shape) == 2 * 32 * 3 * 2  # conv_L_cache is 3
    assert shape.parameters == count_parameters(AutoConfig.for_model(**LFM2))[0]


def test_lfm2_moe_that_does_not_say_which_layers_attend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lfm2_moe config: no kinds of layers beside conv_L_cache; looked for layer_types"):
        Geometry.from_config({**LFM2, "layer_types": None})


def test_widths_listed_for_each_kind_of_expert() -> None:
    config = {"n_layers": 2, "d_model": 8, "n_heads": 2, "vocab_size": 5, "intermediate_size": 16, "num_experts": 4}
    shape = Geometry.from_config({**config, "num_experts_per_tok": 3, "moe_intermediate_size": [12, 6]})
    assert shape.intermediate == 3 * 12
    assert shape.layers == (Layer("full", 2, 4, 4),) * 2


def test_a_config_that_transformers_refuses_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"llama config: transformers cannot read it: .*vocab_size.*"):
        Geometry.from_config({"model_type": "llama", "vocab_size": "many"})


def test_the_defaults_of_every_causal_type_read_or_say_why_not() -> None:
    crashed = {}
    for kind in [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "ernie4_5_vl_moe"]:
        try:
            assert Geometry.from_config({"model_type": kind}, parameters=1).layers
        except Exception as error:
            if type(error) is not ValueError or not str(error):
                crashed[kind] = repr(error)
    assert not crashed
