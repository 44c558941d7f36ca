"""Looking at numbers that a person wrote down: codes, scales, errors, sizes and bits that can be worked out by hand."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvlab
from kvlab import store
from kvlab.cache import forward
from kvlab.measure import inspect
from kvlab.measure.inspect import Recorded


def recorded(keys: torch.Tensor, values: torch.Tensor | None = None, layers: int = 1) -> Recorded:
    """One batch row from ``[heads, tokens, dim]``, the same in every layer."""
    values = keys if values is None else values
    words = tuple(f"w{number}" for number in range(keys.shape[1]))
    return Recorded(words, ((keys[None], values[None]),) * layers, (0,) * layers, (None,) * layers)


@pytest.fixture
def ladder() -> Recorded:
    """8 tokens, 8 channels, one head: channel c of token t is 10c + 2t, so a channel spans 14 and a token 70."""
    return recorded(10.0 * torch.arange(8)[None, None, :] + 2.0 * torch.arange(8)[None, :, None])


def test_keys_per_channel_values_per_token(ladder):
    made = inspect.write(ladder, store.Int(bits=4, group_size=8))
    key = inspect.token(made, "keys", head=0, token=3)
    # channel 5 runs from 50 to 64: scale 14 / 15, and 56 is 6.43 steps up
    assert key.scale[5] == pytest.approx(14 / 15, rel=1e-3)
    assert (key.codes[5], key.zero[5], key.exact[5]) == (6, 50, 56)
    assert key.back[5] == pytest.approx(50 + 6 * 14 / 15, rel=1e-3)
    assert key.error[5] == pytest.approx(-0.4, abs=0.01)
    value = inspect.token(made, "values", head=0, token=3)
    # token 3 runs from 6 to 76: scale 70 / 15, and 56 is 10.71 steps up
    assert value.scale[5] == pytest.approx(70 / 15, rel=1e-3)
    assert (value.codes[5], value.zero[5]) == (11, 6)
    assert np.allclose(value.codes * value.scale + value.zero, value.back)
    assert value.word == "w3"
    assert not value.plain


def test_one_scale_for_everything(ladder):
    key = inspect.token(inspect.write(ladder, store.Int(bits=2, group_size=8, key_axis="tensor")), "keys", 0, 7)
    assert set(key.zero.tolist()) == {0}
    assert key.scale[0] == pytest.approx(84 / 3)
    assert key.codes.tolist() == [0, 1, 1, 2, 2, 2, 3, 3]  # 14, 24, ... 84, over 28


def test_bits_count_scales_and_what_is_plain(ladder):
    made = inspect.write(ladder, store.Int(bits=4, group_size=8))
    # a group of 8 numbers has a scale and a zero point of 16 bits each
    assert made.bits() == {row: {"codes": 4.0, "scales": 4.0} for row in ("keys", "values", "both")}
    assert made.promised == {"keys": 4, "values": 4}
    assert made.numbers == {"keys": 64, "values": 64, "both": 128}
    assert made.parts["both"] == {"codes": 64, "scales": 64}
    waiting = inspect.write(ladder, store.Int(bits=4, group_size=16))
    assert waiting.bits()["both"] == {"residual": 32.0}
    assert waiting.plain == 32
    assert inspect.token(waiting, "keys", 0, 3).plain
    assert inspect.write(ladder, store.Dense()).bits()["keys"] == {"keys": 32.0}
    assert inspect.write(ladder, store.Dense()).promised == {}
    assert inspect.write(ladder, store.Mixed(bits=8, value_bits=2, group_size=8)).promised == {"keys": 8, "values": 2}


def test_the_tail_and_the_first_tokens_are_plain(ladder):
    made = inspect.write(ladder, store.Int(bits=8, group_size=8, key_axis="token", residual=2, sinks_exact=1))
    assert [inspect.token(made, "keys", 0, t).plain for t in range(8)] == [True, *[False] * 5, True, True]
    plain, coded = inspect.token(made, "keys", 0, 7), inspect.token(made, "keys", 0, 1)
    assert plain.relative == 0
    assert plain.codes is plain.scale is plain.zero is None
    assert coded.zero[0] == 2  # token 1 starts at 2: the codes' rows are counted from the first coded token
    assert inspect.channel(made, "keys", 0, 7, 0).levels is None


@pytest.mark.parametrize("symmetric", [False, True])
def test_levels_are_what_the_codes_can_say(ladder, symmetric):
    made = inspect.write(ladder, store.Int(bits=2, group_size=8, symmetric=symmetric))
    found = inspect.channel(made, "keys", 0, 3, 5)
    assert found.counts.sum() == found.tokens == 8
    assert (found.edges[0], found.edges[-1], found.number) == (50, 64, 56)
    expected = [-64, 0, 64] if symmetric else [50, 50 + 14 / 3, 50 + 28 / 3, 64]
    assert found.levels == pytest.approx(expected, rel=1e-3)
    assert found.inside == (1 if symmetric else (found.levels <= 64).sum())
    back = inspect.token(made, "keys", 0, 3).back[5]
    assert np.abs(found.levels - back).min() < 1e-5


def test_floats_have_levels_too(ladder):
    made = inspect.write(ladder, store.Fp8())
    found = inspect.channel(made, "values", 0, 3, 7)
    assert found.levels.max() == pytest.approx(76, rel=1e-3)  # the token's largest number is the format's largest
    assert len(found.levels) == 253  # 256 bytes, less two NaN, and the two zeros are one
    assert np.abs(found.levels - made.values.back[0, 3, 7]).min() < 1e-4


def test_sizes_of_channels_before_and_after_a_rotation():
    keys = torch.zeros(1, 8, 8)
    keys[:, :, 2] = torch.tensor([8.0, -8, 8, -8, 8, -8, 8, -4])
    plain = inspect.channels(inspect.write(recorded(keys), store.Int(bits=8, group_size=8)), "keys", 0)
    assert plain.size.tolist() == [0, 0, 8, 0, 0, 0, 0, 0]
    assert (plain.low[2], plain.high[2]) == (-8, 8)
    assert plain.written is None
    made = inspect.write(recorded(keys), store.Rotated(store.Int(bits=8, group_size=8, key_axis="token")))
    turned = inspect.channels(made, "keys", 0)
    assert turned.size.tolist() == plain.size.tolist()
    assert turned.written == pytest.approx([8 / 8**0.5] * 8)  # spread evenly over eight channels
    assert made.keys.form == "once rotated"
    assert inspect.token(made, "keys", 0, 0).codes is None  # they belong to other channels
    assert inspect.channel(made, "keys", 0, 0, 2).form == "once rotated"
    assert made.bits()["both"] == {"codes": 8.0, "scales": 4.0}


def test_the_outlier_is_against_the_median():
    keys = torch.ones(1, 8, 8)
    keys[..., 3] = 6
    assert inspect.channels(inspect.write(recorded(keys), store.Dense()), "keys", 0).outlier == 6


def test_errors_by_layer():
    keys = torch.tensor([0.0, 1, 2, 10]).repeat(2)[None, None].repeat(1, 8, 1)  # a step of 10 / 3: 0, 0, 3.33, 10
    values = torch.zeros(1, 8, 8)
    made = inspect.layer_errors(recorded(keys, values, layers=3), store.Int(bits=2, group_size=8, key_axis="token"))
    expected = ((1 + (4 / 3) ** 2) / 105) ** 0.5
    assert made.keys == pytest.approx([expected] * 3, rel=1e-3)
    assert made.mean("keys") == pytest.approx(expected, rel=1e-3)
    assert made.values.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda made: inspect.token(made, "keys", 1, 0), r"head=1 is out of range \(allowed: 0 to 0\)"),
        (lambda made: inspect.token(made, "keys", 0, 8), r"token=8 is out of range \(allowed: 0 to 7\)"),
        (lambda made: inspect.token(made, "keys", 0, True), r"token=True is out of range \(allowed: 0 to 7\)"),
        (lambda made: inspect.channel(made, "keys", 0, 0, -1), r"channel=-1 is out of range \(allowed: 0 to 7\)"),
        (lambda made: inspect.channels(made, "queries", 0), r"what='queries' is not one of 'keys', 'values'"),
    ],
)
def test_what_is_not_there_is_said(ladder, call, words):
    with pytest.raises(ValueError, match=words):
        call(inspect.write(ladder, store.Int(group_size=8)))


def test_a_layer_that_is_not_there_is_said(ladder):
    with pytest.raises(ValueError, match=r"layer=1 is out of range \(allowed: 0 to 0\)"):
        inspect.write(ladder, store.Int(), 1)


def test_what_is_recorded_is_what_transformers_keeps(tiny_lab):
    ids = tiny_lab.encode("The quick brown fox jumps over the lazy dog.")
    made = inspect.record(tiny_lab, ids)
    plain = DynamicCache(config=tiny_lab.model.config)
    forward(tiny_lab.model, ids, plain)
    assert "".join(made.words) == "The quick brown fox jumps over the lazy dog."
    assert made.first == (0, 0, 0)
    for own, theirs in zip(made.layers, plain.layers, strict=True):
        assert torch.allclose(own[0], theirs.keys, atol=1e-5)
        assert torch.allclose(own[1], theirs.values, atol=1e-5)
    with pytest.raises(ValueError, match="prompt='' is empty"):
        inspect.record(tiny_lab, "")


def test_codes_are_those_of_a_cache_in_use(tiny_lab):
    """What is shown is what a run with this store holds in the first layer, whose input no store changes."""
    ids, how = tiny_lab.encode("x" * 7 + "y" * 9), store.Int(bits=4, group_size=8)
    cache = kvlab.KVCache(tiny_lab.model, kvlab.Strategy(store=how))
    tiny_lab.prefill(ids, cache)
    held = cache.layers[0].dense()
    made = inspect.write(inspect.record(tiny_lab, ids), how)
    assert np.allclose(made.keys.back, held[0][0].numpy(), atol=1e-5)
    assert np.allclose(made.values.back, held[1][0].numpy(), atol=1e-5)
